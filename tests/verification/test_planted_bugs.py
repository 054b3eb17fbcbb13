"""The checker is checked: each planted bug is caught, and soon enough."""

import exhaustive
import plants
import pytest

from diloco.verification import (
  faults,
  schedules,
  world,
)

# Bug -> schedules within which it is caught, from its first seed. Several times
# what it took when the table was made, so that a change of the protocol or of
# what faults are drawn does not matter.
LIMITS = {
  "takes_up_nobody": 60,
  "refused_start_forgotten": 60,
  "death_in_its_start_forgotten": 60,
  "gives_nobody_up": 300,
  "too_few_go_on": 600,
  "ends_with_the_first": 300,
  "merges_settle_nobody": 1500,
  "first_error_ends": 800,
  "alike_forgiven": 600,
  "steps_settle_nobody": 300,
  "settled_at_any_step": 600,
  "hurdle_forgotten": 900,
  "slice_kept": 100,
  "damage_unheard": 900,
  "failed_return_forgotten": 900,
  "hanging_borne": 200,
  "deaf_to_signs_of_life": 60,
  "thread_ends_unseen": 60,
  "merge_never_ends": 5,
  "waiting_ends": 100,
  "handed_back_early": 5,
  "stamped_as_closed": 2000,
  "found_beside_broken_forgotten": 100,
  "follow_delays_grid": 200,
  "commit_without_fence": 300,
  "commit_result_ignored": 1500,
  "commit_tried_again": 600,
  "token_not_raised": 1500,
  "head_before_payload": 5,
  "record_before_payload": 5,
  "live_payload_deleted": 800,
  "base_deleted": 5,
  "foreign_clock": 20,
  "counters_kept": 5,
  "merged_twice": 20,
  "passed_over_forgotten": 200,
  "supersession_dropped": 30,
  "grace_over_slack": 30,
  "staleness_off_by_one": 30,
  "quorum_of_contributions": 200,
  "muted_publishes": 60,
  "rows_skipped": 60,
  "older_than_clock": 60,
  "optimizer_stale": 200,
  "saved_too_early": 400,
  "saved_of_any_timeline": 500,
  "given_up_while_open": 5,
  "goes_on_unanswered": 20,
  "others_answer": 300,
  "part_pushed_out": 60,
  "unreadable_ends_search": 40,
  "epoch_ignored": 600,
  "cut_taken_late": 300,
  "cut_unstamped": 200,
  "cut_without_channel": 2000,
  "cut_unpinned": 200,
  "cut_unverified": 800,
  "cuts_all_damaged": 2500,
  "offence_not_told": 200,
  "failed_merge_left": 1000,
  "unheard_commit_undone": 1800,
  "head_unstamped": 100,
  "head_of_first_epoch": 60,
  "litter_forgotten": 2500,
  "token_restarts": 900,
  "deposed_goes_back": 2500,
  "epoch_not_held": 2500,
  "lease_stays_damaged": 400,
  "superseded_lost": 30,
  "failed_merge_given_up": 400,
  "weight_without_staleness": 10,
  "weight_without_tokens": 5,
  "merge_without_radius": 120,
  "merge_by_mean": 120,
  "staleness_at_limit_refused": 30,
  "reason_swapped": 20,
  "overlaps_forgotten": 20,
  "merged_and_discarded": 20,
  "gate_open": 300,
  "gate_without_root": 400,
  "gate_never_gives_in": 400,
  "suspended_at_once": 60,
  "lost_understated": 20,
  "lost_overstated": 20,
  "adopted_unstamped": 100,
  "survey_race": 900,
}

# Of those that took longest, the seeds to begin with. Once other faults are
# drawn for a seed they may be taken out: the limits are counted from there.
FIRST = {
  "failed_return_forgotten": 1480,
  "merges_settle_nobody": 990,
  "deposed_goes_back": 610,
  "epoch_not_held": 610,
  "stamped_as_closed": 500,
  "survey_race": 290,
  "epoch_ignored": 290,
  "live_payload_deleted": 290,
  "damage_unheard": 200,
  "cut_unverified": 200,
  "cuts_all_damaged": 200,
  "commit_tried_again": 160,
  "first_error_ends": 190,
  "settled_at_any_step": 145,
  "steps_settle_nobody": 60,
  "alike_forgiven": 600,
  "hurdle_forgotten": 2050,
  "unheard_commit_undone": 160,
  "token_restarts": 150,
  "too_few_go_on": 150,
  "failed_merge_given_up": 160,
  "lease_stays_damaged": 140,
  "saved_too_early": 90,
  "found_beside_broken_forgotten": 80,
  "failed_merge_left": 70,
  "commit_result_ignored": 50,
  "commit_without_fence": 50,
  "gives_nobody_up": 50,
  "gate_never_gives_in": 30,
  "saved_of_any_timeline": 30,
  "gate_open": 30,
  "gate_without_root": 30,
  "ends_with_the_first": 10,
  "waiting_ends": 10,
  "offence_not_told": 10,
  "slice_kept": 10,
}


found = schedules.Schedule.from_json  # and shrunk, by a campaign
SMALL = schedules.Schedule(1, islands=2, fragments=1, sync_every=1)


def faults_while_an_island_is_poisoned(kind):
  for number in range(20, 160):
    yield SMALL.replace(
      rounds=4,
      quorum=2,
      standby=False,
      faults=(
        faults.Fault(faults.POISON, "island-1", 2.0),
        faults.Fault(kind, "syncer", float(number)),
      ),
    )


def failed_writes_while_an_island_is_poisoned():
  return faults_while_an_island_is_poisoned(faults.FAIL_BEFORE)


def verdicts_that_rot():
  return faults_while_an_island_is_poisoned(faults.CORRUPT)


def slow_looks_at_a_lease_whose_owner_dies():
  for number in range(2, 20):
    for tenth in range(35, 55):
      yield SMALL.replace(
        seed=2,
        faults=(
          faults.Fault(faults.SLOW, "standby", float(number), 2.2),
          faults.Fault(faults.KILL, "syncer", tenth / 10),
        ),
      )


def leaders_stopped_while_they_take_over():
  for number in range(2, 60):
    for tenth in range(30, 60, 5):
      yield SMALL.replace(
        rounds=8,
        faults=(
          faults.Fault(faults.KILL, "syncer", tenth / 10),
          faults.Fault(faults.STOP, "standby", float(number), 6.0),
        ),
      )


def leases_torn_as_they_are_taken():
  for seed in range(1, 9):
    for role in ("syncer", "standby"):
      yield SMALL.replace(
        seed=seed,
        rounds=4,
        faults=(faults.Fault(faults.TORN, role, 1.0),),
      )


def returns_to_a_cut():
  for seed in range(630, 1030):
    yield schedules.draw(seed).replace(
      rounds=14, cuts=2.0, set_back=True, moves=False, fine=False, faults=()
    )


def leases_damaged_twice():
  for number in range(60, 110):
    yield SMALL.replace(
      seed=44278,
      rounds=5,
      faults=(
        faults.Fault(faults.SLOW, "syncer", 38.0, 3.183),
        faults.Fault(faults.TORN, "syncer", 39.0),
        faults.Fault(faults.TORN, "standby", float(number)),
      ),
    )


def peers_that_wait_for_a_slow_board():
  for number in range(235, 260):
    yield SMALL.replace(
      seed=3,
      rounds=40,
      standby=False,
      faults=(
        faults.Fault(faults.UNREADABLE, "island-1", 1.0, 60.0),
        faults.Fault(faults.KILL, "island-1", 7.0),
        faults.Fault(faults.SLOW, "syncer", float(number), 4.0),
      ),
    )


def cuts_while_one_leader_sleeps_and_the_deposed_one_wakes():
  base = found(
    '{"seed":11119,"rounds":15,"fragments":3,"quorum":3,"merge":"mean",'
    '"grace":"0.2","cuts":2.8129999999999997,"set_back":1,"faults":['
    '["kill","island-2",5.544,0.0],["partition","standby",4.752,5.432],'
    '["pause","syncer",8.023,3.407]]}'
  )
  crash, cut_off, asleep = base.faults
  for early in range(-1, 8):
    for late in range(-4, 5):
      yield base.replace(
        faults=(
          crash,
          cut_off._replace(secs=cut_off.secs + early / 20),
          asleep._replace(at=asleep.at + late / 20),
        )
      )


def requests_for_a_cut_that_land_after_a_return():
  for seed in range(1, 40):
    run = SMALL.replace(seed=seed, rounds=10, cuts=1.5, set_back=True)
    trace = []
    world.run(run, trace)
    done = [line for line in trace if " controller " in line][1:]
    for number, line in enumerate(done, 1):
      if "CompareAndSet cuts" in line:
        for secs in (0.7, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0):
          late = (faults.KILL_LATE, "controller", float(number), secs)
          yield run.replace(faults=(faults.Fault(*late),))


def takeovers_with_a_stale_listing():
  for stale in (3.4, 3.9, 4.4, 4.9):
    yield found(
      '{"seed":1,"rounds":15,"islands":1,"sync_every":2,"cuts":2.953,'
      '"set_back":true,"faults":[["kill","standby",5.673,0.0],["stale","syncer",'
      f'{stale},5.135],["global_lost","fragment-0",9.286,9.358]]}}'
    )


def second_returns_after_one_that_missed_the_newest_cut():
  for seed in range(1, 5):
    for at in range(12, 26, 2):
      yield SMALL.replace(
        seed=seed,
        rounds=25,
        cuts=8.0,
        set_back=2,
        faults=(faults.Fault(faults.STALE, "restorer", float(at), 15.0),),
      )


def heads_under_another_fragments_key():
  for seed in range(1, 9):
    yield SMALL.replace(
      seed=seed,
      fragments=2,
      sync_every=2,
      rounds=30,
      cuts=2.0,
      set_back=1,
      faults=(faults.Fault(faults.HEAD_SWAPPED, "fragment-0", 6.0, 5.0),),
    )


def heads_and_tensors_of_one_fragment_damaged():
  for seed in range(12, 30):
    for kind in (faults.HEAD_CORRUPT, faults.GLOBAL_CORRUPT):
      yield schedules.Schedule(
        seed,
        rounds=60,
        sync_every=2,
        cuts=1.5,
        set_back=1,
        faults=(faults.Fault(kind, "fragment-0", 8.0, 20.0),),
      )


def versions_nobody_has_damaged():
  return exhaustive.spoiled(1, moments=(5.3,), lasting=(25.0,))


def publications_too_slow_for_what_follows():
  for seed in range(1, 5):
    for number in range(15, 45):
      yield schedules.Schedule(
        seed,
        rounds=12,
        islands=3,
        fragments=1,
        sync_every=1,
        faults=(faults.Fault(faults.SLOW, "island-0", float(number), 7.0),),
      )


def answers_too_slow_for_who_asked():
  for number in range(155, 195):
    yield SMALL.replace(
      rounds=60,
      faults=(
        faults.Fault(faults.UNREADABLE, "island-1", 1.0, 60.0),
        faults.Fault(faults.KILL, "island-1", 6.0),
        faults.Fault(faults.SLOW, "island-0", float(number), 12.0),
      ),
    )


def heads_damaged_while_their_leader_is_stopped_and_replaced():
  for seed in range(1, 9):
    for secs in (4.0, 6.0, 8.0):
      yield SMALL.replace(
        seed=seed,
        rounds=30,
        cuts=2.0,
        set_back=1,
        faults=(
          faults.Fault(faults.PAUSE, "syncer", 6.0, secs),
          faults.Fault(faults.HEAD_CORRUPT, "fragment-0", 5.7 + secs, 5.0),
        ),
      )


def heads_lost_right_after_a_commit_that_went_unheard():
  for number in range(140, 260):
    unheard = faults.Fault(faults.FAIL_AFTER, "syncer", float(number))
    schedule = SMALL.replace(
      seed=6, rounds=30, standby=False, cuts=2.0, set_back=1, faults=(unheard,)
    )
    trace = []
    world.run(schedule, trace)
    for line in trace:
      if "fail_after at CompareAndSet heads" in line:
        at = float(line.split()[0]) + 0.05
        lost = faults.Fault(faults.HEAD_LOST, "fragment-0", at, 5.0)
        yield schedule.replace(faults=(unheard, lost))


def heads_lost_with_their_leader():
  for seed in range(1, 4):
    for at in (4.0, 5.3, 6.6):
      yield SMALL.replace(
        seed=seed,
        rounds=40,
        sync_every=2,
        cuts=1.5,
        set_back=1,
        faults=(
          faults.Fault(faults.HEAD_LOST, "fragment-0", at, 5.0),
          faults.Fault(faults.KILL, "syncer", at + 0.1),
          faults.Fault(faults.KILL, "standby", at + 0.1),
        ),
      )


def payloads_that_rot_while_others_are_stale():
  for seed in range(1, 5):
    for number in range(10, 60, 5):
      yield SMALL.replace(
        seed=seed,
        islands=3,
        max_staleness=3,
        rounds=12,
        faults=tuple(
          faults.Fault(faults.CORRUPT, f"island-{m}", float(number + 7 * k))
          for m in range(3)
          for k in range(3)
        ),
      )


def payloads_that_rot_while_all_wait():
  for number in range(10, 40):
    yield SMALL.replace(
      quorum=2,
      rounds=12,
      wait_secs=1.0,
      faults=(faults.Fault(faults.CORRUPT, "island-0", float(number)),),
    )


def outliers_after_many_merges():
  for seed in range(1, 12):
    for factor in (16.0, 20.0, 24.0, 28.0, 33.0, 40.0):
      yield SMALL.replace(
        seed=seed,
        islands=4,
        rounds=45,
        faults=tuple(
          faults.Fault(faults.OUTLIER, f"island-{m}", 8.0 + 2 * m, factor)
          for m in range(4)
        ),
      )


def failed_merges_whose_deletion_lands_late():
  for number in range(20, 60):
    for later in range(1, 5):
      kind = (faults.FAIL_BEFORE, faults.FAIL_AFTER)[number % 2]
      yield SMALL.replace(
        rounds=8,
        standby=False,
        faults=(
          faults.Fault(kind, "syncer", float(number)),
          faults.Fault(faults.DUPLICATE, "syncer", number + later, 1.5),
        ),
      )


def leaders_that_hang():
  for number in range(60, 100):
    hangs = faults.Fault(faults.SLOW, "standby", float(number), 1e6)
    yield SMALL.replace(rounds=60, faults=(hangs,))


# Bugs the first version of the protocol had, which took thousands of schedules
# to find. Here are schedules that look where they hide.
def sessions_that_end():
  for seed in range(1, 60):
    yield schedules.Schedule(
      seed,
      rounds=5,
      islands=2,
      fragments=2,
      sync_every=3,
      quorum=1 + seed % 2,
      ends=True,
    )


def budgets_that_are_spent():
  for seed in range(1, 60):
    yield schedules.Schedule(
      seed,
      rounds=5,
      islands=2,
      fragments=2,
      sync_every=3,
      ends=True,
      budget=20 + seed % 30,
    )


def evaluations_whose_island(kind, secs):
  for schedule in budgets_that_are_spent():
    struck = faults.Fault(kind, "", 1.0, secs)
    yield schedule.replace(supervised=schedule.seed % 2 > 0, faults=(struck,))


def evaluations_whose_island_dies():
  return evaluations_whose_island(faults.KILL_ASKED, 0.1)


def islands_that_moved_before_their_controller_died():
  for seed in range(1, 9):
    yield SMALL.replace(
      seed=seed,
      rounds=30,
      spares=2,
      faults=(
        faults.Fault(faults.BAD_SLICE, "", 0.0),
        faults.Fault(faults.BAD_SLICE, "", 1.0),
        faults.Fault(faults.KILL, "controller", 5.0),
        faults.Fault(faults.KILL, "island-1", 10.0),
      ),
    )


def moves(**fields):
  return SMALL.replace(rounds=10, cuts=1.5, set_back=1, moves=True, **fields)


def moves_of_a_run_that_is_alive():
  lost = faults.Fault(faults.MACHINE_LOST, "", 10.0)
  return (moves(seed=seed, faults=(lost,)) for seed in range(1, 9))


def moves_of_a_run_that_is_lost():
  return (moves(seed=seed) for seed in range(1, 9))


def moves_that_stop_until_another_user_has_the_run():
  for number in range(80, 112):
    stop = faults.Fault(faults.STOP, "restorer", float(number), 20.0)
    yield moves(resumers=2, faults=(stop,))


SWEEPS = {
  "moved_while_alive": moves_of_a_run_that_is_alive,
  "moved_from_the_oldest": moves_of_a_run_that_is_lost,
  "moved_as_it_was": moves_of_a_run_that_is_lost,
  "any_directory": moves_that_stop_until_another_user_has_the_run,
  "slices_forgotten": islands_that_moved_before_their_controller_died,
  "last_evaluation_not_asked": budgets_that_are_spent,
  "first_figure_kept": budgets_that_are_spent,
  "first_one_evaluates": evaluations_whose_island_dies,
  "drained_unpublished": sessions_that_end,
  "leader_not_asked": sessions_that_end,
  "lost_program_forgotten": sessions_that_end,
  "nobody_awaited": sessions_that_end,
  "not_saved_at_the_end": sessions_that_end,
  "leader_leaves_first": sessions_that_end,
  "drained_at_once": sessions_that_end,
  "hung_leader_leads": leaders_that_hang,
  "merge_hang_unseen": leaders_that_hang,
  "waits_for_ever": payloads_that_rot_while_all_wait,
  "round_stays_open": payloads_that_rot_while_others_are_stale,
  "gate_remembers_all": outliers_after_many_merges,
  "one_prefix": failed_merges_whose_deletion_lands_late,
  "peer_behind": peers_that_wait_for_a_slow_board,
  "one_stops_all": heads_and_tensors_of_one_fragment_damaged,
  "damage_waits_for_a_merge": versions_nobody_has_damaged,
  "lost_for_good": publications_too_slow_for_what_follows,
  "answer_left_behind": answers_too_slow_for_who_asked,
  "lost_head_made_anew": heads_lost_with_their_leader,
  "lease_damages_alike": leases_damaged_twice,
  "timeline_not_given_up": second_returns_after_one_that_missed_the_newest_cut,
  "cuts_unlisted": takeovers_with_a_stale_listing,
  "cut_of_any_epoch": requests_for_a_cut_that_land_after_a_return,
  "told_once": failed_writes_while_an_island_is_poisoned,
  "verdict_not_repeated": verdicts_that_rot,
  "cut_by_the_deposed": (
    cuts_while_one_leader_sleeps_and_the_deposed_one_wakes
  ),
  "newer_deleted": leaders_stopped_while_they_take_over,
  "token_unfenced": leases_torn_as_they_are_taken,
  "token_stays_damaged": leases_torn_as_they_are_taken,
  "timed_before_look": slow_looks_at_a_lease_whose_owner_dies,
  "survey_by_name": returns_to_a_cut,
  "healed_without_lease": (
    heads_damaged_while_their_leader_is_stopped_and_replaced
  ),
  "healed_in_doubt": heads_lost_right_after_a_commit_that_went_unheard,
  "key_not_compared": heads_under_another_fragments_key,
}


# What comes of a bug whose text does not fit the code any more.
UNFIT = ("TypeError: ", "AttributeError: ")


def first_caught(name, limit):
  with plants.bug(name):
    first = FIRST.get(name, 0)
    for seed in range(first, first + limit):
      outcome = world.run(schedules.draw(seed))
      if outcome.violation:
        return seed, outcome.violation
  return None


def test_every_planted_bug_has_a_limit():
  assert {*LIMITS, *SWEEPS} == set(plants.PLANTS)
  assert FIRST.keys() <= LIMITS.keys()


@pytest.mark.parametrize("name", LIMITS)
def test_planted_bug_is_caught(name):
  caught = first_caught(name, LIMITS[name])
  assert caught is not None
  seed, reason = caught
  assert not reason.startswith(UNFIT)
  # The same schedule without the bug is fine: it was the bug that was caught.
  assert not world.run(schedules.draw(seed)).violation


@pytest.mark.parametrize("name", SWEEPS)
def test_rare_bug_is_caught_where_it_hides(name):
  with plants.bug(name):
    played = ((s, world.run(s).violation) for s in SWEEPS[name]())
    caught, reason = next((pair for pair in played if pair[1]), (None, ""))
  assert caught is not None and not reason.startswith(UNFIT)
  assert not world.run(caught).violation


def test_nothing_is_left_of_a_bug_afterwards():
  before = {n: getattr(p.where, p.name) for n, p in plants.PLANTS.items()}
  for name in plants.PLANTS:
    with plants.bug(name):
      pass
  after = {n: getattr(p.where, p.name) for n, p in plants.PLANTS.items()}
  assert before == after
