"""Error feedback: what encoding left out goes with a later publication.

With g a fragment's difference since its anchor, e what is *owed* and Q the
codec, an island publishes Q(g + e), and (g + e) - Q(g + e) is what that *left*.
A publication may come to nothing: dropped, superseded by one that contains it,
refused, lost. So what is owed is *lent* to the publications that start from one
version, of which at most one is merged, and a new version tells what became of
them:

    merged        what it left is owed
    never will be what was lent is owed again
    not known     it may be merged late: both stay where they are

The sum of what was merged and of what is owed and lent is then the sum of the
differences of what was merged, whatever was dropped. All of it belongs to one
fragment of one island, and lies in host memory.

Reference: Karimireddy et al., arXiv 1901.09847 (error feedback); here with
rounds that are asynchronous and may be dropped.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from diloco.islands import core

Values: TypeAlias = Mapping[str, Any]  # a fragment's tensors


class News(NamedTuple):
  """What a version tells an island of its publications.

  Attributes:
    version: its number.
    merged_step: the island's last step in it.
    holes: steps (first, last] before that which no version has.
  """

  version: int
  merged_step: int
  holes: Sequence[Sequence[int]] = ()

  def has(self, first_step: int, step: int) -> bool:
    """Whether steps (first_step, step] are in it."""
    return step <= self.merged_step and not any(
      first < step and first_step < last for first, last in self.holes
    )


class Saved(NamedTuple):
  """What a saved state has of a fragment.

  Attributes:
    owed: None for nothing.
    lent: to the publication below.
    left: by the newest publication that starts from the fragment's anchor.
    first_step: where that begins.
    step: where it ends; 0 without one.
  """

  owed: Values | None = None
  lent: Values | None = None
  left: Values | None = None
  first_step: int = 0
  step: int = 0


@dataclasses.dataclass(slots=True)
class _Loan:
  """Publications that start from one version, and what was lent to them."""

  base: int
  first_step: int
  lent: Values | None
  left: dict[int, Values] = dataclasses.field(default_factory=dict)  # by step


class Feedback:
  """Of one fragment."""

  def __init__(
    self, max_staleness: int, add: Callable[[Values, Values], Values]
  ):
    """Owes nothing.

    Args:
      max_staleness: versions that a contribution may be behind.
      add: adds tensor by tensor.
    """
    self._max_staleness = max_staleness
    self._add = add
    self._owed: Values | None = None
    self._loans: list[_Loan] = []  # of which it is not known what became
    self._current: _Loan | None = None

  def lend(self, base: int, first_step: int) -> Values | None:
    """What a publication from this version on is to contain besides."""
    if self._current is None:
      self._current = _Loan(base, first_step, self._owed)
      self._loans.append(self._current)
      self._owed = None
    return self._current.lent

  def published(self, step: int, left: Values) -> None:
    """It was encoded, and this is left; as many are kept as references are."""
    assert self._current is not None
    first = [*self._current.left.items()][: core.PUBLICATIONS_KEPT - 1]
    self._current.left = dict([*first, (step, left)])

  def settle(self, news: News | None) -> None:
    """A version is about to be adopted.

    Args:
      news: what it tells; None if its steps cannot be told from those of an
        earlier life, which took what it owed with it.
    """
    if news is None:
      self._owed, self._loans = None, []
      return
    open_loans = []
    for loan in self._loans:
      merged = [s for s in loan.left if news.has(loan.first_step, s)]
      stale = news.version - loan.base > self._max_staleness
      if merged:
        self._owe(loan.left[max(merged)])
      elif stale or news.merged_step >= max(loan.left):
        self._owe(loan.lent)
      else:
        open_loans.append(loan)
    self._loans = open_loans

  def rebased(self) -> None:
    """What is published next starts from another version."""
    self._current = None

  def _owe(self, more: Values | None) -> None:
    if self._owed is not None and more is not None:
      more = self._add(self._owed, more)
    self._owed = more if more is not None else self._owed

  def saved(self) -> Saved:
    """For a saved state: older publications count as never merged in it."""
    now = self._current
    copy = Feedback(self._max_staleness, self._add)
    copy._owed = self._owed
    for loan in self._loans:
      if loan is not now:
        copy._owe(loan.lent)
    if now is None or now not in self._loans:
      return Saved(copy._owed)
    step, left = [*now.left.items()][-1]
    return Saved(copy._owed, now.lent, left, now.first_step, step)

  def restore(
    self, saved: Saved, saved_step: int, first_step: int, news: News
  ) -> None:
    """Takes over what an earlier life saved, if it knew all that counts.

    Args:
      saved: what it saved.
      saved_step: after which step.
      first_step: where the fragment's progress counts from now: beyond what the
        state knows to be published there is what it does not know of.
      news: of the version to start from.
    """
    self._owed, self._loans, self._current = None, [], None
    if first_step > (saved.step or saved_step):
      return
    self._owed = saved.owed
    if first_step < saved.step:
      self._owe(saved.lent)  # what was published came to nothing
    elif saved.left is not None:
      left = {saved.step: saved.left}
      loan = _Loan(news.version, saved.first_step, saved.lent, left)
      self._loans.append(loan)
      self.settle(news)
