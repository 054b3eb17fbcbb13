"""One look at the store at a time, on a clock of the test's own."""

import pytest
from cut_builder import CutRun, spoil

from diloco import errors
from diloco.islands import peer_protocol, watching
from diloco.snapshots import cuts, keys, operations, records

NOTICES_SECS = 1.0


class Life:
  """An island's watch, and what came of it."""

  def __init__(self, run):
    self.now = 100.0
    self.run = run
    self.fetched = []
    self.tried = []  # payloads
    self.unreadable = set()
    self.wanted_anew = False
    board = watching.NoticeBoard(0, 1, wait_secs=0.0, clock=lambda: self.now)
    self.watch = watching.Watch(
      [0, 0],
      board,
      self._take_in,
      lambda: self.now,
      notices_every_secs=NOTICES_SECS,
      heads_every_secs=2.0,
    )

  def _take_in(self, found, newer_than):
    yield from ()
    if self.wanted_anew:
      self.wanted_anew = False
      self.watch.want_all()
    head = found.head
    if self.watch.got(head.fragment, head.version, newer_than):
      self.fetched.append((head.fragment, head.version))

  def _execute(self, operation):
    if isinstance(operation, operations.ReadPayload):
      payload = operation.head.payload
      self.tried.append(payload)
      if payload in self.unreadable:
        raise errors.CorruptSnapshotError(f"{payload} is damaged")
      return payload
    return self.run.store.execute(operation)

  def look(self, after_secs=0.01):
    self.now += after_secs
    return operations.perform(self.watch.look(), self._execute)


@pytest.fixture
def life(tmp_path):
  return Life(CutRun(tmp_path))


def damage_tensor(life):
  life.unreadable.add(life.run.commit(0, 1, {}, value=1.0).payload)


def damage_head(life):
  spoil(life.run, keys.head_key(0))


def swap_head(life):
  life.run.store.write(keys.head_key(0), life.run.head(1))


def store_fails_for_one(life):
  execute = life.run.store.execute

  def failing(operation):
    if operation == operations.read_head(0):
      raise OSError("this block is bad")
    return execute(operation)

  life.run.store.execute = failing


@pytest.mark.parametrize(
  "go_wrong", [damage_tensor, damage_head, swap_head, store_fails_for_one]
)
def test_what_is_wrong_with_one_fragment_holds_up_nothing_else(life, go_wrong):
  run = life.run
  call = records.PeerRequest(1, 2, [0, 0])
  run.perform(peer_protocol.call(call))
  cut = run.perform(cuts.request([0, 1], 2)).cut
  verdict = records.Verdict(0, 1, 3, 0, "not_finite", 0.0)
  run.store.write(keys.verdict_key(0), verdict)
  go_wrong(life)
  run.commit(1, 1, {}, value=2.0)
  run.store.write(keys.BOARD, records.Board([1, 1], {1: [1]}))
  seen = life.look()
  assert life.fetched == [(1, 1)]
  assert seen.board.versions == [1, 1]
  assert seen.notices == watching.Notices(cut, 3, call)


@pytest.mark.parametrize("prefix", ["cuts", keys.PEER_REQUESTS])
def test_notice_that_cannot_be_looked_for_hides_no_other(life, prefix):
  run, names = life.run, life.run.store.names

  def failing(where):
    if where == prefix:
      raise OSError("it cannot be listed")
    return names(where)

  cut = run.perform(cuts.request([0, 1], 2)).cut
  call = records.PeerRequest(1, 2, [0, 0])
  run.perform(peer_protocol.call(call))
  run.store.write(
    keys.verdict_key(0), records.Verdict(0, 1, 3, 0, "not_finite", 0.0)
  )
  run.store.names = failing
  found = life.look().notices
  assert found.offences == 3
  assert (found.cut == cut) == (prefix != "cuts")
  assert (found.request == call) == (prefix != keys.PEER_REQUESTS)
  run.store.names = names
  later = life.look(NOTICES_SECS).notices
  assert later == watching.Notices(cut, 0, call)


def test_damage_that_stays_is_read_again_ever_more_rarely(life):
  damage_tensor(life)
  run = life.run
  run.store.write(keys.BOARD, records.Board([1, 0], {}))
  times = []
  while life.now < 160.0:
    tried = len(life.tried)
    life.look(0.05)
    if len(life.tried) > tried:
      times.append(life.now)
  assert times[0] == 100.05
  assert 8 <= len(times) <= 12
  assert times[-1] - times[-2] >= 9.0


def test_newer_version_is_not_kept_waiting_by_the_damage_before_it(life):
  damage_tensor(life)
  run = life.run
  run.store.write(keys.BOARD, records.Board([1, 0], {}))
  for _ in range(100):
    life.look(0.1)
  assert not life.fetched
  run.commit(0, 2, {}, value=2.0)
  run.store.write(keys.BOARD, records.Board([2, 0], {}))
  life.look()
  assert life.fetched == [(0, 2)]


def test_mended_head_is_found_without_a_word_on_the_board(life):
  good = life.run.commit(0, 1, {}, value=1.0)
  damage_head(life)
  life.look()
  life.run.store.write(keys.head_key(0), good)
  until = life.now + 12.0
  while life.now < until:
    life.look(0.1)
  assert life.fetched == [(0, 1)]


def test_error_that_nobody_expected_passes_or_ends_the_watch(life):
  run = life.run
  run.commit(0, 1, {}, value=1.0)
  run.commit(1, 1, {}, value=1.0)
  execute, failures = run.store.execute, [2]

  def failing(operation):
    if operation == operations.read_head(0) and failures[0]:
      failures[0] -= 1
      raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    return execute(operation)

  run.store.execute = failing
  for _ in range(6):
    life.look(3.0)
  assert sorted(life.fetched) == [(0, 1), (1, 1)]
  run.commit(0, 2, {}, value=2.0)
  failures[0] = 1000
  with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
    for _ in range(12):
      life.look(10.0)


def test_version_read_while_all_are_wanted_anew_does_not_count(life):
  life.run.commit(0, 1, {}, value=1.0)
  life.wanted_anew = True
  life.look(5.0)
  assert (0, 1) not in life.fetched
  life.look()
  assert sorted(life.fetched) == [(0, 1), (1, 0)]


def test_pause_lasts_until_something_is_due(life):
  life.look()
  assert life.watch.pause_secs(60.0) == pytest.approx(NOTICES_SECS)
  damage_head(life)
  life.look(5.0)
  assert life.watch.pause_secs(60.0) == pytest.approx(0.2)
  assert life.watch.pause_secs(0.05) == 0.05


def test_pause_ends_with_what_is_due_next_and_never_before_it(life):
  assert life.watch.pause_secs(0.5) == 0.5  # notices are overdue
  life.look()
  assert life.watch.pause_secs(5.0) == pytest.approx(NOTICES_SECS)
  assert life.watch.pause_secs(0.5) == 0.5
  life.now += 0.75
  assert life.watch.pause_secs(0.5) == pytest.approx(0.25)
