"""What an island watches in the store, so that one failure stays where it is.

A procedure (see `diloco.snapshots.operations`), the same live and simulated.
Notices are what others want an island to know: cuts, verdicts, calls of peers.
They change rarely, and are looked at once a heartbeat.
The syncer's board is only a hint, so the heads themselves are looked at now and
then. What fails (a damaged head, a tensor that cannot be read, a notice) is
tried again after a pause of its own, and holds up nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from diloco import errors, workers
from diloco.islands import peer_protocol, protocol
from diloco.snapshots import keys, operations, records

_READ_BOARD = operations.Read(keys.BOARD, records.Board)
_RETRY_SECS = (0.2, 2.0)
_DAMAGED_SECS = (0.2, 10.0)  # what is damaged may be large, and stay so

# Takes in a version newer than the one of that number; it may perform
# operations too.
TakeIn = Callable[[protocol.Fetched, int], operations.Procedure[None]]
What = str | int  # what is looked at; a fragment by its number


# Performs one of several looks by name; gives None where it fails.
Attempt = Callable[[str, operations.Procedure[Any]], operations.Procedure[Any]]


class Notices(NamedTuple):
  """What a look found."""

  cut: int = 0  # the newest cut asked for
  offences: int = 0  # of this incarnation, as newly told by the syncer
  request: records.PeerRequest | None = None  # to be answered if able
  suspended_secs: float = 0.0  # of this or an earlier one, as newly told

  def after(self, untold: Notices) -> Notices:
    """With what an earlier look found that nobody was told of yet."""
    return self._replace(
      offences=self.offences or untold.offences,
      suspended_secs=self.suspended_secs or untold.suspended_secs,
    )


class NoticeBoard:
  """Looks for notices to one incarnation of an island."""

  def __init__(
    self,
    island: int,
    incarnation: int,
    wait_secs: float,
    clock: Callable[[], float],
  ):
    """Has looked at nothing; `wait_secs` is as for `Listener`."""
    self._clock = clock
    self._listener = peer_protocol.Listener(island, wait_secs)
    self._read = operations.Read(keys.verdict_key(island), records.Verdict)
    self._incarnation = incarnation
    self._seen: Any = None  # generation of the last verdict

  def look(self, attempt: Attempt) -> operations.Procedure[Notices]:
    """Reads what there is; what cannot be read reads as nothing."""
    request = yield from attempt("calls", self._listener.listen(self._clock))
    cut = yield from attempt("cuts", protocol.newest_cut())
    # Last: a verdict counts as seen once it was read.
    verdict = yield from attempt("verdicts", self.verdict())
    if verdict is None:
      return Notices(cut or 0, 0, request)
    mine = verdict.incarnation == self._incarnation
    offences = verdict.offences if mine else 0
    return Notices(cut or 0, offences, request, verdict.suspended_secs)

  def verdict(self) -> operations.Procedure[records.Verdict | None]:
    """Gives what the syncer newly has against any life of this island."""
    try:
      verdict, generation = yield self._read
    except errors.CorruptSnapshotError:
      return None  # the next offence brings a new one
    if generation == self._seen:
      return None
    self._seen = generation
    found: records.Verdict | None = verdict
    return found


class Seen(NamedTuple):
  """What a look found; None where it did not look, or could not."""

  board: records.Board | None
  notices: Notices | None


class Watch:
  """Looks at board, heads and notices, each as often as it needs."""

  def __init__(
    self,
    versions: Sequence[int],
    board: NoticeBoard,
    take_in: TakeIn,
    clock: Callable[[], float],
    *,
    notices_every_secs: float,
    heads_every_secs: float,
    failed: Callable[[What, Exception], None] = lambda what, error: None,
  ):
    """Has looked at nothing yet. The island has `versions`, [P].

    Every newer one is for `take_in`, which says with `got` whether it took it.
    """
    self._versions = list(versions)
    self._notice_board = board
    self._take_in = take_in
    self._clock = clock
    self._notices_every_secs = notices_every_secs
    self._heads_every_secs = heads_every_secs
    self._failed = failed
    self._heads_due = self._notices_due = 0.0
    self._told = list(versions)  # newest versions on the board
    self._retries: dict[What, workers.Retry] = {}  # of what fails

  def want_all(self) -> None:
    """Every fragment is to be fetched anew."""
    self._versions = [-1] * len(self._versions)

  def got(self, fragment: int, version: int, newer_than: int) -> bool:
    """Counts a version as there, unless all are wanted anew meanwhile."""
    if self._versions[fragment] != newer_than:
      return False
    self._versions[fragment] = version
    return True

  def pause_secs(self, longest_secs: float) -> float:
    """How long there is nothing to look at but the board."""
    now = self._clock()
    dues = (self._notices_due, *(r.due for r in self._retries.values()))
    return min([longest_secs, *(due - now for due in dues if due > now)])

  def watch(
    self, show: Callable[[Seen], None], pause_secs: Callable[[], float]
  ) -> operations.Script[None]:
    """Looks again and again, for ever; see `look`. Pauses end when woken."""
    while True:
      seen = yield from self.look()
      show(seen)
      yield operations.Nap(pause_secs())

  def look(self) -> operations.Procedure[Seen]:
    """Looks once at whatever it is time for.

    Raises:
      Exception: one that nobody expected, and that keeps coming back.
    """
    now = self._clock()
    board = yield from self._attempt("board", _read_board())
    told: Sequence[int] = board.versions if board else ()
    all_heads = now >= self._heads_due
    if all_heads:
      self._heads_due = now + self._heads_every_secs
    for fragment in range(len(self._versions)):
      version = self._versions[fragment]
      newer = fragment < len(told) and told[fragment] > version
      if newer and told[fragment] > self._told[fragment]:
        self._told[fragment] = told[fragment]
        self._retries.pop(fragment, None)
      if all_heads or newer or version < 0 or fragment in self._retries:
        yield from self._attempt(fragment, self._fetch(fragment))
    found = None
    if now >= self._notices_due:
      self._notices_due = now + self._notices_every_secs
      found = yield from self._notice_board.look(self._attempt)
    return Seen(board, found)

  def _fetch(self, fragment: int) -> operations.Procedure[None]:
    newer_than = self._versions[fragment]
    found = yield from protocol.fetch(fragment, newer_than)
    if found is not None:
      yield from self._take_in(found, newer_than)

  def _attempt(
    self, what: What, procedure: operations.Procedure[Any]
  ) -> operations.Procedure[Any]:
    """Performs one part of a look; gives None where it fails, or failed."""
    retry = self._retries.get(what)
    if retry is not None and self._clock() < retry.due:
      return None
    try:
      found = yield from procedure
    except Exception as error:
      self._failed(what, error)
      if retry is None:
        large = isinstance(what, int) and not isinstance(error, OSError)
        retry = self._retries[what] = workers.Retry(
          _DAMAGED_SECS if large else _RETRY_SECS,
          expected=(*operations.FAILURES, ValueError),
        )
      retry.failed(error, self._clock())
      return None
    if retry is not None:
      del self._retries[what]
    return found


def _read_board() -> operations.Procedure[records.Board | None]:
  board, _ = yield _READ_BOARD
  return board
