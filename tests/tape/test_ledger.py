"""The ledger, case by case; each step has 10 tokens."""

import itertools
import re
import sys

import pytest
from tape_builder import TOKENS_PER_STEP, Tapes

from diloco.tape import evidence, history, ledger
from diloco.tape import fates as fates_lib


def _fates(tapes, num_fragments=1):
  """Returns the ledger in steps, without the fates nothing has."""
  result = ledger.compute(tapes.record(), num_fragments)
  fates = {
    "trained": result.trained,
    "merged": result.merged,
    "pending": result.pending,
    "unaccounted": result.unaccounted,
    **result.discarded,
  }
  assert fates["trained"] == sum(fates.values()) - fates["trained"]
  return {k: v // TOKENS_PER_STEP for k, v in fates.items() if v}


def _trained(steps):
  tapes = Tapes()
  tapes.start()
  tapes.train(0, steps)
  return tapes


def _violations(tapes):
  return ledger.compute(tapes.record()).violations


def test_empty_record_balances():
  result = ledger.compute(Tapes().record())
  assert result.balanced and result.trained == 0
  assert result.tokens() == ledger.Counts(0, 0, 0, {}, 0)


def test_unpublished_steps_of_a_live_island_are_pending():
  assert _fates(_trained(7)) == {"trained": 7, "pending": 7}


def test_every_fragment_has_its_own_fate():
  tapes = _trained(8)
  tapes.merge(1, tapes.publish(0, 5, fragment=1))
  tapes.publish(0, 8, fragment=2)
  assert _fates(tapes) == _fates(tapes, 3)
  assert _fates(tapes) == {"trained": 24, "merged": 5, "pending": 19}


def test_publication_and_merge_extend_what_the_metrics_show():
  tapes = _trained(3)
  tapes.publish(0, 4)
  assert _fates(tapes) == {"trained": 4, "pending": 4}
  tapes.merge(1, tapes.contribution(0, 6))
  assert _fates(tapes) == {"trained": 6, "merged": 6}


def test_killed_island_loses_what_it_had_not_published():
  tapes = _trained(10)
  tapes.publish(0, 6)
  tapes.die()
  assert _fates(tapes) == {"trained": 10, "pending": 6, "lost_with_island": 4}
  tapes.start(step=10)
  tapes.train(10, 12)
  expected = {"trained": 12, "pending": 8, "lost_with_island": 4}
  assert _fates(tapes) == expected


def test_replaced_island_lost_its_tail_even_if_nobody_saw_it_die():
  tapes = _trained(10)
  tapes.start(step=10)
  assert _fates(tapes) == {"trained": 10, "lost_with_island": 10}


def test_lost_spans_name_the_steps_for_each_fragment():
  tapes = _trained(10)
  tapes.publish(0, 6)
  tapes.die()
  assert ledger.compute(tapes.record(), 2).lost_spans == {
    0: [(1, 6, 10), (1, 0, 10)]
  }


def test_stopped_island_keeps_its_tail_pending():
  tapes = _trained(10)
  tapes.stop(11)
  tapes.die()  # the process ended, as it should
  assert _fates(tapes) == {"trained": 11, "pending": 11}


def test_merge_after_death_counts():
  tapes = _trained(10)
  item = tapes.publish(0, 6)
  tapes.die()
  tapes.start(step=10)
  tapes.merge(1, item)
  assert _fates(tapes) == {"trained": 10, "merged": 6, "lost_with_island": 4}
  assert not _violations(tapes)


def test_unsent_progress_that_was_restored_is_not_lost():
  tapes = _trained(10)
  tapes.publish(0, 4)
  tapes.die()
  tapes.start(step=10, unsent_from_step=[4])
  tapes.train(10, 12)
  assert _fates(tapes) == {"trained": 12, "pending": 12}
  tapes.merge(2, tapes.publish(4, 12))
  assert _fates(tapes) == {"trained": 12, "merged": 8, "pending": 4}


def test_overwritten_steps_are_discarded():
  tapes = _trained(12)
  tapes.merge(1, tapes.publish(0, 8))
  tapes.adopt(8, 10)
  assert _fates(tapes) == {
    "trained": 12,
    "merged": 8,
    "overwritten": 2,
    "pending": 2,
  }


def test_publication_survives_a_wide_overwrite():
  tapes = _trained(10)
  item = tapes.publish(0, 8)
  tapes.adopt(0, 10)
  assert _fates(tapes) == {"trained": 10, "pending": 8, "overwritten": 2}
  tapes.discard(item, "stale")
  assert _fates(tapes) == {"trained": 10, "stale": 8, "overwritten": 2}


def test_adoption_that_loses_nothing_changes_nothing():
  tapes = _trained(10)
  tapes.adopt(5, 5)
  tapes.adopt(None, None)
  assert _fates(tapes) == {"trained": 10, "pending": 10}


def test_superseding_publication_takes_the_steps_over():
  tapes = _trained(12)
  first = tapes.publish(0, 6)
  second = tapes.publish(0, 12)
  assert _fates(tapes) == {"trained": 12, "pending": 12}
  tapes.discard(first, "superseded")
  assert _fates(tapes) == {"trained": 12, "pending": 12}
  tapes.discard(second, "stale")
  assert _fates(tapes) == {"trained": 12, "stale": 12}


def test_superseded_publication_is_not_pending_even_if_never_resolved():
  tapes = _trained(12)
  tapes.publish(0, 6)
  tapes.discard(tapes.publish(0, 12), "stale")
  assert _fates(tapes) == {"trained": 12, "stale": 12}


def test_publication_based_on_a_merged_one_loses_only_the_rest():
  tapes = _trained(12)
  first = tapes.publish(0, 6)
  second = tapes.publish(0, 12)
  tapes.merge(1, first)
  tapes.discard(second, "overlaps_merged")
  assert _fates(tapes) == {"trained": 12, "merged": 6, "overlaps_merged": 6}


def test_last_reason_counts():
  tapes = _trained(9)
  tapes.discard(tapes.publish(0, 5), "stale")
  tapes.discard(tapes.publish(0, 9), "not_finite: tensor w")
  assert _fates(tapes) == {"trained": 9, "not_finite": 9}


def test_discarded_without_a_range_means_what_was_published():
  tapes = _trained(9)
  item = tapes.publish(0, 5)
  tapes.discard({**item, "first_step": 0, "step": 0}, "corrupt_record")
  assert _fates(tapes) == {"trained": 9, "corrupt_record": 5, "pending": 4}


def test_dropped_publication_is_discarded_unless_sent_later():
  tapes = _trained(12)
  tapes.drop(0, 6)
  assert _fates(tapes) == {"trained": 12, "publish_dropped": 6, "pending": 6}
  tapes.publish(0, 12)
  assert _fates(tapes) == {"trained": 12, "pending": 12}


def test_steps_without_any_evidence_are_unaccounted_and_reported():
  tapes = _trained(20)
  tapes.publish(0, 6)
  tapes.publish(9, 14)
  assert _fates(tapes) == {"trained": 20, "pending": 17, "unaccounted": 3}
  (violation,) = _violations(tapes)
  assert violation == "island 0, fragment 0: steps (6, 9] have no fate"


def _merged_twice(tapes):
  tapes.merge(1, tapes.publish(0, 6))
  tapes.merge(2, tapes.publish(4, 9))


def _merged_twice_at_once(tapes):
  item = tapes.publish(0, 6)
  tapes.merge(1, item, item)


def _merged_three_times_at_once(tapes):
  item = tapes.publish(0, 6)
  tapes.merge(1, item, item, item)


def _never_published(tapes):
  tapes.merge(1, tapes.contribution(0, 6))
  tapes.publish(6, 8)


def _never_published_by_stopped(tapes):
  tapes.stop(10)
  tapes.merge(1, tapes.contribution(0, 6))


def _never_published_by_unknown(tapes):
  tapes.merge(1, tapes.contribution(0, 6, incarnation=7))


def _other_range(tapes):
  item = tapes.publish(0, 6)
  tapes.merge(1, {**item, "step": 8})


def _other_tokens(tapes):
  item = tapes.publish(0, 6)
  tapes.merge(1, {**item, "c_tokens": 61})


def _skipped_rows(tapes):
  tapes.start(step=12)
  tapes.train(12, 14)


def _skipped_row(tapes):
  tapes.start(step=11)


def _skipped_first_rows(tapes):
  tapes.start(island=1, step=3)


def _repeated_without_a_first_time(tapes):
  tapes.publish(0, 6)
  tapes.start(step=4, unsent_from_step=[8])
  tapes.train(4, 9)


def _merged_by_two_lives(tapes):
  tapes.merge(1, tapes.publish(0, 6))
  tapes.start(step=4)
  tapes.train(4, 9)
  tapes.merge(2, tapes.publish(4, 9))


def _zombie(tapes):
  tapes.start(step=10)
  tapes.train(10, 12)
  tapes.train(10, 11, incarnation=1)


def _unknown_island(tapes):
  tapes.merge(1, tapes.contribution(0, 6, island=5, incarnation=1))


def _unknown_incarnation(tapes):
  tapes.train(10, 12, incarnation=2)


def _trained_beyond(tapes):
  tapes.start(step=15)
  tapes.merge(1, tapes.publish(8, 18))


def _logged_again(tapes):
  tapes.train(8, 9)


def _last_logged_again(tapes):
  tapes.train(9, 10)


def _version_twice(tapes):
  tapes.merge(1, tapes.publish(0, 6))
  tapes.merge(1, tapes.publish(6, 8))


@pytest.mark.parametrize(
  "action, text",
  [
    (_merged_twice, r"steps \(4, 6\] merged twice, in versions \[1, 2\]"),
    (_merged_twice_at_once, r"steps \(0, 6\] merged twice"),
    (_merged_three_times_at_once, r"steps \(0, 6\] merged twice"),
    (_never_published, r"\(0, 6\] merged in version 1 were never published"),
    (_never_published_by_stopped, "were never published"),
    (_never_published_by_unknown, "were never published"),
    (_other_range, r"\(0, 8\] .* published as steps \(0, 6\]"),
    (_other_tokens, "with 61 tokens, but published .* with 60"),
    (_skipped_rows, r"rows \(10, 12\] were skipped, before incarnation 2"),
    (_skipped_row, r"rows \(10, 11\] were skipped"),
    (_skipped_first_rows, r"island 1: rows \(0, 3\] were skipped"),
    (_repeated_without_a_first_time, r"\(6, 8\] of incarnation 2 are called"),
    (_merged_by_two_lives, r"\(4, 6\] merged twice, in versions \[1, 2\]"),
    (_zombie, r"1 and 2 overlap: the first trained step 11"),
    (_unknown_island, "island 5.*merged, yet no incarnation trained them"),
    (_unknown_incarnation, "incarnation 2 logged steps but"),
    (_trained_beyond, r"\(10, 15\] merged, yet no incarnation"),
    (_logged_again, "incarnation 1 logged step 9 again"),
    (_last_logged_again, "incarnation 1 logged step 10 again"),
    (_version_twice, "fragment 0: version 1 was committed twice"),
  ],
)
def test_broken_rule_is_reported(action, text):
  tapes = _trained(10)
  action(tapes)
  assert any(re.search(text, v) for v in _violations(tapes))
  _fates(tapes)  # it adds up all the same


@pytest.mark.parametrize(
  ("steps", "again"),
  [((1, 2, 3), None), ((2, 4), None), ((1, 2, 2), 2), ((1, 2, 3, 1, 2), 2)],
)
def test_last_step_that_is_logged_again_is_named(steps, again):
  log = evidence.StepLog()
  for step in steps:
    log.take(1, step)
  found = log.violations({1: evidence.Life(1, 0, 10, 3)})
  assert found == (
    [f"incarnation 1 logged step {again} again"] if again else []
  )


@pytest.mark.parametrize(("start", "fine"), [(0, True), (3, True), (4, False)])
def test_life_trains_beyond_where_it_began(start, fine):
  log = evidence.StepLog()
  log.take(2, 4)
  assert (not log.violations({2: evidence.Life(2, start, 10, 9)})) == fine


@pytest.mark.parametrize("broken", [1, 100, 101, 130])
def test_first_hundred_broken_rules_are_named_and_others_counted(broken):
  tapes = _trained(10)
  for island in range(1, broken + 1):
    tapes.start(island=island, step=3)
  found = _violations(tapes)
  named = [
    f"island {island}: rows (0, 3] were skipped, before incarnation 1 began"
    for island in range(1, broken + 1)
  ]
  more = [f"and {broken - 100} more"] if broken > 100 else []
  assert found == [*named[:100], *more]


def test_merge_told_again_after_a_takeover_counts_once():
  tapes = _trained(10)
  item = tapes.publish(0, 6)
  tapes.merge(1, item)
  tapes.merge(1, item)
  assert _fates(tapes) == {"trained": 10, "merged": 6, "pending": 4}
  assert not _violations(tapes)


def test_rows_that_any_life_did_are_not_skipped():
  tapes = _trained(10)
  for start, end in ((3, 5), (8, 12)):
    tapes.start(step=start)
    tapes.train(start, end)
  assert not _violations(tapes)


def test_last_publication_of_a_killed_island_may_lack_its_line():
  tapes = _trained(10)
  tapes.publish(0, 4)
  item = tapes.contribution(4, 8)
  tapes.die()
  tapes.merge(1, item)
  assert not _violations(tapes)
  assert _fates(tapes)["merged"] == 4


def test_plain_tokens_add_up_to_the_last_token():
  tapes = Tapes()
  tapes.start(tokens_per_step=11)
  tapes.train(0, 10)
  tapes.merge(1, tapes.publish(0, 3))
  tapes.discard(tapes.publish(0, 5, fragment=3), "stale")
  tapes.adopt(0, 3, fragment=4)
  result = ledger.compute(tapes.record(), 7)
  tokens = result.tokens()
  assert tokens.trained == 110 and result.trained == 770
  parts = [tokens.merged, tokens.pending, *tokens.discarded.values()]
  assert sum(parts) == 110
  for part, exact in zip(
    parts,
    [result.merged, result.pending, *result.discarded.values()],
    strict=True,
  ):
    assert abs(part - exact / 7) < 1


def test_islands_report_their_own_tokens():
  tapes = _trained(4)
  tapes.start(island=1, tokens_per_step=100)
  tapes.train(0, 3, island=1)
  result = ledger.compute(tapes.record(), 2)
  assert result.islands == {0: 40, 1: 300}
  assert result.tokens().trained == 340


def _operations(num_publications, steps_each):
  """Operations of the interpreter that a ledger of so much takes."""
  tapes = Tapes()
  tapes.start()
  for number in range(1, num_publications + 1):
    for fragment in range(3):
      step = number * steps_each - fragment
      first = max(step - steps_each, 0)
      tapes.merge(number, tapes.publish(first, step, fragment=fragment))
  record, count = tapes.record(), 0

  def trace(frame, event, arg):
    nonlocal count
    frame.f_trace_opcodes = True
    count += event == "opcode"
    return trace

  before = sys.gettrace()
  sys.settrace(trace)
  try:
    result = ledger.compute(record)
  finally:
    sys.settrace(before)
  assert result.balanced
  steps = 3 * num_publications * steps_each - 3
  assert result.merged == steps * TOKENS_PER_STEP
  return count


def test_work_grows_with_publications_not_with_steps():
  _operations(1, 24)  # what is done once in a process
  few = _operations(40, 24)
  # Now and then the interpreter itself does something meanwhile.
  assert abs(_operations(40, 24_000_000) - few) < 0.01 * few
  assert _operations(160, 24) < 1.5 * 4 * few  # some is summed up meanwhile
  assert _operations(640, 24) < 1.5 * 16 * few


@pytest.mark.parametrize(
  ("dies", "fate"), [(True, "lost_with_island"), (False, "pending")]
)
def test_publication_under_way_is_lost_with_its_island_or_pending(dies, fate):
  # The island adopted a version while its publication of step 6 was waiting.
  tapes = _trained(8)
  tapes.submit(0, 6)
  tapes.adopt(6, 8)
  if dies:
    tapes.die()
  assert _fates(tapes) == {"trained": 8, fate: 6, "overwritten": 2}


def _restarted(start, unsent, steps=14):
  """Ten steps, six of them merged; a second life goes on from `start`."""
  tapes = _trained(10)
  tapes.merge(1, tapes.publish(0, 6))
  tapes.die()
  tapes.start(step=start, unsent_from_step=[unsent])
  tapes.train(start, steps)
  return tapes


def _rows(tapes):
  ((rows,),) = ledger.compute(tapes.record()).rows.values()
  return rows


def test_steps_done_again_after_a_restart_have_two_fates():
  tapes = _restarted(start=8, unsent=6)
  tapes.merge(2, tapes.publish(6, 14))
  assert not _violations(tapes)
  # Steps 7 and 8 were restored, 9 and 10 lost and done again.
  assert _fates(tapes) == {"trained": 16, "merged": 14, "lost_with_island": 2}
  assert _rows(tapes) == {"merged": [(0, 14)]}


def test_muted_fragment_repeats_what_was_published():
  tapes = _restarted(start=3, unsent=6)
  tapes.merge(2, tapes.publish(6, 14))
  assert not _violations(tapes)
  assert _fates(tapes) == {
    "trained": 21,
    "merged": 14,
    "repeated": 3,
    "lost_with_island": 4,
  }
  assert _rows(tapes) == {"merged": [(0, 14)]}


def test_rows_that_a_living_life_does_again_are_not_lost():
  tapes = _trained(8)
  tapes.submit(0, 8)  # its record is in the store, its line is not written
  tapes.die()
  tapes.start(step=4, unsent_from_step=[8])
  tapes.train(4, 10)
  assert _rows(tapes) == {"lost_with_island": [(0, 4)], "pending": [(4, 10)]}
  assert not _violations(tapes)
  tapes.merge(1, tapes.contribution(0, 8, incarnation=1))
  assert _rows(tapes) == {"merged": [(0, 8)], "pending": [(8, 10)]}
  assert not _violations(tapes)


def test_fragment_is_muted_by_a_version_that_is_ahead_of_it():
  tapes = _restarted(start=3, unsent=3, steps=4)
  tapes.adopt(3, 4, step=4, muted_until=6)
  tapes.train(4, 9)
  assert not _violations(tapes)
  assert _fates(tapes) == {
    "trained": 16,
    "merged": 6,
    "overwritten": 1,
    "repeated": 2,
    "lost_with_island": 4,
    "pending": 3,
  }


def test_life_that_dies_while_it_is_muted_has_repeated_no_more_than_it_did():
  tapes = _restarted(start=2, unsent=6, steps=4)
  tapes.die()
  assert _fates(tapes)["repeated"] == 2


def test_what_a_muted_life_never_came_to_is_still_lost():
  tapes = _trained(8)
  tapes.submit(0, 8)  # it may be in the store
  tapes.die()
  tapes.start(step=4, unsent_from_step=[8])
  tapes.train(4, 6)
  tapes.die()
  assert _fates(tapes) == {
    "trained": 10,
    "lost_with_island": 8,
    "repeated": 2,
  }


def test_rows_that_were_skipped_are_not_among_those_that_were_read():
  tapes = _trained(4)
  tapes.merge(1, tapes.publish(0, 4))
  tapes.start(step=7)
  tapes.train(7, 9)
  assert _rows(tapes) == {"merged": [(0, 4)], "pending": [(7, 9)]}


def test_rows_name_the_reason_of_each_that_is_not_merged():
  tapes = _trained(12)
  tapes.merge(1, tapes.publish(0, 4))
  tapes.discard(tapes.publish(4, 7), "too_stale")
  tapes.adopt(7, 9)
  tapes.die()
  tapes.start(step=10)
  tapes.train(10, 11)
  result = ledger.compute(tapes.record())
  assert _rows(tapes) == {
    "merged": [(0, 4)],
    "too_stale": [(4, 7)],
    "overwritten": [(7, 9)],
    "lost_with_island": [(9, 10)],
    "pending": [(10, 11)],
  }
  assert result.unmerged_rows() == {
    "too_stale": 3,
    "overwritten": 2,
    "lost_with_island": 1,
    "pending": 1,
  }


def test_publication_whose_record_vanished_is_lost_once_it_is_done_again():
  tapes = _trained(10)
  tapes.publish(0, 8)
  tapes.die()
  tapes.start(step=4, unsent_from_step=[0])
  tapes.train(4, 6)
  tapes.publish(0, 6)
  assert not _violations(tapes)
  assert _fates(tapes) == {"trained": 12, "lost_with_island": 6, "pending": 6}


def test_quarantined_island_gives_steps_up_by_name():
  tapes = _trained(10)
  item = tapes.publish(0, 6)
  tapes.discard(item, "not_finite")
  tapes.resync(10, {"fragment": 0, "lost_from_step": 6, "lost_to_step": 10})
  tapes.train(10, 12)
  assert not _violations(tapes)
  assert _fates(tapes) == {
    "trained": 12,
    "not_finite": 6,
    "quarantined": 4,
    "pending": 2,
  }


def _rolled_back(reinjected=()):
  """The cut was taken at version 1 and step 5; all was merged up to 9."""
  tapes = _trained(5)
  tapes.merge(1, tapes.publish(0, 4))
  item = tapes.publish(4, 5, fragment=0)
  tapes.train(5, 10)
  tapes.merge(2, item)
  tapes.merge(3, tapes.publish(5, 9))
  tapes.restore([1], [4], [item["key"]] if reinjected else [])
  tapes.start(step=5, unsent_from_step=[5])
  tapes.train(5, 7)
  return tapes, item


def test_merges_after_a_cut_are_rolled_back_with_it():
  tapes, _ = _rolled_back()
  assert _fates(tapes) == {
    "trained": 12,
    "merged": 4,
    "rolled_back": 5,
    "lost_with_island": 1,
    "pending": 2,
  }
  tapes.merge(5, tapes.publish(5, 7))
  assert not _violations(tapes)
  assert _rows(tapes) == {
    "merged": [(0, 4), (5, 7)],
    "rolled_back": [(4, 5)],  # what lies ahead will be read again
  }


def test_row_that_was_rolled_back_and_lost_as_it_was_read_again_is_so_called():
  tapes, _ = _rolled_back()
  tapes.drop(5, 7)  # the store was out of reach
  assert _rows(tapes) == {
    "merged": [(0, 4)],
    "rolled_back": [(4, 5)],
    "publish_dropped": [(5, 7)],
  }
  tapes.train(7, 8)
  tapes.discard(tapes.publish(7, 8), "corrupt")
  assert _rows(tapes)["corrupt"] == [(7, 8)]
  assert not _violations(tapes)


def test_contribution_that_waits_again_may_be_merged_again():
  tapes, item = _rolled_back(reinjected=True)
  expected = {"trained": 12, "merged": 4, "rolled_back": 4}
  tail = {"lost_with_island": 1, "pending": 3}
  assert _fates(tapes) == expected | tail
  tapes.merge(5, item, tapes.publish(5, 7))
  assert not _violations(tapes)
  assert _fates(tapes) == {
    "trained": 12,
    "merged": 7,
    "rolled_back": 4,
    "lost_with_island": 1,
  }


@pytest.mark.parametrize("torn", [True, False])
def test_what_lost_tapes_do_not_tell_is_lost_if_the_run_was_set_back(torn):
  tapes = _trained(30)
  tapes.merge(1, tapes.publish(0, 10))
  # It published up to 20, too. Its machine, given up, comes back for a moment.
  late = tapes.contribution(20, 30)
  tapes.restore([1], [4], torn=torn, steps={"0": 12})
  tapes.start(step=12, unsent_from_step=[10], epoch=1)
  tapes.train(12, 14)
  tapes.discard(late, "before_restore")
  told = ledger.compute(tapes.record(), every=2)
  assert told.violations == (
    [] if torn else ["island 0, fragment 0: steps (12, 20] have no fate"]
  )
  assert bool(told.silent) is not torn
  assert _fates(tapes) == {
    "trained": 32,
    "merged": 10,
    "before_restore": 10,
    "pending": 4,
    "lost_with_island" if torn else "unaccounted": 8,
  }


@pytest.mark.parametrize("ends", ["died", "stopped", "set back"])
def test_life_that_was_over_when_tapes_were_lost_is_judged_as_ever(ends):
  tapes = _trained(20)
  item = tapes.contribution(14, 20)  # and of (10, 14] nothing is known
  tapes.merge(1, tapes.publish(0, 10))
  tapes.discard(item, "corrupt")
  if ends == "died":
    tapes.die()
  elif ends == "stopped":
    tapes.stop(20)
  else:
    tapes.restore([1], [3], epoch=1, steps={"0": 10})
  epoch = int(ends == "set back")
  tapes.start(step=20 if not epoch else 10, epoch=epoch)
  tapes.train(20 if not epoch else 10, 30)
  tapes.restore([3], [6], torn=True, epoch=epoch + 1, steps={"0": 12})
  tapes.start(step=12, epoch=epoch + 1)
  violations = _violations(tapes)
  assert "island 0, fragment 0: steps (10, 14] have no fate" in violations


def test_row_merged_before_a_cut_and_again_after_it_is_merged_twice():
  tapes, _ = _rolled_back()
  tapes.merge(5, tapes.publish(3, 7))
  assert any("(3, 4] merged twice" in v for v in _violations(tapes))


def test_rows_that_are_summed_up_cannot_be_merged_again():
  tapes = _trained(4000)
  items = [tapes.publish(n, n + 2) for n in range(0, 4000, 2)]
  for version, item in enumerate(items, 1):
    tapes.merge(version, item)
  result = ledger.compute(tapes.record())
  assert result.balanced and result.merged == 4000 * TOKENS_PER_STEP
  assert result.folded_rows["merged"] > 2000
  again = {**items[7], "key": "another"}
  tapes.merge(len(items) + 1, again)
  (violation,) = _violations(tapes)
  assert "steps (14, 16] merged in version 2001, after all up to" in violation


def test_what_is_wrong_with_rows_that_are_summed_up_is_told():
  tapes = _trained(4000)
  items = [
    tapes.publish(n, n + 2) if n != 10 else tapes.contribution(10, 12)
    for n in range(0, 4000, 2)
  ]
  tapes.start(step=4000)  # the life before has told all it ever will
  for version, item in enumerate(items, 1):
    tapes.merge(version, item)
  result = ledger.compute(tapes.record())
  assert result.folded_rows["merged"] > 2000
  assert result.violations == [
    "island 0, fragment 0: steps (10, 12] merged in version 6 were never"
    " published"
  ]


def test_version_told_again_after_many_others_counts_once(monkeypatch):
  monkeypatch.setattr(history, "_KNOWN_VERSIONS", 2)
  tapes = _trained(8)
  items = [tapes.publish(n, n + 2) for n in range(0, 8, 2)]
  for version, item in enumerate(items, 1):
    tapes.merge(version, item)
  tapes.merge(1, items[0])
  assert not _violations(tapes)
  assert _fates(tapes) == {"trained": 8, "merged": 8}


@pytest.mark.parametrize("told", [False, True])
def test_what_has_no_fate_is_never_summed_up(told):
  tapes = _trained(4000)
  tapes.submit(0, 2)
  if told:
    waiting = tapes.publish(0, 2)
  items = [tapes.publish(n, n + 2) for n in range(2, 4000, 2)]
  for version, item in enumerate(items, 1):
    tapes.merge(version, item)
  result = ledger.compute(tapes.record())
  assert result.balanced and result.pending == 2 * TOKENS_PER_STEP
  assert not result.folded_rows
  if not told:
    waiting = tapes.publish(0, 2)  # the publisher was slow
  tapes.merge(len(items) + 1, waiting)
  assert _fates(tapes) == {"trained": 4000, "merged": 4000}


def test_island_that_never_publishes_is_not_balanced():
  tapes = _trained(8 * 4 + 1)
  assert ledger.compute(tapes.record()).balanced  # H is not known
  assert ledger.compute(_trained(8 * 4).record(), every=4).balanced
  result = ledger.compute(tapes.record(), every=4)
  assert not result.balanced
  (violation,) = result.violations
  assert "steps (0, 33] of incarnation 1 were never handed out" in violation


def test_island_that_fell_silent_is_named():
  tapes = _trained(60)
  tapes.submit(0, 20)  # the publisher has it, the store does not
  result = ledger.compute(tapes.record(), every=4)
  assert result.balanced
  (text,) = result.silent
  assert "steps (20, 60] of incarnation 1" in text


@pytest.mark.parametrize("summed_up", [False, True])
def test_island_that_publishes_in_time_is_not_called_silent(summed_up):
  steps = 4000 if summed_up else 40
  tapes = _trained(steps)
  for version, first in enumerate(range(0, steps, 4), 1):
    tapes.merge(version, tapes.publish(first, first + 4))
  result = ledger.compute(tapes.record(), every=4)
  assert result.balanced and not result.silent


def test_muted_island_is_not_called_silent():
  tapes = _trained(8)
  tapes.merge(1, tapes.publish(0, 8))
  tapes.start(step=2, unsent_from_step=[60])
  tapes.train(2, 60)
  assert not ledger.compute(tapes.record(), every=4).silent


def _sent(key):
  return evidence.Contribution(key, 1, 0, 8, 80)


_LOSS = evidence.Loss(1, 0, 8)
# What may be told of a step and what it makes of it, the weakest first.
_EVIDENCE = {
  "submitted": (lambda f: f.submitted.append(_LOSS), "lost_with_island"),
  "superseded": (
    lambda f: f.discarded.append(("superseded", _sent("s"))),
    "superseded",
  ),
  "dropped": (lambda f: f.dropped.append(_LOSS), "publish_dropped"),
  "overwritten": (lambda f: f.overwritten.append(_LOSS), "overwritten"),
  "quarantined": (lambda f: f.quarantined.append(_LOSS), "quarantined"),
  "discarded": (
    lambda f: f.discarded.append(("too_stale", _sent("d"))),
    "too_stale",
  ),
  "rolled back": (lambda f: f.rolled_back.append(_sent("r")), "rolled_back"),
  "published": (lambda f: f.published.update(p=_sent("p")), "pending"),
  "merged": (
    lambda f: f.merged.append(evidence.Merge(1, _sent("m"))),
    "merged",
  ),
}


@pytest.mark.parametrize(
  ("weak", "strong"), [*itertools.combinations(_EVIDENCE, 2)]
)
def test_stronger_evidence_decides_over_weaker(weak, strong):
  facts = evidence.FragmentHistory()
  for name in (strong, weak):
    _EVIDENCE[name][0](facts)
    canvas = fates_lib.Canvas([evidence.Life(1, 0, 10, 8, died=True)], facts)
    assert canvas.counts() == {_EVIDENCE[strong][1]: 80}, name
