"""What a snapshot store must promise, tried by concurrent client processes.

Of many that create a record, or move it on from one generation, one succeeds
and all see whose it is; what was written is read and listed at once, by any
process; nothing is ever seen half written. Clients use the very functions that
islands and syncers use.
"""

import multiprocessing
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from multiprocessing import connection
from typing import Any, Literal, NamedTuple

import numpy as np

from diloco import errors, timing, workers
from diloco.snapshots import arrays, locations, records, store

OpenStore = Callable[[str], store.SnapshotStore]
Level = Literal["ok", "note", "warn", "FAIL"]
Seen = dict[str, Any]  # by one client

CLIENTS = 4
WRITERS = CLIENTS - 1  # of tensors, while the first times small records
_LONGEST_WAIT_SECS = 120.0  # of one client for the others
_LONG_TEXT = "x" * 60_000  # as long as the head of a large fleet
_TRIES = 200  # of an increment
_SECS = 3.0  # that each kind of operation may take


class Finding(NamedTuple):
  """One line of the doctor's."""

  level: Level
  text: str
  advice: str = ""

  def __str__(self) -> str:
    return f"{self.level:<4}  {'; '.join(filter(None, self[1:]))}"


class Effort(NamedTuple):
  """How much each client does."""

  rounds: int = 60  # of each race, and increments of the shared counter
  small: int = 200  # records written, listed and deleted
  large_bytes: int = 64 << 20  # of a tensor

  def within(self, round_trip_secs: float, bytes_per_sec: float) -> "Effort":
    """As much of it as a store of this speed does in some seconds."""
    most = max(5, round(_SECS / 4 / round_trip_secs))
    largest = max(1 << 20, int(_SECS * bytes_per_sec / CLIENTS))
    return Effort(
      min(self.rounds, most), min(self.small, most), min(self[2], largest)
    )


QUICK = Effort(rounds=20, small=50, large_bytes=8 << 20)
_BRIEF = Effort(rounds=2, small=2)


class _Client:
  def __init__(
    self,
    number: int,
    effort: Effort,
    snapshots: store.SnapshotStore,
    meet: Callable[[], Any],
  ):
    self.number, self.effort = number, effort
    self.store, self.meet = snapshots, meet

  def records(self) -> Seen:
    """All that is done with records."""
    races = {name: self.race(name) for name in ("create", "update")}
    rest = {"count": self.count(), "overwrite": self.overwrite()}
    return {**races, **rest, "small": self.small()}

  def race(self, name: str) -> list[tuple[bool, str]]:
    """All write one key at once: whether this one won, and who did."""
    found = []
    for i in range(self.effort.rounds):
      key = f"{name}/{i if name == 'create' else 0}"
      _, generation = self.store.read_for_update(key, records.Lease)
      self.meet()
      mine = records.Lease(f"client-{self.number}", i, 0)
      won = self.store.compare_and_set(key, mine, generation)
      self.meet()
      winner = self.store.read(key, records.Lease)
      found.append((won, winner.owner if winner else "nobody"))
    return found

  def count(self) -> list[int]:
    """All increment one record; the values this one was told it set."""
    mine: list[int] = []
    for _ in range(_TRIES * self.effort.rounds):
      found, generation = self.store.read_for_update("count", records.Lease)
      beat = found.beat + 1 if found else 1
      more = records.Lease(f"client-{self.number}", 0, beat)
      if self.store.compare_and_set("count", more, generation):
        mine.append(beat)
      if len(mine) == self.effort.rounds:
        break
    return mine

  def overwrite(self) -> tuple[int, int]:
    """In turn one writes and all read: old values, and damaged ones."""
    stale = torn = 0
    for i in range(self.effort.rounds):
      self.meet()
      if i % CLIENTS == self.number:
        self.store.write("turn", records.Lease(_LONG_TEXT, i, 0))
      else:  # the one before or this one, and never half of it
        torn += sum(self._turn() is None for _ in range(3))
      self.meet()
      stale += self._turn() != i
    return stale, torn

  def _turn(self) -> int | None:
    try:
      found = self.store.read("turn", records.Lease)
      return found.token if found else -1
    except errors.CorruptSnapshotError:
      return None

  def small(self) -> tuple[int, int]:
    """Records that were not listed, and deleted ones that were."""
    names = [f"small/{self.number}-{i}" for i in range(self.effort.small)]
    for name in names:
      self.store.write(name, records.Lease(name, 0, 0))
    self.meet()
    missing = CLIENTS * len(names) - len(self.store.names("small"))
    self.meet()
    for name in names:
      self.store.delete(name)
    self.meet()
    return missing, len(self.store.keys("small"))

  def large(self) -> Seen:
    """Writes a tensor and reads a neighbour's; the first times records."""
    self.meet()
    if self.number == 0:
      trip = max(timing.measure(self.store) for _ in range(3))
      self.meet()
      return {"round_trip_secs": trip}
    theirs = self.number % WRITERS + 1
    mine = self._tensor(self.number)
    wrote = _timed(
      lambda: self.store.arrays.write(f"large/{self.number}", [mine])
    )
    self.meet()
    out = np.empty(mine.layout.shape, np.float32)
    there = self.store.arrays.open(f"large/{theirs}", "w", mine.layout)
    read = _timed(lambda: there.read(out=out))
    sound = np.array_equal(out, self._tensor(theirs).pieces[0][1])
    return {"wrote": wrote, "read": read, "sound": sound}

  def _tensor(self, number: int) -> arrays.Tensor:
    shape = self.effort.large_bytes // 4096, 1024
    values = np.random.default_rng(number).random(shape, np.float32)
    return arrays.Tensor.whole("w", values)


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
  """Seconds that work takes, and of the processor, all threads together."""
  wall, busy = time.perf_counter(), time.process_time()
  work()
  return time.perf_counter() - wall, time.process_time() - busy


def _run(
  number: int,
  effort: Effort,
  url: str,
  open_store: OpenStore,
  barrier: Any,
  results: connection.Connection,
) -> None:
  """Main function of a client's process."""
  try:
    one = _Client(number, effort, open_store(url), barrier.wait)
    results.send({**one.records(), "large": one.large()})
  except Exception as error:
    barrier.abort()
    broken = isinstance(error, threading.BrokenBarrierError)
    results.send({"error": "" if broken else errors.one_line(error)})


def observe(url: str, effort: Effort, open_store: OpenStore) -> list[Seen]:
  """What each client has seen of an empty store.

  Raises:
    OSError: one failed.
  """
  context = multiprocessing.get_context("spawn")
  barrier = context.Barrier(CLIENTS, timeout=_LONGEST_WAIT_SECS)
  pipes = [context.Pipe(duplex=False) for _ in range(CLIENTS)]
  clients = [
    context.Process(
      target=_run, args=(i, effort, url, open_store, barrier, theirs)
    )
    for i, (_, theirs) in enumerate(pipes)
  ]
  seen = []
  try:
    with workers.deaf_children():
      for client, (_, theirs) in zip(clients, pipes, strict=True):
        client.start()
        theirs.close()  # or the end of a client would not be that of its pipe
    for mine, _ in pipes:
      with mine:
        seen.append(mine.recv())
  except EOFError:
    seen.append({"error": "its process was killed or crashed"})
  finally:
    for client in filter(lambda one: one.pid, clients):
      client.kill()
      client.join()
  for i, one in enumerate(seen):
    if one.get("error"):
      raise OSError(f"client {i} of {CLIENTS} failed: {one['error']}")
  return seen


def broken(
  url: str, open_store: OpenStore = store.SnapshotStore
) -> list[Finding]:
  """Promises about records that a store breaks, tried in turn and by threads.

  What is written is below a name of its own, and deleted; what else is in the
  store may be a run.

  Raises:
    OSError: the store cannot be reached, read or written.
  """
  with locations.left_as_found(url):
    return _broken(url, open_store)


def _broken(url: str, open_store: OpenStore) -> list[Finding]:
  room, probe = f"probe.{secrets.token_hex(8)}", records.Lease("probe", 0, 0)
  whole = open_store(url)
  # Without a bucket a read finds nothing and a conditional write is too late.
  whole.write(f"{room}/probe", probe)
  barrier = threading.Barrier(CLIENTS, timeout=_LONGEST_WAIT_SECS)

  def attempt(number: int) -> Seen:
    try:
      inner = open_store(locations.below(url, room))
      return _Client(number, _BRIEF, inner, barrier.wait).records()
    except BaseException:
      barrier.abort()
      raise

  try:
    if whole.read(f"{room}/probe", records.Lease) != probe:
      raise OSError("what was written a moment ago is not there")
    if found := list(taken_too_late(whole, f"{room}/probe")):
      return found
    with futures.ThreadPoolExecutor(CLIENTS) as pool:
      tries = [pool.submit(attempt, i) for i in range(CLIENTS)]
    failures = [one.exception() for one in tries]
    for error in failures:
      if error and not isinstance(error, threading.BrokenBarrierError):
        raise error
    seen = [one.result() for one in tries]
  finally:
    whole.delete_tree(room)
  return [one for one in judge(seen, _BRIEF) if one.level == "FAIL"]


def taken_too_late(
  snapshots: store.SnapshotStore, key: str
) -> Iterator[Finding]:
  """Writes on a condition that held before, as one client alone finds them.

  The record at `key` is written, and deleted in the end.
  """
  unsafe = "use a store with conditional writes"
  snapshots.write(key, records.Lease("probe", 0, 0))
  for i, name in enumerate(("compare-and-set", "create-once")):
    _, seen = snapshots.read_for_update(key, records.Lease)
    first, second = (records.Lease(who, i, 0) for who in ("first", "second"))
    if not snapshots.compare_and_set(key, first, seen):
      yield Finding("FAIL", f"store, {name}: one writer alone lost", unsafe)
    if snapshots.compare_and_set(key, second, seen):
      yield Finding("FAIL", f"store, {name}: a write too late won", unsafe)
    snapshots.delete(key)


def judge(seen: Sequence[Seen], effort: Effort) -> Iterator[Finding]:
  """What the clients have seen, against the promises."""
  unsafe = "versions would be lost: use a store with conditional writes"
  stale = "islands would miss what is there: use a store without stale reads"
  # Two that set one value: an update was lost. That a value is nobody's is
  # none: who is overtaken before reading it back is told that it has lost.
  told = [beat for one in seen for beat in one["count"]]
  never = CLIENTS * effort.rounds - len(told)
  old, torn = (sum(one["overwrite"][i] for one in seen) for i in (0, 1))
  unlisted, left = (max(abs(s["small"][i]) for s in seen) for i in (0, 1))
  wrong = sum(not one["large"]["sound"] for one in seen[1:] if "large" in one)
  for what, broken, advice in (
    ("create-once: races without one winner", _lost(seen, "create"), unsafe),
    ("compare-and-set: the same", _lost(seen, "update"), unsafe),
    ("contention: lost updates", len(told) - len(set(told)), unsafe),
    ("contention: updates that never got in", never, unsafe),
    ("read after write: old values", old, stale),
    ("overwriting: damaged reads", torn, unsafe),
    ("listing after write: records missing", unlisted, stale),
    ("listing after delete: records left", left, stale),
    ("large tensors: wrong values", wrong, unsafe),
  ):
    if broken:
      yield Finding("FAIL", f"store, {what}: {broken}", advice)
    else:
      yield Finding("ok", f"store, {what}: none")


def _lost(seen: Sequence[Seen], name: str) -> int:
  """Races that not one client won, or whose winner not all saw."""
  lost = 0
  for race in zip(*(one[name] for one in seen), strict=True):
    winners = {f"client-{i}" for i, (won, _) in enumerate(race) if won}
    lost += len(winners) != 1 or {owner for _, owner in race} != winners
  return lost
