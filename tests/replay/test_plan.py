"""From a tape to a plan, with tapes written by hand."""

import dataclasses
import json

import pytest
from run_tape import A, B, RunTape, two_islands

from diloco import config as config_lib
from diloco import errors
from diloco.replay import script, worker
from diloco.snapshots import keys
from diloco.tape import events

V = script.VersionId
A1, B1 = script.LifeId(*A), script.LifeId(*B)


def test_versions_are_made_as_the_tape_says():
  planned = two_islands().plan()
  made = ((A1, 8), (B1, 4), (A1, 16))
  names = [keys.contribution_name(0, *life, step) for life, step in made]
  assert planned.makings == {
    V(0, 0): script.Initial(V(0, 0), A1, "d0"),
    V(0, 1): script.Merge(
      V(0, 1),
      (
        script.Share(names[0], 3.0, 1.0, 80, 0),
        script.Share(names[1], 1.0, 1.0, 80, 0),
      ),
      "d1",
      1.0,
    ),
    V(0, 2): script.Merge(
      V(0, 2), (script.Share(names[2], 1.0, 1.0, 80, 0),), "d2", 1.0
    ),
  }


def test_operations_stand_in_the_order_of_the_tape():
  life = two_islands().plan().lives[A1]
  assert [type(o).__name__ for o in life.operations] == [
    "Publish",
    "Adopt",
    "Publish",
  ]
  assert [o.step for o in life.operations] == [8, 10, 16]


def test_life_is_followed_no_further_than_needed():
  tape = two_islands()
  tape.submit(B, 12, base=1, first=5)
  tape.adopt(A, 18, 2)
  planned = tape.plan()
  assert [o.step for o in planned.lives[B1].operations] == [4]
  assert planned.lives[A1].operations[-1].step == 16


def test_life_nobody_merged_is_left_out():
  tape = two_islands()
  tape.start((1, 2), step=4, versions=[2])
  tape.submit((1, 2), 8, base=2, first=4)
  assert script.LifeId(1, 2) not in tape.plan().lives


def test_publications_that_were_not_merged_are_not_wanted():
  tape = RunTape()
  tape.start(A)
  tape.submit(A, 4)
  key = tape.submit(A, 8)
  tape.merge(1, (key, 1.0))
  wanted = [o.wanted for o in tape.plan().lives[A1].operations]
  assert wanted == [False, True]


def test_until_version_leaves_out_what_only_later_ones_need():
  planned = two_islands().plan(until_version=1)
  assert list(planned.makings) == [V(0, 0), V(0, 1)]
  assert planned.lives[A1].operations[-1].step == 8


def test_until_version_keeps_a_later_one_of_another_fragment():
  tape = RunTape(num_fragments=2)
  tape.start(A)
  one = tape.submit(A, 4, fragment=1)
  tape.merge(1, (one, 1.0), fragment=1)
  tape.adopt(A, 5, 1, kept_from=4, fragment=1)
  two = tape.submit(A, 8, base=1, first=5, fragment=1)
  tape.merge(2, (two, 1.0), fragment=1)
  tape.adopt(A, 9, 2, kept_from=8, fragment=1)
  late = tape.submit(A, 12)
  tape.merge(1, (late, 1.0))
  # Version 1 of fragment 0 was trained beside version 2 of fragment 1.
  assert V(1, 2) in tape.plan(until_version=1).makings


def test_until_no_version_at_all_is_refused():
  with pytest.raises(errors.UserError, match="from 1 on"):
    two_islands().plan(until_version=0)


def test_version_told_twice_counts_once():
  tape = two_islands()
  tape.merge(2, ("other", 1.0), incarnation=2)
  assert tape.plan().makings == two_islands().plan().makings


def test_last_merge_may_stand_in_the_head_alone():
  tape = two_islands()
  line = tape.lines.pop()
  assert V(0, 2) not in tape.plan().makings
  assert tape.plan(heads=[line]).makings == two_islands().plan().makings


def test_version_the_store_has_and_no_tape_tells_of_is_refused():
  # A return to a cut leaves nothing of merges in the heads.
  head = {"fragment": 0, "version": 3}
  with pytest.raises(errors.UserError, match="how version 3 of fragment 0"):
    two_islands().plan(heads=[head])
  planned = two_islands().plan(heads=[head], until_version=2)
  assert planned.makings == two_islands().plan().makings


def test_version_that_is_told_in_two_ways_is_refused():
  tape = two_islands()
  tape.merge(2, ("other", 1.0), incarnation=2, digest="another")
  with pytest.raises(errors.UserError, match="d2 and another"):
    tape.plan()


def test_life_of_an_elastic_job_has_the_slices_that_were_there():
  tape = RunTape()
  tape.start(A, 8, present=[0, 2], scheduled=11)
  tape.merge(1, (tape.submit(A, 12, first=8), 1.0))
  (life,) = tape.plan().lives.values()
  assert life.settings.present == (0, 2)
  assert life.beginning.scheduled == 11  # its tape says where schedules begin


def test_life_makes_outer_steps_of_its_own_by_the_rate_it_had():
  tape = RunTape()
  tape.start(A, own_rate=0.4)
  tape.merge(1, (tape.submit(A, 4), 1.0))
  (life,) = tape.plan().lives.values()
  config = config_lib.RunConfig(outer=config_lib.OuterConfig(learning_rate=0.8))
  lived = worker.lived(config, life.settings)
  assert lived.outer.learning_rate == 0.4
  other = dataclasses.replace(life.settings, own_rate=0.8)
  assert worker.kind(other) != worker.kind(life.settings)
  untold = dataclasses.replace(life.settings, own_rate=None)
  assert worker.lived(config, untold).outer.learning_rate == 0.8


def test_restored_life_needs_the_state_it_took():
  tape = two_islands()
  tape.save(A, 16, serial=1)
  tape.save(A, 20, serial=2)
  tape.save(A, 24, serial=3)
  state = {"incarnation": 1, "serial": 2, "step": 20}
  life = (0, 2)
  tape.start(life, 20, [2], checkpoint=state, unsent_from_step=[16])
  key = tape.submit(life, 24, base=2, first=16)
  tape.merge(3, (key, 1.0))
  planned = tape.plan()
  last = planned.lives[A1].operations[-1]
  assert last == script.Save(20, script.StateId(0, 1, 20, 2))
  beginning = planned.lives[script.LifeId(*life)].beginning
  assert (beginning.saved, beginning.carried) == (last.state, (0,))


def test_life_with_repeated_steps_carries_nothing():
  tape = two_islands()
  tape.start((0, 2), 16, [2], unsent_from_step=[18])
  key = tape.submit((0, 2), 24, base=2, first=18)
  tape.merge(3, (key, 1.0))
  assert tape.plan().lives[script.LifeId(0, 2)].beginning.carried == ()


def test_peer_lends_after_all_it_did_at_that_step():
  tape = two_islands()
  peer = {"island": 1, "incarnation": 1, "step": 5}
  tape.start((0, 2), 16, [2], peer=peer)
  key = tape.submit((0, 2), 24, base=2, first=16)
  tape.merge(3, (key, 1.0))
  lent = script.Lend(5, script.StateId(1, 1, 5))
  assert tape.plan().lives[B1].operations[-1] == lent


def test_version_put_back_by_a_roll_back_is_a_copy():
  tape = two_islands()
  tape.restore(old=1, new=3)
  tape.start((0, 2), 10, [3])
  key = tape.submit((0, 2), 18, base=3, first=10)
  tape.merge(4, (key, 1.0))
  assert tape.plan().makings[V(0, 3)] == script.Return(V(0, 3), V(0, 1))


def test_resync_adopts_all_and_mends_the_optimizer():
  tape = two_islands()
  tape.save(A, 17, serial=1)
  tape.island(A, events.POISONED, fragment=0, step=18)
  told = {"fragment": 0, "version": 2, "muted_until": 22}
  tape.island(
    A,
    events.RESYNCED,
    step=20,
    fragments=[told],
    checkpoint={"incarnation": 1, "serial": 1, "step": 17},
  )
  tape.island(A, events.REBASED, fragment=0, step=22, version=2)
  key = tape.submit(A, 24, base=2, first=22)
  tape.merge(3, (key, 1.0))
  state = script.StateId(0, 1, 17, 1)
  assert tape.plan().lives[A1].operations[3:-1] == (
    script.Save(17, state),
    script.Poison(18, 0),
    script.Adopt(20, 0, 2, 20, 22, resync=True),
    script.Mend(20, state),
    script.Rebase(22, 0),
  )


def without(tape, event, field):
  for line in tape.lines:
    if line["event"] == event:
      del line[field]
  return tape


def shorter(tape, event, field):
  for line in tape.lines:
    if line["event"] == event:
      line[field] = line[field][:-1]
  return tape


@pytest.mark.parametrize(
  ("make", "said"),
  [
    (lambda: RunTape(), "nothing to compare"),
    (lambda: without(two_islands(), "started", "cores"), "field 'cores'"),
    (
      lambda: without(two_islands(), "started", "initial_by"),
      "the tape of island-0: .* field 'initial_by'",
    ),
    (
      lambda: shorter(two_islands(), "started", "base_digests"),
      "the tape of island-0: .*a line is not whole: .* shorter",
    ),
    (
      lambda: shorter(two_islands(), "started", "answers"),
      "the tape of island 0.1: .*a line is not whole: .* shorter",
    ),
    (
      lambda: shorter(_set_back(), "restored", "version_to"),
      "the tape of controller: .*a line is not whole: .* shorter",
    ),
    (lambda: without(two_islands(), "merged", "digest"), "field 'digest'"),
    (lambda: _elastic_of_before(), "field 'scheduled'"),
    (
      lambda: without(two_islands(), "adopted", "kept_from_step"),
      "field 'kept_from_step'",
    ),
    (lambda: _lacking("merged", 1), "how version 1 of fragment 0"),
    (lambda: _lacking("submitted", 4), "contribution 0000.0001.0001.00000"),
  ],
)
def test_tape_that_does_not_tell_enough_is_refused(make, said):
  with pytest.raises(errors.UserError, match=said):
    make().plan()


def _elastic_of_before():
  """As all were before schedules went by what such a job has trained."""
  tape = RunTape()
  tape.start(A, present=[0, 2])
  return tape


def _set_back():
  tape = two_islands()
  tape.restore(old=1, new=3)
  return tape


def _lacking(event, number):
  tape = two_islands()
  tape.lines = [
    line
    for line in tape.lines
    if line["event"] != event
    or number not in (line.get("version"), line.get("step"))
  ]
  return tape


def test_state_that_was_never_saved_is_refused():
  tape = two_islands()
  state = {"incarnation": 1, "serial": 1, "step": 12}
  tape.start((0, 2), 12, [2], checkpoint=state)
  key = tape.submit((0, 2), 20, base=2, first=12)
  tape.merge(3, (key, 1.0))
  with pytest.raises(errors.UserError, match=r"that island 0\.2 took"):
    tape.plan()


@pytest.mark.parametrize(
  "told",
  [
    script.LifeId(0, 1),
    script.Publish(8, 0, 1, 4, "key", True),
    script.Adopt(8, 0, 2, 4, 6, True, 3, ((1, 2),)),
    script.Mend(8, script.StateId(0, 1, 4, 2)),
    script.Save(8, script.StateId(0, 1, 8, 1)),
    script.Settings("2x4", (0, 1), {"XLA_FLAGS": "--x"}, {}, 1000, (0, 2), 0.5),
    script.Beginning(4, (1, 0), (4, 2), None, script.StateId(1, 1, 4), 4, ()),
    (script.Rebase(8, 1), script.Lend(8, script.StateId(0, 1, 8))),
  ],
)
def test_what_workers_are_told_travels_as_json(told):
  again = script.from_json(json.loads(json.dumps(script.to_json(told))))
  assert again == told and type(again) is type(told)
