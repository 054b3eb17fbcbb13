"""Faults of the simulated world, each with a coordinate of its own.

A fault strikes either a role's n-th store operation, counted over all its
incarnations, or the first from then on that changes a key of one kind, or an
interval of virtual time. It is consumed once. So one can be taken out of a
schedule without moving the others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

# At a role's n-th operation.
KILL_BEFORE = "kill_before"  # the process dies, the operation never happened
KILL_AFTER = "kill_after"  # it took effect, and nobody heard of it
KILL_LATE = "kill_late"  # the process dies, the operation lands `secs` later
FAIL_BEFORE = "fail_before"  # OSError, without effect
FAIL_AFTER = "fail_after"  # OSError, although it took effect
UNEXPECTED = "unexpected"  # an error that no code foresees, without effect
SLOW = "slow"  # lands and answers `secs` later
DUPLICATE = "duplicate"  # lands now, and once more `secs` later
STOP = "stop"  # SIGSTOP for `secs` before it; the clock goes on
TORN = "torn"  # the process dies and leaves what it wrote damaged
CORRUPT = "corrupt"  # what it wrote rots right after
LOST = "lost"  # what it wrote disappears right after
UNLISTED = "unlisted"  # a commit record is in no listing for `secs`

# At a role's n-th life, so many seconds after it began.
EXIT_ALIKE = "exit_alike"  # it ends by an error, always in the same words
EXIT = "exit"  # by one of its own
# So long after a user has begun to move a run; else before.
MACHINE_LOST = "machine_lost"
# For good: whoever is started on the n-th slice dies at once.
BAD_SLICE = "bad_slice"

# From a time on, for `secs`.
KILL = "kill"
PAUSE = "pause"  # SIGSTOP
PARTITION = "partition"  # this role cannot reach the store
OUTAGE = "outage"  # nobody can
DISK_FULL = "disk_full"  # writes fail
STALE = "stale"  # this role sees old listings
POISON = "poison"  # an island's parameters become non-finite
UNREADABLE = "unreadable"  # an island's saved state cannot be read
# `secs` is a factor here.
OUTLIER = "outlier"  # an island's progress becomes so many times too long
OUTLIERS = "outliers"  # from then on everybody's progress is so much longer

# So long after the user has ended the session.
KILL_ENDING = "kill_ending"

# Whoever is asked for the last evaluation, the n-th time anybody is.
KILL_ASKED = "kill_asked"  # so many seconds later
PAUSE_ASKED = "pause_asked"
CUT_ASKED = "cut_asked"  # it cannot reach the store
SLOW_ASKED = "slow_asked"  # its next operation takes so long

# At a time, to a fragment's newest version, if the run can go back to a cut
# without it; that happens `secs` later, and until then the fragment stands.
HEAD_CORRUPT = "head_corrupt"  # its head does not match its checksum
HEAD_LOST = "head_lost"
HEAD_SWAPPED = "head_swapped"  # another fragment's head is there in its place
GLOBAL_CORRUPT = "global_corrupt"  # the payload its head points to
GLOBAL_LOST = "global_lost"

AT_OPERATION = (
  KILL_BEFORE,
  KILL_AFTER,
  KILL_LATE,
  FAIL_BEFORE,
  FAIL_AFTER,
  UNEXPECTED,
  SLOW,
  DUPLICATE,
  STOP,
  TORN,
  CORRUPT,
  LOST,
  UNLISTED,
)
AT_TIME = (
  KILL,
  PAUSE,
  PARTITION,
  OUTAGE,
  DISK_FULL,
  STALE,
  POISON,
  UNREADABLE,
  OUTLIER,
  OUTLIERS,
)
SPOILING = (
  HEAD_CORRUPT,
  HEAD_LOST,
  GLOBAL_CORRUPT,
  GLOBAL_LOST,
  HEAD_SWAPPED,
)
OUTLYING = (OUTLIER, OUTLIERS)
EXITS = (EXIT_ALIKE, EXIT)
OF_THE_ASKED = (KILL_ASKED, PAUSE_ASKED, CUT_ASKED, SLOW_ASKED)
# What can strike between two operations.
AT_POINT = (KILL_BEFORE, KILL_AFTER, STOP)
# What no store is allowed to do: some of the guarantees end here.
BEYOND_CONTRACT = (TORN, CORRUPT, LOST)


class Fault(NamedTuple):
  """One fault."""

  kind: str  # one of this module's constants
  role: str  # whom it strikes, "fragment-<p>" where it is no role; "" for all
  at: float  # number of the operation, or seconds of virtual time
  # How long, where that means something; of outliers, the factor.
  secs: float = 0.0
  # Prefix of the keys of which it strikes a change; "" for any operation.
  near: str = ""

  def __str__(self) -> str:
    where = f"{self.role or 'all'} " if self.role or self.at else ""
    at = f"t={self.at:.3f}"
    if self.kind in AT_OPERATION:
      at = f"operation {self.at:.0f}"
      at += f" or later, a change of {self.near}" if self.near else ""
    elif self.kind in EXITS:
      at = f"in life {self.at:.0f}"
    elif self.kind == MACHINE_LOST:
      at = f"{self.at:.3f} s after somebody moves it"
    elif self.kind == BAD_SLICE:
      at = f"no. {self.at:.0f}"
    elif self.kind in OF_THE_ASKED:
      at = f"asking no. {self.at:.0f}"
    elif self.kind == KILL_ENDING:
      at = f"{self.at:.3f} s after the end began"
    lasting = f" for {self.secs:.3f} s" if self.secs else ""
    if self.kind in OUTLYING:
      lasting = f" by {self.secs:g}"
    return f"{self.kind} {where}at {at}{lasting}"


# How often each kind is drawn; most faults are those the contract allows.
_WEIGHTS = {
  KILL_BEFORE: 6,
  KILL_AFTER: 6,
  KILL_LATE: 5,
  FAIL_BEFORE: 5,
  FAIL_AFTER: 6,
  SLOW: 6,
  DUPLICATE: 5,
  STOP: 5,
  TORN: 2,
  CORRUPT: 2,
  LOST: 1,
  KILL: 8,
  PAUSE: 5,
  PARTITION: 5,
  OUTAGE: 2,
  DISK_FULL: 2,
  STALE: 4,
  POISON: 2,
  UNREADABLE: 2,
}
_KINDS = tuple(_WEIGHTS)
_CUMULATIVE = tuple(
  sum(list(_WEIGHTS.values())[: i + 1]) for i in range(len(_WEIGHTS))
)


def draw(
  rng: random.Random,
  roles: Sequence[str],
  count: int,
  horizon_secs: float,
  operations: int,
) -> tuple[Fault, ...]:
  """Draws faults, of time before a horizon and of some first operations."""
  uniform = rng.random
  found = []
  for kind in rng.choices(_KINDS, cum_weights=_CUMULATIVE, k=count):
    role = roles[int(uniform() * len(roles))]
    if kind in (POISON, UNREADABLE):
      islands = [r for r in roles if r[0] == "i"]
      role = islands[int(uniform() * len(islands))]
    elif kind in (OUTAGE, DISK_FULL):
      role = ""
    # Many short ones, and some that outlast every timeout.
    secs = round(0.02 * 400 ** uniform(), 3)
    if kind in AT_OPERATION:
      at = float(1 + int(uniform() * operations))
      secs = secs if kind in (KILL_LATE, SLOW, DUPLICATE, STOP) else 0.0
    else:
      at = round(uniform() * horizon_secs, 3)
      secs = 0.0 if kind in (KILL, POISON) else secs
    found.append(Fault(kind, role, at, secs))
  return tuple(found)


def draw_spoiling(
  rng: random.Random, fragments: int, horizon_secs: float
) -> Fault:
  """Draws what damages or loses the newest version of a fragment."""
  uniform = rng.random
  return Fault(
    SPOILING[int(uniform() * len(SPOILING))],
    f"fragment-{int(uniform() * fragments)}",
    round((0.3 + 0.7 * uniform()) * horizon_secs, 3),
    # Time for nothing, or for several cuts that nobody can go back to.
    round(0.3 + 25.0 * uniform() ** 2, 3),
  )


# No length is just what the gate allows: roundings would decide, its and the
# checker's.
_UNEVEN = 0.000271828


def draw_outliers(
  rng: random.Random, islands: int, fragments: int, horizon_secs: float
) -> tuple[Fault, ...]:
  """Draws faults that make progress too long, in a tenth of all schedules."""
  uniform = rng.random
  if uniform() >= 0.1:
    return ()
  found = []
  for _ in range(1 + int(4 * uniform())):
    at = round((0.2 + 0.8 * uniform()) * horizon_secs, 3)
    # From what passes to what nobody would take for sound.
    factor = round(4.0 * 25.0 ** uniform(), 3) + _UNEVEN
    role = f"island-{int(uniform() * islands)}"
    found.append(Fault(OUTLIER, role, at, factor))
  if uniform() < 0.6 and fragments == 1 and islands == 4:
    # Of several fragments each has a gate of its own, and all its islands may
    # be suspended long before one gives in.
    at = round(uniform() * horizon_secs, 3)
    found.append(Fault(OUTLIERS, "", at, round(30.0 + 70.0 * uniform(), 3)))
  return tuple(found)


# Keys that are changed seldom, and who does it.
NEAR_CUTS = "cuts/"
_SYNCERS = ("syncer", "standby")
_SELDOM = (
  (NEAR_CUTS, ("island", "syncer", "standby", "controller", "restorer")),
  ("heads/", ("syncer", "standby", "restorer")),
  ("leases/", ("syncer", "standby", "restorer")),
  ("verdicts/", _SYNCERS),
  ("epoch", ("restorer",)),
  ("contributions/", ("syncer", "standby", "island")),
)
_NEAR_KINDS = (
  KILL_BEFORE,
  KILL_AFTER,
  KILL_LATE,
  FAIL_BEFORE,
  FAIL_AFTER,
  SLOW,
  DUPLICATE,
  STOP,
)


def draw_near(
  rng: random.Random, roles: Sequence[str], has_cuts: bool
) -> tuple[Fault, ...]:
  """Draws faults at changes that are seldom, in a third of schedules.

  Drawn by number, an operation is mostly one of the many reads.

  Args:
    rng: source of randomness.
    roles: all of the run.
    has_cuts: whether it is cut; then most schedules have them, most at cuts.
  """
  uniform = rng.random
  if uniform() >= (0.7 if has_cuts else 0.25):
    return ()
  found = []
  for _ in range(1 + int(3 * uniform())):
    near, who = _SELDOM[int(uniform() * len(_SELDOM))]
    if has_cuts and uniform() < 0.7:
      near, who = _SELDOM[0]
      who = _SYNCERS if uniform() < 0.4 else who
    able = [role for role in roles if role.startswith(who)]
    if able:
      kind = _NEAR_KINDS[int(uniform() * len(_NEAR_KINDS))]
      lasting = kind in (KILL_LATE, SLOW, DUPLICATE, STOP)
      secs = round(0.02 * 400 ** uniform(), 3) if lasting else 0.0
      role = able[int(uniform() * len(able))]
      at = float(1 + int(100 * uniform() ** 2))
      found.append(Fault(kind, role, at, secs, near))
  return tuple(found)


def draw_unlisted(
  rng: random.Random, islands: int, horizon_secs: float
) -> tuple[Fault, ...]:
  """Draws commit records that are listed late, and others before them."""
  uniform = rng.random
  return tuple(
    Fault(
      UNLISTED,
      f"island-{int(uniform() * islands)}",
      float(1 + int(uniform() * 100)),
      round(0.3 + uniform() * horizon_secs, 3),
    )
    for _ in range(1 + int(uniform() * 4))
  )


def draw_unexpected(
  rng: random.Random, roles: Sequence[str], operations: int
) -> tuple[Fault, ...]:
  """Draws errors that no code foresees, in a tenth of all schedules."""
  uniform = rng.random
  if uniform() >= 0.1:
    return ()
  role = roles[int(uniform() * len(roles))]
  first = 1 + int(uniform() * operations)
  # One passes, several in a row end who met them.
  row = range(first, first + (1, 6)[uniform() < 0.5])
  return tuple(Fault(UNEXPECTED, role, float(at)) for at in row)


def draw_rare(
  rng: random.Random, roles: Sequence[str], horizon_secs: float
) -> tuple[Fault, ...]:
  """Draws faults that follow each other, in a tenth of all schedules.

  What they lead to, single faults hardly ever would: an island that is refused
  again and again until it is suspended, and then dies or sees its syncer die.
  """
  uniform = rng.random
  if uniform() >= 0.1:
    return ()
  islands = [role for role in roles if role.startswith("island-")]
  role = islands[int(uniform() * len(islands))]
  at = (0.1 + 0.5 * uniform()) * horizon_secs
  found = []
  if uniform() < 0.7:
    for _ in range(3 + int(3 * uniform())):
      found.append(Fault(POISON, role, round(at, 3)))
      at += 1.0 + 3.0 * uniform()
    if uniform() < 0.5:
      found.append(Fault(KILL, "syncer", round(at, 3)))
      if "standby" in roles and uniform() < 0.5:
        found.append(Fault(KILL, "standby", round(at, 3)))
  if uniform() < 0.9:
    lasting = round(2.5 + 3.0 * uniform(), 3)
    found.append(Fault(UNREADABLE, role, round(at, 3), lasting))
  found.append(Fault(KILL, role, round(at + 0.5 * uniform(), 3)))
  return tuple(found)


def draw_around_cuts(
  rng: random.Random, roles: Sequence[str], horizon_secs: float
) -> tuple[Fault, ...]:
  """Draws what is hard on cuts, in most schedules that have any.

  A lease torn while one is open, an island that takes its part with a fragment
  muted, a restore that chooses by an old listing.
  """
  uniform = rng.random
  found = []
  if uniform() < 0.3:
    at = float(1 + int(uniform() * 100))
    found.append(Fault(TORN, "syncer", at))
  if uniform() < 0.3:
    islands = [role for role in roles if role.startswith("island-")]
    for _ in range(1 + int(3 * uniform())):
      role = islands[int(uniform() * len(islands))]
      found.append(Fault(KILL, role, round(uniform() * horizon_secs, 3)))
  if "restorer" in roles and uniform() < 0.3:
    at = round((0.4 + uniform()) * horizon_secs, 3)
    found.append(Fault(STALE, "restorer", at, round(5 + 15 * uniform(), 3)))
  return tuple(found)


def draw_hanging(
  rng: random.Random, roles: Sequence[str], horizon_secs: float
) -> tuple[Fault, ...]:
  """Draws roles that hang longer than a controller bears, and its deaths."""
  uniform = rng.random
  found = []
  for _ in range(1 + int(3 * uniform())):
    role = roles[int(uniform() * (len(roles) - roles.count("controller")))]
    at = round(uniform() * horizon_secs, 3)
    found.append(Fault(PAUSE, role, at, round(4 + 16 * uniform(), 3)))
  if uniform() < 0.7:
    at = float(1 + int(uniform() * 60))
    found.append(Fault(KILL_BEFORE, "controller", at))
  return tuple(found)


def draw_deposing(rng: random.Random) -> tuple[Fault, ...]:
  """Draws what keeps a controller from going back until another has the run."""
  uniform = rng.random
  role = ("restorer", "restorer-2")[uniform() < 0.3]
  at = float(1 + int(uniform() * 70))
  kind = STOP if uniform() < 0.8 else KILL_LATE
  return (Fault(kind, role, at, round(2.0 + 8.0 * uniform(), 3)),)


def draw_fatal(
  rng: random.Random, roles: Sequence[str], restarts: int, horizon_secs: float
) -> tuple[Fault, ...]:
  """Draws roles that die so often in a row that they may be given up."""
  uniform = rng.random
  islands = [role for role in roles if role.startswith("island-")]
  victims = rng.sample(islands, min(len(islands), 1 + int(2 * uniform())))
  if uniform() < 0.3:
    victims = [role for role in roles if role in ("syncer", "standby")]
  at = uniform() * horizon_secs
  found = []
  for _ in range(restarts + 1 + int(3 * uniform())):
    found += [Fault(KILL, role, round(at + uniform(), 3)) for role in victims]
    at += 1.0 + uniform()
  return tuple(found)


def draw_returning(rng: random.Random) -> tuple[Fault, ...]:
  """Draws what meets a controller while it goes back to a cut by itself."""
  uniform = rng.random
  kinds = (KILL_BEFORE, KILL_AFTER, KILL_LATE, FAIL_BEFORE, FAIL_AFTER, STOP)
  found = []
  for _ in range(int(3 * uniform())):
    kind = kinds[int(uniform() * len(kinds))]
    secs = round(8.0 * uniform(), 3) if kind in (KILL_LATE, STOP) else 0.0
    found.append(Fault(kind, "restorer", float(1 + int(uniform() * 60)), secs))
  return tuple(found)


def draw_long_spoiling(
  rng: random.Random, fragments: int, horizon_secs: float
) -> tuple[Fault, ...]:
  """Draws a spoiled version that several cuts will point to."""
  uniform = rng.random
  return (
    Fault(
      (GLOBAL_CORRUPT, GLOBAL_LOST)[uniform() < 0.5],
      f"fragment-{int(uniform() * fragments)}",
      round((0.3 + 0.4 * uniform()) * horizon_secs, 3),
      round(12.0 + 13.0 * uniform(), 3),
    ),
  )


def draw_ending(rng: random.Random, roles: Sequence[str]) -> tuple[Fault, ...]:
  """Draws roles that die while a session ends, in half of all that do."""
  uniform = rng.random
  if uniform() < 0.5:
    return ()
  return tuple(
    Fault(
      KILL_ENDING,
      roles[int(uniform() * len(roles))],
      round(10.0 * uniform() ** 2, 3),
    )
    for _ in range(1 + int(3 * uniform()))
  )


def draw_asked(rng: random.Random, supervised: bool) -> tuple[Fault, ...]:
  """Draws what meets those who are asked for the last evaluation.

  Args:
    rng: source of randomness.
    supervised: whether the controller kills who is silent for long; if nobody
      does, nobody is.
  """
  uniform = rng.random
  found: list[Fault] = []
  if uniform() < 0.3:
    return ()
  for number in range(1, 2 + int(3 * uniform())):
    kind = OF_THE_ASKED[int(uniform() * len(OF_THE_ASKED))]
    most = 0.5 if kind == KILL_ASKED else 100.0
    if kind == PAUSE_ASKED and not supervised:
      most = 5.0
    found.append(
      Fault(kind, "", float(number), round(most * uniform() ** 2, 3))
    )
  return tuple(found)


def draw_exits(rng: random.Random, roles: Sequence[str]) -> tuple[Fault, ...]:
  """Draws roles that end by errors at the beginning of a run."""
  uniform = rng.random
  found: list[Fault] = []
  able = [role for role in roles if role != "controller"]
  victims = rng.sample(able, min(len(able), 1 + int(2 * uniform())))
  if uniform() < 0.4:  # as for a mistake of the user's
    victims = [role for role in roles if role.startswith("island-")]
  for role in victims:
    begins = int(2 * uniform())
    for life in range(1 + begins, 2 + begins + int(3 * uniform())):
      kind = EXIT_ALIKE if uniform() < 0.6 else EXIT
      # Mostly before an island has made a step.
      secs = round(0.4 * 6 ** uniform() - 0.4, 3)
      found.append(Fault(kind, role, float(life), secs))
  if uniform() < 0.3:
    at = float(1 + int(20 * uniform()))
    found.append(Fault(KILL_BEFORE, "controller", at))
  return tuple(found)


def draw_bad_slices(
  rng: random.Random, islands: int, spares: int
) -> tuple[Fault, ...]:
  """Draws slices that are good for nothing, as many as there are spares."""
  count = 1 + int(spares * rng.random())
  slices = rng.sample(range(islands + spares), count)
  return tuple(Fault(BAD_SLICE, "", float(number)) for number in slices)


def draw_moving(
  rng: random.Random, users: int, ended: bool
) -> tuple[Fault, ...]:
  """Draws when a run's machine is lost, and what meets who moves the run."""
  uniform = rng.random
  found: list[Fault] = []
  if not ended and uniform() < 0.4:
    found.append(Fault(MACHINE_LOST, "", round(20.0 * uniform() ** 2, 3)))
  kinds = (KILL_BEFORE, KILL_AFTER, KILL_LATE, FAIL_BEFORE, FAIL_AFTER, STOP)
  for _ in range(int(3 * uniform())):
    kind = kinds[int(uniform() * len(kinds))]
    secs = round(25.0 * uniform(), 3) if kind in (KILL_LATE, STOP) else 0.0
    role = ("restorer", "restorer-2")[int(uniform() * users)]
    # Mostly beyond what it reads while it watches.
    found.append(Fault(kind, role, float(20 + int(uniform() * 120)), secs))
  return tuple(found)
