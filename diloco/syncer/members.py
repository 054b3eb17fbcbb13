"""Which islands live, by the observer's own clock."""

from collections.abc import Iterable

from diloco.snapshots import records


class MemberWatch:
  """Believes an island alive while its beat moves."""

  def __init__(self, ttl_secs: float):
    """Args: how long a beat may stand still."""
    self._ttl_secs = ttl_secs
    self._seen: dict[int, tuple[tuple[int, int], float]] = {}

  def present(
    self, members: Iterable[records.Member], now: float
  ) -> dict[int, float]:
    """Returns the seconds a step takes each island that rounds wait for."""
    live = {}
    for member in members:
      beat = (member.incarnation, member.beat)
      seen = self._seen.get(member.island)
      if seen is None or seen[0] != beat:
        self._seen[member.island] = seen = (beat, now)
      if now - seen[1] < self._ttl_secs:
        live[member.island] = member
    return {m: one.step_secs for m, one in live.items() if one.present}
