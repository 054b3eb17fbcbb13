"""Errors a user can act on.

A `UserError` is the caller's mistake or the machine's shortage. The command
line prints it as one line and exits with code 2; nothing has been touched.
"""

import contextlib
import dataclasses
import errno
import importlib
import math
import pathlib
import reprlib
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

_TRACE = "Traceback (most recent call last):"
_MAX_TEXT = 300  # of an exception's own words
_MISTAKES = (
  *(ArithmeticError, AssertionError, AttributeError, LookupError),
  *(NameError, SystemExit, TypeError, ValueError),
)
_GENERAL = (Exception, RuntimeError)  # but not what is derived from them


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


class OwnCodeError(UserError):
  """Code of the user's failed in the midst of a run; its cause is theirs."""


class EndedStreamError(UserError):
  """A task's stream has no further batch."""


def is_mistake(error: BaseException) -> bool:
  """Whether only code can be to blame, and neither a machine nor a network.

  Libraries have kinds of their own for what these do.
  """
  if not isinstance(error, _MISTAKES) and type(error) not in _GENERAL:
    return False
  before: BaseException | None = error
  while before is not None and not isinstance(before, OSError | MemoryError):
    before = before.__cause__ or before.__context__
  return before is None


def require(holds: bool, what: str, why: str, remedy: str) -> None:
  """Raises a `UserError` unless something holds."""
  if not holds:
    raise UserError(what, why, remedy)


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
  """Refuses a place, named by the user, in which a file cannot be written."""
  try:
    yield
  except OSError as error:
    raise UserError(
      what,
      f"it cannot be written ({error.strerror or error})",
      "name a file in a directory that is there",
    ) from error


def refuse_tilde(what: str, path: pathlib.Path) -> None:
  """Refuses a path that is not there and has a '~' that no shell replaced."""
  why = "nobody has put a home in, so it would be a folder of the name '~'"
  holds = "~" not in path.parts or path.exists()
  require(holds, what, why, "write the whole path, or $HOME")


def directory(what: str, given: Any) -> pathlib.Path:
  """Takes a directory as a user names it, whether or not it is there.

  Raises:
    UserError: nothing can have this name.
  """
  remedy = "name a directory, as a string or a pathlib.Path"
  try:
    path = pathlib.Path(given)
    path.stat()
  except TypeError as error:
    raise UserError(
      f"{what}={given!r}", f"a {type(given).__name__} is no path", remedy
    ) from error
  except ValueError as error:  # a NUL, or what the file system cannot write
    raise UserError(f"{what}={given!r}", str(error), remedy) from error
  except OSError as error:
    if error.errno == errno.ENAMETOOLONG:
      what = f"{what}={reprlib.repr(str(given))}"
      why = f"it is too long a name, of {len(str(given))} characters"
      raise UserError(what, why, "name a shorter one") from error
  return path


RULES: Mapping[str, Callable[[float], bool]] = {
  "at least 0": lambda x: 0 <= x < math.inf,
  "at least 1": lambda x: 1 <= x < math.inf,
  "above 0": lambda x: 0 < x < math.inf,
  "at least 0 and below 1": lambda x: 0 <= x < 1,
  "above 0 and at most 1": lambda x: 0 < x <= 1,
  "between 0 and 1": lambda x: 0 <= x <= 1,
  "between 0 and 1, exclusive": lambda x: 0 < x < 1,
}


NO_AMOUNT = "nothing is of this size, below 1e-30 or above 1e30"


def is_amount(value: float) -> bool:
  """Whether it is 0 or of a size that something could have.

  Products and quotients of several such numbers are finite, and not 0.
  """
  return not value or 1e-30 <= abs(value) <= 1e30


def check(
  of: Any,
  rules: Mapping[str, Collection[str]],
  where: str = "",
  equals: str = " = ",
) -> None:
  """Refuses numbers that are not as they must be.

  Args:
    of: an object with fields.
    rules: from what numbers must be, a key of `RULES`, to fields' names.
    where: what the object is called, such as "fleet.", before a name.
    equals: between a name and its value.
  """
  for rule, names in rules.items():
    for name in names:
      value = getattr(of, name)
      what = f"{where}{name}{equals}{value}"
      remedy = f"change {where}{name}"
      require(RULES[rule](value), what, f"it must be {rule}", remedy)


def check_amounts(of: Any, where: str = "") -> None:
  """Refuses fields of a dataclass that are no finite numbers of 0 or more."""
  names = [field.name for field in dataclasses.fields(of)]
  amounts = [n for n in names if isinstance(getattr(of, n), int | float)]
  check(of, {"at least 0": amounts}, where)


def needed(module: str, what: str, extra: str = "workbench") -> Any:
  """A module of a package that not everybody has.

  Args:
    module: its name.
    what: needs it, for people.
    extra: of this package, which brings it.

  Raises:
    UserError: it is not installed.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    name, remedy = error.name or module, f"pip install '.[{extra}]' in a clone"
    raise UserError(what, f"{name} is not installed", remedy) from error


class DetachedError(RuntimeError):
  """The controller ended by an error of its own; its roles go on alone."""


class FailedRunError(RuntimeError):
  """A run has failed; what is left of it can be looked at and gone on with."""


class StoreError(OSError):
  """A snapshot store cannot be reached, read or written."""


class PlainError(RuntimeError):
  """One whose text tells people all: where it was raised adds nothing."""


class FencedError(PlainError):
  """Another process has this one's place; it must not write anything more."""


class CorruptSnapshotError(PlainError):
  """A stored object is torn, missing or does not match its checksum.

  Attributes:
    generation: of a damaged record, to write over it by compare-and-set.
  """

  generation: Any = None


def one_line(error: BaseException) -> str:
  """An exception's kind and text on one line, whatever the text holds.

  Of a traceback in it, as JAX has of a callback's, that is the last line.
  """
  before, _, trace = f"{type(error).__name__}: {error}".partition(_TRACE)
  text = " ".join([*before.split(), *trace.strip().splitlines()[-1:]])
  return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def of_store(error: BaseException) -> str:
  """What a store's failure says, without the details behind TensorStore's."""
  return " ".join(str(error).partition(" [")[0].split())


def with_place(error: BaseException) -> str:
  """`one_line`, with the file and line it comes from, the user's if any."""
  frames = traceback.extract_tb(error.__traceback__)
  ours = [
    str(pathlib.Path(__file__).parent),
    *(sysconfig.get_path(n) for n in ("stdlib", "purelib", "platlib")),
  ]
  theirs = [
    frame for frame in frames if not frame.filename.startswith((*ours, "<"))
  ]
  where = [*frames[-1:], *theirs][-1:]
  places = [f" ({pathlib.Path(f.filename).name}:{f.lineno})" for f in where]
  return "".join([one_line(error), *places])
