import contextlib
import dataclasses
import random

import pytest
from cut_builder import PLAN, run_with_a_cut, spoil

from diloco import errors
from diloco.snapshots import (
  cuts,
  keys,
  lease,
  operations,
  records,
  restore,
  verify,
)

_READING = operations.Read | operations.Names | operations.Point


class Told:
  """What would be on the tape."""

  def __init__(self):
    self.discarded = []
    self.restored = []

  def discard(self, name, record):
    self.discarded.append(name)


def all_good(anything):
  return ""


def restoring(run, cut=None, check=all_good):
  told = Told()
  choice = run.perform(restore.choose(check, all_good, cut))
  procedure = restore.restore(choice, told.discard, told.restored.append)
  return procedure, told


def going_back(told, wanted=None):
  """Chooses and restores until it is done, as every caller does."""
  while True:
    choice = yield from restore.choose(all_good, all_good, wanted)
    if choice.parts is None:
      return None  # the cut asked for was given up meanwhile
    procedure = restore.restore(choice, told.discard, told.restored.append)
    try:
      facts = yield from procedure
    except restore.ChangedError:
      continue
    if wanted in (None, facts.cut):
      return facts


def outcome(run):
  """All that counts; a token only has to be above the others."""
  heads = [dataclasses.replace(h, token=0) for h in run.heads()]
  epoch = run.store.read(keys.EPOCH, records.Epoch)
  return heads, run.waiting(), epoch


def test_restore_sets_heads_back_under_newer_versions(tmp_path):
  run, sent = run_with_a_cut(tmp_path)
  cut_heads = run.perform(restore.verified(1)).heads
  procedure, told = restoring(run)
  facts = run.perform(procedure)
  assert told.restored == [facts]
  assert (facts.cut, facts.epoch) == (1, 1)
  assert facts.version_from == [5, 4] and facts.version_to == [8, 5]
  assert facts.steps == {0: 17, 1: 17}
  for then, now in zip(cut_heads, run.heads(), strict=True):
    assert (now.payload, now.clock, now.digest) == (
      then.payload,
      then.clock,
      then.digest,
    )
    assert (now.epoch, now.cut, now.merged) == (1, 1, {})
  # The other one waits again.
  assert told.discarded == ["0000.0000.0001.000000032"]
  waiting = run.waiting()
  assert set(waiting) == {s.key for s in sent} == set(facts.reinjected)
  for before in sent:
    again = waiting[before.key]
    assert again.epoch == 1 and again.payload == before.payload
    assert (before.cut, again.cut) == (0, 1)  # nothing of it is in a later cut
    p = before.fragment
    staleness = run.head(p).version - again.base_version
    assert staleness == cut_heads[p].version - before.base_version


def test_restore_changes_the_store_in_the_order_that_survives_a_death(tmp_path):
  run, sent = run_with_a_cut(tmp_path)
  done = []
  choice = run.perform(restore.choose(all_good, all_good))
  procedure = restore.restore(
    choice,
    lambda name, record: done.append(("tell", name, record is not None)),
    lambda facts: done.append(("tell", facts.cut)),
  )
  late = "0000.0000.0001.000000032"

  def execute(operation):
    if not isinstance(operation, _READING):
      done.append((type(operation).__name__, operation[0]))
    return run.store.execute(operation)

  operations.perform(procedure, execute)
  change = "CompareAndSet"
  assert done == [
    (change, keys.EPOCH),  # decided
    (change, lease.drawn_key(keys.SYNCER_LEASE)),
    (change, keys.SYNCER_LEASE),  # whoever leads is deposed
    ("tell", late, True),
    ("Delete", keys.contribution_key(late)),
    ("DeleteTree", keys.payload_prefix(late)),
    *((change, keys.contribution_key(one.key)) for one in sent),
    ("tell", 1),
    *((change, keys.head_key(p)) for p in (0, 1)),
    (change, keys.EPOCH),  # done
  ]


def test_restore_outbids_every_token_and_frees_the_lease(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  run.store.write(keys.SYNCER_LEASE, records.Lease("somebody", 6, 3))
  run.perform(restoring(run)[0])
  lease = run.store.read(keys.SYNCER_LEASE, records.Lease)
  assert lease.owner == "" and lease.token == 7
  assert [h.token for h in run.heads()] == [7, 7]


def number_of_operations(tmp_path):
  run, _ = run_with_a_cut(tmp_path / "count")
  procedure, _ = restoring(run)
  count = 0

  def execute(operation):
    nonlocal count
    count += 1
    return run.store.execute(operation)

  operations.perform(procedure, execute)
  return count, outcome(run)


def test_restore_that_dies_anywhere_is_old_or_finished_by_the_next(tmp_path):
  count, expected = number_of_operations(tmp_path)
  assert count > 30
  old = 0
  for k in range(count):
    run, _ = run_with_a_cut(tmp_path / str(k))
    before = outcome(run)
    died, _ = run.perform_until(restoring(run)[0], k)
    assert died
    if not run.perform(restore.unfinished()):
      assert outcome(run) == before, k
      old += 1
    # Dies a second time, a little later, then is finished.
    procedure, told = restoring(run)
    died, _ = run.perform_until(procedure, k + 3)
    if died:
      procedure, told = restoring(run)
      run.perform(procedure)
    assert outcome(run) == expected, k
    assert [facts.epoch for facts in told.restored] == [1]
    assert not run.perform(restore.unfinished())
  assert 0 < old < count


def test_second_restore_of_the_same_cut_is_a_new_epoch(tmp_path):
  run, sent = run_with_a_cut(tmp_path)
  run.perform(restoring(run)[0])
  run.commit(0, 9, {0: 16, 1: 4}, value=9.0, cut=1, token=9)
  run.delete(sent[0])
  facts = run.perform(restoring(run)[0])
  assert facts.epoch == 2 and facts.version_to == [10, 6]
  assert set(run.waiting()) == {s.key for s in sent}
  assert {c.epoch for c in run.waiting().values()} == {2}


def test_version_is_not_used_twice_though_the_newest_head_is_lost(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  spoil(run, keys.head_key(0))
  assert run.perform(restoring(run)[0]).version_to == [8 + restore.UNSEEN, 5]
  # What listing and board may lack is left free, each time.
  spoil(run, keys.head_key(0))  # of a version that has an older payload
  twice = 9 + 2 * restore.UNSEEN
  assert run.perform(restoring(run)[0]).version_to == [twice, 6]


def test_version_is_not_used_twice_though_its_tensors_are_lost_too(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  run.store.write(keys.BOARD, records.Board([7, 4], {}))
  run.store.delete_tree(run.head(0).payload)
  run.store.delete(keys.head_key(0))
  assert run.perform(restoring(run)[0]).version_to == [8 + restore.UNSEEN, 5]


def test_damaged_epoch_and_lease_do_not_stop_a_restore(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  run.perform(restoring(run)[0])
  spoil(run, keys.EPOCH)
  spoil(run, keys.SYNCER_LEASE)
  with pytest.raises(errors.CorruptSnapshotError):
    run.perform(restore.unfinished())
  assert run.perform(restoring(run)[0]).epoch == 2


def test_delete_that_lands_late_takes_nothing_that_was_restored(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  run.store.write(keys.SYNCER_LEASE, records.Lease("somebody", 6, 3))
  spoil(run, keys.head_key(0))
  spoil(run, keys.SYNCER_LEASE)
  done = []

  def execute(operation):
    done.append(operation)
    return run.store.execute(operation)

  operations.perform(restoring(run)[0], execute)
  heads, lease = run.heads(), run.store.read(keys.SYNCER_LEASE, records.Lease)
  for operation in done:
    # Of a restore that died, after the one that finished what it began.
    if isinstance(operation, operations.Delete | operations.CompareAndSet):
      run.store.execute(operation)
      assert run.heads() == heads
      assert run.store.read(keys.SYNCER_LEASE, records.Lease) == lease


def test_other_cut_may_be_chosen_when_a_restore_cannot_be_finished(tmp_path):
  run, sent = run_with_a_cut(tmp_path)
  second = run.take_cut(published=(32, 8))
  died, _ = run.perform_until(restoring(run, second)[0], 12)
  assert died and run.perform(restore.unfinished()) == second

  def check(parts):
    return "gone" if parts.request.cut == second else ""

  facts = run.perform(restoring(run, check=check)[0])
  assert (facts.cut, facts.epoch) == (1, 2)
  assert not run.perform(restore.unfinished())
  assert set(run.waiting()) == {s.key for s in sent}


def test_what_was_begun_is_finished_before_another_cut_is_chosen(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  second = run.take_cut(published=(32, 8))
  died, _ = run.perform_until(restoring(run, second)[0], 30)
  assert died and run.perform(restore.unfinished()) == second
  told = Told()
  assert run.perform(going_back(told, 1)).cut == 1
  assert [(f.cut, f.epoch) for f in told.restored] == [(second, 1), (1, 2)]


def test_choice_is_void_once_another_restore_has_decided(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  late, _ = restoring(run)
  run.perform(restoring(run)[0])
  before = outcome(run)
  with pytest.raises(restore.ChangedError):
    run.perform(late)
  assert outcome(run) == before


@pytest.mark.parametrize("count", range(12, 60, 4))
def test_restore_that_was_overtaken_leaves_the_later_epoch_alone(
  tmp_path, count
):
  run, sent = run_with_a_cut(tmp_path)
  second = run.take_cut([sent[1]], published=(32, 8))
  slow, _ = restoring(run, second)
  value = None
  for _ in range(count):
    try:
      value = run.store.execute(slow.send(value))
    except StopIteration:
      return
  if not run.perform(restore.unfinished()):
    return

  def check(parts):
    return "gone" if parts.request.cut == second else ""

  assert run.perform(restoring(run, check=check)[0]).cut == 1
  with contextlib.suppress(StopIteration):
    while True:
      value = run.store.execute(slow.send(value))
  check_one_cut(run)


def interleave(run, procedures, turn):
  """Performs procedures side by side; `turn` says whose operation is next.

  It is given the numbers of those that go on, and answers (number, dies).
  """
  values = [None] * len(procedures)
  alive = list(range(len(procedures)))
  while alive:
    mine, dies = turn(alive)
    if dies:
      procedures[mine].close()
      alive.remove(mine)
      continue
    try:
      operation = procedures[mine].send(values[mine])
      try:
        values[mine] = run.store.execute(operation)
      except errors.CorruptSnapshotError as error:
        operation = procedures[mine].throw(error)
        values[mine] = run.store.execute(operation)
    except StopIteration:
      alive.remove(mine)


def check_one_cut(run):
  """All heads are of one cut and one epoch, and so is what waits."""
  epoch = run.store.read(keys.EPOCH, records.Epoch)
  assert epoch.done
  parts = run.perform(restore.verified(epoch.cut))
  heads = run.heads()
  assert {h.epoch for h in heads} == {epoch.epoch}
  assert [h.payload for h in heads] == [h.payload for h in parts.heads]
  assert [h.version for h in heads] == epoch.versions
  waiting = {key for key, c in run.waiting().items() if c.epoch == epoch.epoch}
  assert waiting == {sent.key for sent in parts.contributions}
  for sent in parts.contributions:
    assert run.store.keys(sent.payload)


class Turns:
  """Whose operation is next, by a seed; one of the two may die somewhere."""

  def __init__(self, rng, deaths):
    self._uniform = rng.random
    self._share = rng.random()  # one may be far ahead of the other
    self._doomed = rng.randrange(2) if deaths else None
    self._left = rng.randrange(70)

  def __call__(self, alive):
    mine = alive[self._uniform() < self._share] if len(alive) > 1 else alive[0]
    self._left -= mine == self._doomed
    return mine, mine == self._doomed and self._left < 0


@pytest.mark.parametrize("wanted", [(None, None), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("deaths", [0, 1])
def test_restores_side_by_side_end_in_one_cut(tmp_path, wanted, deaths):
  for seed in range(40):
    run, sent = run_with_a_cut(tmp_path / str(seed))
    assert run.take_cut([sent[1]], published=(32, 8)) == 2
    turns = Turns(random.Random(seed), deaths)
    interleave(run, [going_back(Told(), cut) for cut in wanted], turns)
    if run.perform(restore.unfinished()):
      run.perform(going_back(Told()))
    check_one_cut(run)


def test_payloads_a_cut_needs_outlive_a_restore(tmp_path):
  run, sent = run_with_a_cut(tmp_path)
  late = run.publish(1, 0, 4, 8, 24, cut=1)
  run.perform(restoring(run)[0])
  assert run.store.keys(sent[1].payload)
  assert not run.store.keys(late.payload)


def test_open_cut_ends_with_the_restore(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  asked = run.perform(cuts.request([0], 2))
  run.perform(restoring(run)[0])
  assert not run.perform(cuts.look(asked.cut)).is_open
  assert [h.cut for h in run.heads()] == [asked.cut] * 2


def test_cut_that_was_left_open_before_the_one_chosen_ends_too(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  asked = run.perform(cuts.request([0], 2))
  run.take_cut(published=(32, 8))
  run.perform(restoring(run)[0])
  look = run.perform(cuts.look(asked.cut))
  assert not look.is_open
  assert "was set back to cut 3" in run.perform(cuts.reason(asked.cut))


def test_newest_good_cut_is_chosen_and_the_others_told(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  for _ in range(4):
    run.take_cut(published=(32, 8))
  run.perform(cuts.request([0], 2))
  run.perform(cuts.abandon(run.perform(cuts.request([0], 2)).cut, "a reason"))
  spoil(run, keys.cut_part_key(5, 1))
  run.store.delete(keys.cut_heads_key(4))
  heads = run.store.read(keys.cut_heads_key(3), records.CutHeads)
  run.store.write(keys.cut_heads_key(3), dataclasses.replace(heads, token=5))
  choice = run.perform(restore.choose(all_good, all_good))
  assert choice.parts.request.cut == 2
  reasons = dict(choice.passed_over)
  assert reasons[7] == "it was given up: a reason"
  assert reasons[6] == "it was never completed"
  assert "CutPart" in reasons[5]
  assert reasons[4] == "cut 4 has no heads"
  assert reasons[3] == "heads is not what was written"


def test_cut_whose_tensors_are_gone_is_passed_over(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  run.take_cut(published=(32, 8))
  choice = run.perform(
    restore.choose(
      lambda parts: "gone" if parts.request.cut == 2 else "", all_good
    )
  )
  assert choice.parts.request.cut == 1 and choice.passed_over == ((2, "gone"),)


def test_wanted_cut_is_the_only_candidate(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  run.take_cut(published=(32, 8))
  assert (
    run.perform(restore.choose(all_good, all_good, 1)).parts.request.cut == 1
  )
  none = run.perform(restore.choose(all_good, all_good, 9))
  assert none.parts is None
  assert none.passed_over == ((9, restore.NOT_THERE),)


def test_contribution_that_cannot_be_read_does_not_spoil_a_cut(tmp_path):
  run, (gone, other) = run_with_a_cut(tmp_path)
  choice = run.perform(
    restore.choose(all_good, lambda sent: "gone" if sent == gone else "")
  )
  assert choice.parts.contributions == (other,)
  assert choice.passed_over == () and choice.left_out == ((gone, "gone"),)


def test_cut_chosen_in_place_of_a_begun_one_has_its_channel_read_too(tmp_path):
  run, (gone, other) = run_with_a_cut(tmp_path)
  second = run.take_cut(published=(32, 8))
  died, _ = run.perform_until(restoring(run, second)[0], 12)
  assert died and run.perform(restore.unfinished()) == second
  choice = run.perform(
    restore.choose(
      lambda parts: "gone" if parts.request.cut == second else "",
      lambda sent: "gone" if sent == gone else "",
    )
  )
  assert choice.parts.contributions == (other,)
  assert choice.left_out == ((gone, "gone"),)


def test_saved_state_of_another_moment_is_not_that_of_a_cut(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  part = run.store.read(keys.cut_part_key(1, 0), records.CutPart)
  check = verify.Verifier(run.dir, run.store, PLAN, buffers=()).check_saved
  check(part)
  for changes in ({"step": part.step + 1}, {"positions": part.positions[::-1]}):
    with pytest.raises(errors.CorruptSnapshotError, match="another moment"):
      check(dataclasses.replace(part, **changes))
  other = run.store.read(keys.cut_part_key(1, 1), records.CutPart)
  with pytest.raises(errors.CorruptSnapshotError, match="said to be in"):
    check(dataclasses.replace(other, island=0))


def test_restore_that_nobody_deposes_keeps_the_newest_controllers_token(
  tmp_path,
):
  run, _ = run_with_a_cut(tmp_path)
  run.perform(restore.hold(5))
  run.perform(restoring(run)[0])
  assert run.perform(restore.newest_token()) == 5
  with pytest.raises(errors.FencedError, match="token 5"):
    run.perform(restore.hold(4))


def test_cut_that_only_looks_open_is_not_given_up(tmp_path, monkeypatch):
  run, _ = run_with_a_cut(tmp_path)
  chosen = run.take_cut(published=(32, 8))
  names = run.store.names

  def stale(prefix):
    if prefix in (keys.cut_prefix(1), keys.cut_prefix(chosen)):
      return [name for name in names(prefix) if name != keys.COMPLETE]
    return names(prefix)

  monkeypatch.setattr(run.store, "names", stale)
  run.perform(restoring(run, chosen)[0])
  monkeypatch.undo()
  for cut in (1, chosen):
    assert run.perform(restore.verified(cut))


@pytest.mark.parametrize("damaged", [False, True])
def test_payloads_of_older_cuts_outlive_a_restore(tmp_path, damaged):
  run, sent = run_with_a_cut(tmp_path)
  later = run.publish(1, 0, 4, 8, 16)
  run.take_cut([later], published=(24, 16))
  run.take_cut(published=(24, 16))
  if damaged:  # nobody can go back to that one, and to the others all the same
    spoil(run, keys.cut_channel_key(1))
  procedure, told = restoring(run, cut=3)
  run.perform(procedure)
  assert {sent[1].key, later.key} <= set(told.discarded)
  assert run.store.keys(later.payload)
  assert damaged or all(run.store.keys(one.payload) for one in sent)


def test_restore_that_is_late_leaves_what_came_after_it_alone(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  late, _ = restoring(run)
  points = []

  def overtake():
    other, _ = restoring(run)  # finishes what was begun
    run.perform(other)
    run.commit(0, 9, {0: 16, 1: 4}, 9.0)  # and the run goes on

  def execute(operation):
    if operation == operations.Point("mid_restore"):
      points.append(operation)
      if len(points) == 3:  # before it sets the heads back
        overtake()
    return run.store.execute(operation)

  operations.perform(late, execute)
  assert [h.version for h in run.heads()] == [9, 5]
  assert [h.epoch for h in run.heads()] == [1, 1]


def test_restore_that_is_late_gives_up_no_cut_of_the_new_timeline(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  late, _ = restoring(run)
  asked = []

  def execute(operation):
    if operation == operations.Point("mid_restore") and not asked:
      run.perform(restoring(run)[0])  # finishes what was begun
      asked.append(run.perform(cuts.request([0, 1], 2)))
    return run.store.execute(operation)

  operations.perform(late, execute)
  assert run.perform(cuts.look(asked[0].cut)).is_open_in(1)


def changed(record):
  """The same record with another content."""
  fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
  name = "contributions" if "contributions" in fields else "epoch"
  other = [] if name == "contributions" else fields[name] + 1
  return dataclasses.replace(record, **{name: other})


@pytest.mark.parametrize(
  ("key", "kind"),
  [
    (keys.cut_heads_key(1), records.CutHeads),
    (keys.cut_channel_key(1), records.CutChannel),
    (keys.cut_part_key(1, 0), records.CutPart),
    (keys.cut_part_key(1, 1), records.CutPart),
    (keys.cut_request_key(1), records.CutRequest),
  ],
)
def test_cut_is_not_whole_once_one_of_its_records_was_changed(
  tmp_path, key, kind
):
  run, _ = run_with_a_cut(tmp_path)
  assert run.perform(restore.verified(1))
  run.store.write(key, changed(run.store.read(key, kind)))
  with pytest.raises(errors.CorruptSnapshotError, match="not what was written"):
    run.perform(restore.verified(1))
