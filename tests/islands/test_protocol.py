"""What an island reads and writes, in which order, without its threads."""

import collections
import dataclasses
import types

import pytest
from cut_builder import CutRun, spoil

from diloco import errors
from diloco.islands import (
  comeback,
  core,
  peer_protocol,
  protocol,
  recovery,
  watching,
)
from diloco.snapshots import checkpoint, cuts, keys, operations, records

ISLAND = 1


@pytest.fixture
def run(tmp_path):
  return CutRun(tmp_path)


class Meanwhile:
  """A store in which something happens before its n-th operation of a kind."""

  def __init__(self, run):
    self.run = run
    self.done = []
    self._plans = []

  def before(self, operation, action):
    self._plans.append((operation, action))

  def execute(self, operation):
    for plan in [p for p in self._plans if p[0] == operation]:
      self._plans.remove(plan)
      plan[1]()
    self.done.append(operation)
    if isinstance(operation, operations.ReadPayload):
      return f"values of {operation.head.version}"
    if isinstance(operation, operations.WritePayload):
      return None
    return self.run.store.execute(operation)

  def perform(self, procedure):
    return operations.perform(procedure, self.execute)


def read_head(fragment):
  return operations.read_head(fragment)


def test_payload_is_written_before_the_record_that_proves_it(run):
  world = Meanwhile(run)
  sent = run.publish(0, ISLAND, 0, 0, 8)
  run.delete(sent)
  world.perform(protocol.publish(sent, ["tensors"]))
  kinds = [type(operation).__name__ for operation in world.done]
  assert kinds == ["WritePayload", "Point", "Point", "Write", "Point"]
  assert world.done[0] == operations.WritePayload(sent.payload, ["tensors"])
  assert run.waiting() == {sent.key: sent}


def test_survey_counts_what_is_merged_or_waits_of_this_island_alone(run):
  run.commit(0, 3, {0: 40, ISLAND: 8}, 1.0)
  run.publish(0, ISLAND, 3, 8, 16)
  run.publish(0, ISLAND, 3, 16, 24)
  run.publish(0, 0, 3, 40, 48)
  run.publish(1, ISLAND, 0, 0, 4)
  spoil(run, keys.contribution_key(run.publish(1, ISLAND, 0, 4, 32).key))
  assert Meanwhile(run).perform(protocol.survey(ISLAND, 2)) == comeback.Known(
    published=(24, 4), versions=(3, 0), merged=(8, 0)
  )


def test_record_of_what_is_merged_and_further_takes_nothing_back(run):
  run.publish(0, ISLAND, 2, 8, 16)  # merged, and not deleted yet
  run.commit(0, 3, {ISLAND: 40}, 1.0)
  known = Meanwhile(run).perform(protocol.survey(ISLAND, 2))
  assert known.published == known.merged == (40, 0)


def test_contribution_of_another_epoch_is_no_progress(run):
  old = run.publish(0, ISLAND, 0, 0, 16)
  run.store.write(keys.EPOCH, records.Epoch(1, 1))
  run.commit(0, 1, {ISLAND: 8}, 0.0)
  assert old.epoch == 0 and run.head(0).epoch == 1
  known = Meanwhile(run).perform(protocol.survey(ISLAND, 2))
  assert known.published == (8, 0)


def test_what_is_merged_between_two_looks_is_missed_in_neither(run):
  sent = run.publish(0, ISLAND, 0, 0, 16)

  def merge():
    run.commit(0, 1, {ISLAND: 16}, 1.0)
    run.delete(sent)

  for moment in (operations.Names("contributions"), read_head(0)):
    world = Meanwhile(run)
    world.before(moment, merge)
    known = world.perform(protocol.survey(ISLAND, 2))
    assert known.published[0] == 16


def test_version_that_comes_after_the_survey_counts_with_its_steps(run):
  world = Meanwhile(run)

  def merge():
    run.commit(0, 1, {ISLAND: 16}, 1.0, cut=5)

  world.before(operations.Point("mid_recovery"), merge)
  found = world.perform(protocol.come_back(ISLAND, 2))
  assert found.known == comeback.Known((16, 0), (1, 0), (16, 0))
  assert [f.head.version for f in found.fetched] == [1, 0]
  assert found.fetched[0].content == "values of 1"
  assert found.cut == 5  # no request of it was listed


def test_newest_cut_is_that_asked_for_or_that_of_a_head(run):
  come_back = protocol.come_back
  assert Meanwhile(run).perform(come_back(ISLAND, 2)).cut == 0
  run.perform(cuts.request([0], 2))
  assert Meanwhile(run).perform(come_back(ISLAND, 2)).cut == 1
  run.commit(1, 1, {}, 0.0, cut=3)
  assert Meanwhile(run).perform(come_back(ISLAND, 2)).cut == 3


def test_island_comes_back_into_the_epoch_of_the_store(run):
  assert Meanwhile(run).perform(protocol.come_back(ISLAND, 2)).epoch == 0
  run.store.write(keys.EPOCH, records.Epoch(2, 1))
  assert Meanwhile(run).perform(protocol.come_back(ISLAND, 2)).epoch == 2


def test_without_one_of_the_heads_nobody_comes_back(run):
  run.store.delete(keys.head_key(1))
  for procedure in (protocol.survey, protocol.come_back):
    with pytest.raises(LookupError):
      Meanwhile(run).perform(procedure(ISLAND, 2))


@pytest.mark.parametrize(
  ("have", "version"), [(-1, 4), (3, 4), (4, None), (5, None)]
)
def test_only_a_newer_version_is_fetched(run, have, version):
  run.commit(0, 4, {}, 0.0)
  found = Meanwhile(run).perform(protocol.fetch(0, have))
  assert (found and found.head.version) == version


class Retired(Meanwhile):
  """Payloads vanish while they are read, and newer versions come."""

  def __init__(self, run, newer):
    super().__init__(run)
    self.newer = newer

  def execute(self, operation):
    if isinstance(operation, operations.ReadPayload) and self.newer:
      version = self.newer.pop()
      if version > operation.head.version:
        self.run.commit(0, version, {}, 0.0)
      raise errors.CorruptSnapshotError("a chunk is missing")
    return super().execute(operation)


def test_version_retired_while_it_is_read_gives_way_to_the_next(run):
  found = Retired(run, [3, 2, 1]).perform(protocol.fetch(0, -1))
  assert found.head.version == 3


def test_version_that_stays_unreadable_is_corrupt(run):
  with pytest.raises(errors.CorruptSnapshotError):
    Retired(run, [0, 0]).perform(protocol.fetch(0, -1))


def test_head_of_another_fragment_is_corrupt(run):
  wrong = dataclasses.replace(run.head(1), version=9)

  def execute(operation):
    return wrong, b"generation"

  with pytest.raises(errors.CorruptSnapshotError, match="of fragment 1"):
    operations.perform(protocol.fetch(0, -1), execute)


def verdict(incarnation, offences, suspended_secs=0.0):
  return records.Verdict(
    ISLAND, incarnation, offences, 0, "not_finite", suspended_secs
  )


def test_verdict_is_told_once_and_only_to_the_life_it_is_about(run):
  watch = watching.NoticeBoard(ISLAND, 2, 0.0, lambda: 0.0)
  key = keys.verdict_key(ISLAND)

  def look():
    found = run.perform(watch.look(lambda _, look: look))
    return found.offences, found.suspended_secs

  looks = []
  for write in (
    None,
    verdict(1, 5, 40.0),
    verdict(2, 1),
    None,
    verdict(2, 6, 80.0),
  ):
    if write is not None:
      run.store.write(key, write)
    looks.append(look())
  spoil(run, key)
  looks.append(look())
  run.store.write(key, verdict(2, 3))
  looks.append(look())
  # How long nothing is answered is told to the next life too.
  assert looks == [(0, 0), (0, 40), (1, 0), (0, 0), (6, 80), (0, 0), (3, 0)]


class Search(protocol.Search):
  """One whose saved states are markers; each look at them may fail."""

  def __init__(self, saved, fails=0):
    super().__init__(ISLAND, 2, lambda: 0.0)
    self.saved, self.fails = saved, fails
    self.failures = []

  def saved_states(self):
    yield from self.saved
    if self.fails:
      self.fails -= 1
      raise OSError("the disk is away")

  def marker_of(self, saved):
    if saved is None:
      raise errors.CorruptSnapshotError("torn")
    return saved

  def is_part(self, saved, part):
    return saved.cut == part.cut

  def restore(self, saved):
    return f"state of {saved.step}"

  def patience_secs(self, peers):
    return 0.0

  def failed(self, error):
    self.failures.append(str(error))


def _marker(step, positions=((0, 0, 0), (0, 0, 0)), epoch=0):
  fields = {"island": ISLAND, "incarnation": 1, "serial": 1, "cut": 0}
  return checkpoint.Checkpoint(
    **fields,
    **{"step": step, "epoch": epoch, "positions": [list(p) for p in positions]},
    **{"leaves": {}, "files": {}, "num_bytes": 0},
  )


def _find(run, search):
  """What it finds, and the operations and pauses on the way."""
  done = []

  def execute(operation):
    done.append(operation)
    if isinstance(operation, float):
      return None
    if isinstance(operation, operations.ReadPayload):
      return "values"
    return run.store.execute(operation)

  return operations.perform(search.find(2, 8), execute), done


def test_island_that_comes_back_waits_for_the_store_and_for_its_disk(run):
  good, other = _marker(6), _marker(7, positions=[(0, 0, 0)])
  before = _marker(9, epoch=4)
  search = Search([None, other, before], fails=2)
  basis, done = _find(run, search)
  assert basis.saved is None and len(search.failures) == 2
  assert basis.passed_over == [
    "torn",
    "checkpoint of step 7 has other fragments",
    "checkpoint of step 9 is from before a roll-back",
  ]
  assert len([one for one in done if isinstance(one, float)]) == 2
  basis, _ = _find(run, Search([None, good, other]))
  assert (basis.saved, basis.state) == (good, "state of 6")
  assert basis.passed_over == ["torn"]
  head = run.head(1)
  run.store.delete(keys.head_key(1))
  search = Search([])
  search.failed = lambda error: run.store.write(keys.head_key(1), head)
  assert _find(run, search)[0].plan.start == 0


@pytest.mark.parametrize(
  ("saved", "asks"), [(4, False), (24, False), (2, True)]
)
def test_peer_is_asked_only_for_what_no_saved_state_has(run, saved, asks):
  """The own state counts while it is at most H = 8 steps old."""
  for fragment in range(2):
    run.commit(fragment, 1, {ISLAND: 12}, 1.0)
  peer = records.Member("island-0", 1, 1, "", present=True)
  run.store.write(keys.member_key(peer.role), peer)
  left = keys.peer_state_key(ISLAND, 1)
  answer = records.PeerState(ISLAND, 1, 0, 1, 9, [1, 1], "x", {}, {}, "")
  run.store.write(left, answer)
  positions = [(1, saved, saved)] * 2
  basis, done = _find(run, Search([_marker(saved, positions)]))
  request = keys.peer_request_key(ISLAND)
  called = [one for one in done if getattr(one, "key", "") == request]
  assert bool(called) == asks and basis.heard is None
  assert (run.store.read(left, records.PeerState) is None) == asks
  assert run.store.read(request, records.PeerRequest) is None


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_learner_goes_on_from_what_was_found(run, tmp_path, heard, saved):
  told = {}
  learner = types.SimpleNamespace(
    plan=types.SimpleNamespace(num_fragments=2),
    resume=lambda *args, **fields: told.update(fields, args=args),
  )
  one = recovery.Recovery(tmp_path, run.store, learner, ISLAND, 2, 1.0)
  heads = [run.commit(p, 3, {ISLAND: 8 + p}, 1.0) for p in range(2)]
  progress = collections.namedtuple("Progress", "residuals")({"a": 1})
  state = types.SimpleNamespace(progress=progress, opt_state="own")
  answer = records.PeerState(ISLAND, 2, 5, 6, 70, [3, 3], "x", {}, {}, "")
  fetched = [protocol.Fetched(h, f"values {h.fragment}") for h in heads]
  known = comeback.Known((8, 9), (3, 3), (8, 9))
  origins = (core.Origin(3, 8), core.Origin(3, 12))
  basis = protocol.Basis(
    comeback.Comeback(12, origins, (1,), "peer" if heard else "own"),
    protocol.Standing(4, None, 0, known, fetched),
    _marker(12) if saved else None,
    state if saved else None,
    peer_protocol.Heard(answer, "theirs") if heard else None,
  )

  def find(num_fragments, sync_every):
    assert (num_fragments, sync_every) == (2, 24)
    yield from ()
    return basis

  one.find = find
  found = operations.perform(one.recovering(24), run.store.execute)
  assert told["args"] == (12, ["values 0", "values 1"], [8, 12])
  own = "own" if saved else None
  assert told["opt_state"] == ("theirs" if heard else own)
  # An optimizer of another island goes with no residuals of this one.
  residuals = {} if heard else {"a": 1}
  mine = progress._replace(residuals=residuals) if saved else None
  assert told["saved"] == mine
  assert told["carried"] == (1,)
  assert [n[:2] for n in told["news"]] == [(3, 8), (3, 9)]
  assert found.state is None and (found.heard is not None) == heard
  assert found.heard is None or found.heard.content is None
  source = "checkpoint of step 12" if saved else "new optimizer"
  source = "optimizer of island 5" if heard else source
  assert recovery.describe(found) == f"{source}, global versions"
  facts = recovery.facts(found, ISLAND)
  assert (facts["step"], facts["epoch"]) == (12, 4)
  peer = {"island": 5, "incarnation": 6, "step": 70}
  assert facts["peer"] == (peer if heard else None)
  mine = {"incarnation": 1, "serial": 1, "step": 12}
  assert facts["checkpoint"] == (mine if saved and not heard else None)
  assert facts["base_versions"] == [3, 3]
  assert facts["unsent_from_step"] == [8, 12]
