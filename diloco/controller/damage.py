"""Damage to global versions: when a run that is on goes back to a cut.

Pure decisions: what syncers report and the time come in, fragments to mend go
out. A leader mends what it can by itself, so damage counts only once it has
stood for a while. The way back is that of a resume, and takes all roles.
"""

from collections.abc import Collection, Iterable


class DamageWatch:
  """What the syncers of one session say is damaged, and for how long."""

  def __init__(self, patience_secs: float):
    """Damage counts once it has stood for `patience_secs`."""
    self._patience_secs = patience_secs
    self._told: dict[str, frozenset[int]] = {}  # by seat, its newest report
    self._since: dict[int, float] = {}  # fragment -> when it was first told
    self._left_alone: frozenset[int] = frozenset()

  def told(self, seat: str, damaged: Iterable[int], now: float) -> None:
    """A syncer says which fragments nobody can read, as far as it knows.

    What one said that died since stands until it, or its successor in the
    same seat, says something else: nobody has mended it.
    """
    self._told[seat] = frozenset(damaged)
    standing = frozenset[int]().union(*self._told.values())
    self._since = {p: self._since.get(p, now) for p in standing}

  def due(self, now: float) -> list[int]:
    """Fragments to go back for; empty if none needs it."""
    standing = frozenset(
      p
      for p, since in self._since.items()
      if now - since >= self._patience_secs
    )
    return sorted(standing) if standing - self._left_alone else []

  def leave_alone(self, fragments: Collection[int]) -> None:
    """Nothing can be done about these: no reason to try again."""
    self._left_alone |= frozenset(fragments)

  def begin_anew(self) -> None:
    """The run was set back."""
    self._told, self._since = {}, {}
    self._left_alone = frozenset()
