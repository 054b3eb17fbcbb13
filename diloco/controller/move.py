"""How a run gets another controller, and another directory, as scripts.

Who takes a run over watches first whether anything of it lives. Of several who
try, the lease lets one.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from diloco import errors, timing
from diloco.snapshots import (
  keys,
  lease,
  members,
  operations,
  records,
  restore,
)

_POLL_SECS = 0.2
_LEASES = {
  "controller": keys.CONTROLLER_LEASE,
  "syncer": keys.SYNCER_LEASE,
}


def alive(what: str) -> errors.UserError:
  """What to tell who wants a run that has a controller."""
  return errors.UserError(
    what, "a controller of this run is alive", "stop it first"
  )


def check_home(
  held: records.Lease,
  home: str,
  what: str,
  unused: Callable[[], bool],
  lives: Callable[[str], bool | None],
) -> None:
  """Refuses a run that goes on in another directory than `home`.

  Unless nothing of it is there: then `unused`. A process may be known to live.
  """
  if held.home in ("", home):
    return
  # Asked first, for it may begin its run and die meanwhile.
  alive_still = bool(held.owner) and lives(held.owner)
  if not unused():
    raise errors.UserError(
      what,
      "its run was taken over, and goes on in another directory",
      "go on there, or take it back: 'diloco resume URL --workdir=NEW'",
    )
  if alive_still:
    raise alive(what)


def taking(
  owner: str,
  home: str,
  what: str,
  ttl_secs: float,
  watch: Any,
  clock: Callable[[], float],
  say: Callable[[str], None],
) -> operations.Script[int]:
  """Takes the lease of a run for a directory; gives its token.

  Raises:
    UserError: a controller of the run lives.
    OSError: the store fails.
  """
  first, told = None, False
  while True:
    above = yield from restore.newest_token()
    token: int = yield from lease.acquire(
      keys.CONTROLLER_LEASE, owner, watch, clock, home, above
    )
    if token:
      return token
    held = watch.held
    if held is not None and held.owner:
      first = first or held
      if held != first or watch.lives(held.owner):
        raise alive(what)
    if not told and (held is None or held.owner):
      say(f"{what}: is its controller alive? watching {ttl_secs:.0f} s")
      told = True
    yield _POLL_SECS


class Move(abc.ABC):
  """A run on its way to another directory.

  Attributes:
    what: the run, for a user.
    run_name: see `process.run_name`.
    each: reads several members.
    times: the run's timeouts.
    watch: of the controller's lease; it asks `check`.
    owner: name of who moves it.
    before: id of the directory it was in.
    clock: gives monotonic seconds.
    say: tells the user.
  """

  what: str
  run_name: str
  each: operations.Each
  times: timing.Timing
  watch: Any
  owner: str
  before: str
  clock: Callable[[], float]
  say: Callable[[str], None]

  _watched: records.Lease | None = None  # as it stood for so long
  _has_watched = False

  def check(self, held: records.Lease) -> None:
    """Refuses a lease that somebody has had since it was watched.

    Whoever that was may have the run go on, and be gone again.
    """
    token = self._watched.token if self._watched else 0
    if self._has_watched and held.owner != self.owner and held.token != token:
      raise alive(self.what)

  @abc.abstractmethod
  def told_cuts(self) -> list[int] | None:
    """Cuts that the tapes tell of, newest first; None if these hold all.

    Asked once nothing of the run has lived for long. It may refuse the run, and
    has deposed nobody yet, who may only be stopped.
    """

  @abc.abstractmethod
  def take(self) -> operations.Script[int]:
    """Takes the lease and holds it, and leaves it as it was if that fails."""

  @abc.abstractmethod
  def go_back(self, cut: int, token: int) -> operations.Script[str]:
    """Goes back to a cut; says why it will not do, if so."""

  @abc.abstractmethod
  def torn(self, why: str) -> Exception:
    """What to say of a run that cannot go on."""

  def moving(self) -> operations.Script[bool]:
    """Has the run go on here; gives whether it was set back.

    Raises:
      UserError: the run is alive, or cannot go on from what its store has.
    """
    self.before = yield from home()
    self._watched = yield from self._refuse_living()
    self._has_watched = True
    told = self.told_cuts()
    token = yield from self.take()
    if told is None:
      return False
    why = "they tell of no such cut"
    for cut in told:
      if not (why := (yield from self.go_back(cut, token))):
        return True
    raise self.torn(why)

  def _refuse_living(self) -> operations.Script[records.Lease | None]:
    """Watches for signs of life as long as a living role could give none.

    Not so if all have said that they leave, and none has begun since.
    """
    times = self.times
    first = yield from signs(self.run_name, self.each)
    held: records.Lease | None = first["controller"]
    free = self.watch.expired(held, self.clock())
    there = [s for s in first.values() if isinstance(s, records.Member)]
    led = first["syncer"] is not None and bool(first["syncer"].owner)
    all_left = free and not led and there and all(one.left for one in there)
    if all_left and not (yield from _begun_since(there)):
      return held
    secs = max(times.member_ttl_secs, 0.0 if free else times.control_ttl_secs)
    self.say(f"{self.what}: is it alive? watching {secs:.0f} s")
    end = self.clock() + secs
    while self.clock() < end:
      yield min(times.heartbeat_secs, 1.0)
      now = yield from signs(self.run_name, self.each)
      for role in sorted({*first, *now}):
        if first.get(role) != now.get(role):
          raise errors.UserError(
            self.what,
            f"it is alive: its {role} gives signs of life",
            "stop it where it runs, and give the command again",
          )
    return held


def home() -> operations.Procedure[str]:
  """Id of the directory that a run is in; empty if none is known."""
  held, _ = yield from operations.sound(keys.CONTROLLER_LEASE, records.Lease)
  return held.home if held else ""


def _begun_since(there: list[records.Member]) -> operations.Procedure[bool]:
  """Whether a life was drawn later than those that have signed in."""
  newest = {one.role: one.incarnation for one in there}
  for name in (yield operations.Names(keys.LIVES)):
    role, _, kind = name.partition(".")
    if kind == "token":
      key = lease.drawn_key(keys.lives_key(role))
      drawn, _ = yield from operations.sound(key, records.DrawnToken)
      if drawn is None or drawn.token > newest.get(role, 0):
        return True
  return False


def signs(
  run: str, each: operations.Each = operations.in_turn
) -> operations.Procedure[dict[str, Any]]:
  """The last sign of life of every role, by its name for a user.

  Raises:
    UserError: roles of another run are in its store.
  """
  found: dict[str, Any] = {}
  for role, key in _LEASES.items():
    found[role], _ = yield from operations.sound(key, records.Lease)
  everyone = yield from members.of_run(run, each)
  for member in everyone:
    where = f"{member.role} on {member.host} (process {member.pid})"
    found[where] = member
  return found
