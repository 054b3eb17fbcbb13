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
  """What a version tells an island of its publications."""

  version: int
  merged_step: int  # the island's last step in it
  holes: Sequence[Sequence[int]] = ()  # (first, last] before that, in none

  def reach(self, first_step: int) -> int:
    """The last step after `first_step` up to which it has all."""
    gaps = [max(a, first_step) for a, b in self.holes if b > first_step]
    return min([self.merged_step, *gaps])


@dataclasses.dataclass(eq=False, slots=True)
class Loan:
  """Publications that start from one version, and what was lent to them."""

  base: int  # the version
  first_step: int  # where they begin
  end: int = 0  # the last step of the longest that may be merged
  lent: Values | None = None
  # By each that is kept, by its last step.
  left: dict[int, Values] = dataclasses.field(default_factory=dict)


class Saved(NamedTuple):
  """What a saved state has of a fragment."""

  known: int  # what was published after this step is not in it
  owed: Values | None
  loans: list[Loan]  # of which it is not known what became


class Feedback:
  """Of one fragment."""

  def __init__(
    self, max_staleness: int, add: Callable[[Values, Values], Values]
  ):
    """Owes nothing. Contributions may be behind by `max_staleness` versions."""
    self._max_staleness = max_staleness
    self._add = add
    self._owed: Values | None = None
    self._loans: list[Loan] = []  # of which it is not known what became
    self._current: Loan | None = None

  def lend(self, base: int, first_step: int) -> Values | None:
    """What a publication from this version on is to contain besides."""
    if self._current is None:
      self._current = Loan(base, first_step, lent=self._owed)
      self._loans.append(self._current)
      self._owed = None
    return self._current.lent

  def published(self, step: int, left: Values) -> None:
    """It was encoded, and this is left; as many are kept as references are."""
    assert self._current is not None
    first = [*self._current.left.items()][: core.PUBLICATIONS_KEPT - 1]
    self._current.left = dict([*first, (step, left)])
    self._current.end = step

  def settle(self, news: News | None) -> None:
    """A version is about to be adopted, which tells this.

    It tells nothing if its steps cannot be told from those of an earlier life,
    which took what it owed with it.
    """
    if news is None:
      self._owed, self._loans = None, []
      return
    open_loans = []
    for loan in self._loans:
      first, reached = loan.first_step, news.reach(loan.first_step)
      stale = news.version - loan.base > self._max_staleness
      if reached > first:
        # In the middle may be one of which is not kept what it left.
        self._owe(loan.left.get(min(reached, loan.end)))
      elif stale or news.merged_step > first or loan.end <= first:
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

  def saved(self, step: int) -> Saved:
    """For a saved state, after `step`."""
    known = step if self._current is None else self._current.end
    loans = [dataclasses.replace(x, left={**x.left}) for x in self._loans]
    return Saved(known, self._owed, loans)

  def restore(self, saved: Saved, first_step: int, news: News) -> None:
    """Takes over what an earlier life saved, if it knew all that counts.

    The fragment's progress counts from `first_step` now: what was published
    beyond it came to nothing. The `news` are of the version to start from.
    """
    self._owed, self._loans, self._current = None, [], None
    if first_step > saved.known:
      return
    self._owed = saved.owed
    for loan in saved.loans:
      end = min(loan.end, first_step)
      # How stale it is counts from here: at worst its end is found out later.
      loan = dataclasses.replace(loan, base=news.version, end=end)
      self._loans.append(loan)
    self.settle(news)
