"""Errors a user can act on.

A `UserError` is the caller's mistake or the machine's shortage. The command
line prints it as one line and exits with code 2; nothing has been touched.
"""

from typing import Any


class UserError(ValueError):
  """What was asked, why it cannot be, and what to do, in one line."""

  def __init__(self, what: str, why: str, remedy: str):
    """Joins the three parts into one line.

    Args:
      what: the thing asked for, with its name and value.
      why: the rule it breaks, with the other value.
      remedy: what the user can do.
    """
    super().__init__(f"{what}: {why}; {remedy}")
    self.what = what
    self.why = why
    self.remedy = remedy


class FencedError(RuntimeError):
  """This syncer's lease was taken over; it must not commit anything more."""


class DetachedError(RuntimeError):
  """The controller ended by an error of its own; its roles go on alone."""


class CorruptSnapshotError(RuntimeError):
  """A stored object is torn, missing or does not match its checksum.

  Attributes:
    generation: of a damaged record, to write over it by compare-and-set.
  """

  generation: Any = None


def one_line(error: BaseException) -> str:
  """An exception's kind and text on one line, whatever the text holds."""
  return " ".join(f"{type(error).__name__}: {error}".split())
