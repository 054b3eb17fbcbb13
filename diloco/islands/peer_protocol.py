"""How an island without a recent optimizer gets one from a healthy peer.

Procedures (see `diloco.snapshots.operations`). An island that comes back calls;
the living island of the lowest number that has seen every version the caller
starts from answers, the next ones if it does not. An answer is a payload, then
the record that names it, as with everything in the store. One that is older
than the versions asked for is not taken: its moments belong to gradients of
parameters that are gone.

Reference: Decoupled DiLoCo, arXiv 2604.21428 (recovery from a healthy peer
that has seen the current vector clock).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from diloco import errors
from diloco.snapshots import keys, members, operations, records

_READ_ATTEMPTS = 2
_HEARD_BEATS, _TURN_BEATS, _STEPS = 6, 2, 4
_LEAST_BYTES_A_SEC = 16 << 20  # of a store that still counts as working
_REQUESTS = operations.Names(keys.PEER_REQUESTS)


def can_serve(bases: Sequence[int], asked: Sequence[int]) -> bool:
  """Whether a peer with these base versions has seen all that is asked for."""
  return len(bases) == len(asked) and all(
    b >= a for b, a in zip(bases, asked, strict=True)
  )


# The side that calls


def patience_secs(
  others: Sequence[records.Member], heartbeat_secs: float, num_bytes: int
) -> float:
  """How long an answer is waited for.

  Heartbeats until the call is heard, steps of the slowest until the state is
  copied, and as often as there are peers, `others`, each of which may answer
  after the one before: a turn, and the way of the state's bytes to the store.
  """
  turns = len(others) * turn_secs(heartbeat_secs, num_bytes)
  slowest = max(member.step_secs for member in others)
  return _HEARD_BEATS * heartbeat_secs + _STEPS * slowest + turns


def turn_secs(heartbeat_secs: float, num_bytes: int) -> float:
  """How long a peer has to answer before the next one does."""
  return _TURN_BEATS * heartbeat_secs + num_bytes / _LEAST_BYTES_A_SEC


def healthy(island: int) -> operations.Procedure[list[records.Member]]:
  """Gives the other islands that say that they train."""
  others = yield from members.read(
    lambda name: keys.island_of(name) not in (-1, island)
  )
  return [member for member in others if member.present]


def call(request: records.PeerRequest) -> operations.Procedure[None]:
  """Asks whoever can to answer."""
  yield operations.Write(keys.peer_request_key(request.island), request)


class Heard(NamedTuple):
  """An answer, and the optimizer state it names."""

  state: records.PeerState
  content: Any


def hear(request: records.PeerRequest) -> operations.Procedure[Heard | None]:
  """Looks once for an answer that will do.

  Raises:
    CorruptSnapshotError: there is one that cannot be read.
  """
  key = keys.peer_state_key(request.island, request.incarnation)
  state, _ = yield operations.Read(key, records.PeerState)
  if state is None or not can_serve(state.versions, request.versions):
    return None
  content = yield operations.ReadState(state)
  return Heard(state, content)


def ask(
  request: records.PeerRequest,
  patience_secs: Callable[[Sequence[records.Member]], float],
  clock: Callable[[], float],
  poll_secs: float,
  passed_over: Callable[[str], None],
) -> operations.Script[Heard | None]:
  """Calls, and waits for an answer that will do.

  Whoever has asked is to hang up and to clean up. `passed_over` hears why an
  answer will not do, or that none has come in `patience_secs`; nobody is called
  if no other island is healthy.
  """
  for _ in range(_READ_ATTEMPTS):
    peers = yield from healthy(request.island)
    if not peers:
      return None
    yield from call(request)
    deadline = clock() + patience_secs(peers)
    try:
      while clock() < deadline:
        yield poll_secs
        heard = yield from hear(request)
        if heard is not None:
          return heard
    except errors.CorruptSnapshotError as error:
      # Another peer may have answered as well, and be the one to read.
      passed_over(str(error))
      yield from clean_up(request.island)
      continue
    passed_over("no peer sent its optimizer state in time")
    return None
  return None


def hang_up(request: records.PeerRequest) -> operations.Procedure[None]:
  """Asks no longer."""
  yield operations.Delete(keys.peer_request_key(request.island))


def clean_up(island: int) -> operations.Procedure[None]:
  """Deletes all answers to an island, also those to its earlier lives."""
  mine = f"{island:04d}."
  for name in (yield operations.Names(keys.PEER_STATES)):
    if name.startswith(mine):
      yield operations.Delete(f"{keys.PEER_STATES}/{name}")
  # Trees only: whoever still answers may put one back at once.
  for name in (yield operations.Names(keys.PEER_PAYLOADS)):
    if name.startswith(mine):
      yield operations.DeleteTree(f"{keys.PEER_PAYLOADS}/{name}")


# The side that answers


class Listener:
  """Hears the calls of others, and knows when it is whose turn to answer."""

  def __init__(self, island: int, wait_secs: float):
    """Has heard nothing yet.

    For `wait_secs` each peer of a lower number may answer a call before it.
    """
    self._island = island
    self._wait_secs = wait_secs
    self._first_heard: dict[tuple[int, int], float] = {}

  def listen(
    self, clock: Callable[[], float]
  ) -> operations.Procedure[records.PeerRequest | None]:
    """Gives a call that is this island's to answer, if there is one."""
    for name in (yield _REQUESTS):
      if not name.isdecimal() or int(name) == self._island:
        continue
      try:
        request, _ = yield operations.Read(
          keys.peer_request_key(int(name)), records.PeerRequest
        )
        if request and (yield from self._is_my_turn(request, clock())):
          return request
      except errors.CorruptSnapshotError:
        continue  # who calls will call again, or do without
    return None

  def _is_my_turn(
    self, request: records.PeerRequest, now: float
  ) -> operations.Procedure[bool]:
    """The peer of the lowest number answers; the next ones if it does not."""
    who = (request.island, request.incarnation)
    first_heard = self._first_heard.setdefault(who, now)
    lower = [
      number
      for number in map(keys.island_of, (yield members.NAMES))
      if 0 <= number < self._island and number != request.island
    ]
    if now < first_heard + self._wait_secs * len(lower):
      return False
    state, _ = yield operations.Read(
      keys.peer_state_key(*who), records.PeerState
    )
    return state is None


def answer(
  request: records.PeerRequest, state: records.PeerState, content: Any
) -> operations.Procedure[bool]:
  """Sends an optimizer state: the tensors first, the record last.

  Who calls may give up at any moment, and then deletes what it finds. What is
  written after that nobody would delete, so the sender takes it back. The
  payload's prefix in the record is this answer's alone.

  Returns:
    False when nobody calls any more, or the call has become unreadable.
  """
  if not (yield from _calls(request)):
    return False
  key = keys.peer_state_key(request.island, request.incarnation)
  try:
    yield operations.WritePayload(state.payload, content)
    if (yield from _calls(request)):
      yield operations.Write(key, state)
      if (yield from _calls(request)):
        return True
  except OSError:
    yield from _take_back(key, state)
    raise
  yield from _take_back(key, state)
  return False


def _calls(request: records.PeerRequest) -> operations.Procedure[bool]:
  """Whether a call is still to be answered."""
  # Whose call is damaged will call again, or do without.
  asked, _ = yield from operations.sound(
    keys.peer_request_key(request.island), records.PeerRequest
  )
  return bool(asked == request)


def _take_back(
  key: str, state: records.PeerState
) -> operations.Procedure[None]:
  """Deletes an answer, and its record unless that is another's by now."""
  try:
    found, _ = yield operations.Read(key, records.PeerState)
  except errors.CorruptSnapshotError:
    found = state  # nobody can use it
  if found is not None and found.payload == state.payload:
    yield operations.Delete(key)
  yield operations.DeleteTree(state.payload)
