"""Jobs under failures, in cases that can be worked out by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.planning.fleet import defaults, failures, jobs

# No lost work, so that sums are round: a step of which little is lost.
TIMES = defaults.Times(
  downscale_secs=10, upscale_secs=4, upscale_wait_secs=20, step_secs=1e-9
)


def events(*rows):
  """Rows of (secs, slice, repair_secs), or with a cause as a fourth."""
  table = [(*row, failures.CHIP)[:4] for row in rows]
  secs, index, repair, cause = np.array(table, float).reshape(-1, 4).T
  index = index.astype(int)
  return failures.Failures(secs, index, index + 1, repair, cause.astype(int))


def run(rows, *, slices=10, elastic=True, times=TIMES, horizon=1000, **shape):
  return jobs.run(
    jobs.Shape(slices, **shape), times, events(*rows), horizon, elastic=elastic
  )


def loss(history, name):
  return history.losses[jobs.LOSSES.index(name)]


def test_job_without_failures_is_all_useful():
  history = run([])
  assert history.goodput == 1 and history.pauses == []
  assert history.allocated == 10 * 1000


def test_elastic_job_pays_downscale_capacity_and_upscale():
  history = run([(100, 3, 50)])
  # Stops 100..110; back at 150, waits till 170; grows 170..174.
  assert [(a, b) for a, b, _ in history.pauses] == [(100, 110), (170, 174)]
  assert loss(history, "downscale") == 10 * 10
  assert loss(history, "upscale") == 10 * 4
  assert loss(history, "repair") == 40 and loss(history, "rejoin") == 20
  assert history.useful == pytest.approx(10_000 - 100 - 40 - 60)
  assert history.sizes == [(110, 9), (174, 10)]


def test_failure_during_a_downscale_joins_it():
  alone = run([(100, 3, 500)])
  both = run([(100, 3, 500), (106, 4, 500)])
  assert loss(both, "downscale") == loss(alone, "downscale")
  assert both.interruptions == 1 and both.coalesced == 1


def test_repaired_slice_is_taken_in_by_the_next_downscale():
  history = run([(100, 3, 50), (160, 4, 2000)])
  assert loss(history, "upscale") == 0
  assert history.sizes == [(110, 9), (170, 9)]


def test_repaired_slices_are_taken_in_together():
  history = run([(100, 3, 50), (101, 4, 60), (102, 5, 65)])
  assert loss(history, "upscale") == 10 * 4
  assert history.sizes[-1] == (174, 10)


def test_failure_during_an_upscale_starts_a_downscale():
  history = run([(100, 3, 50), (172, 4, 2000)])
  assert [p[:2] for p in history.pauses[1:]] == [(170, 172), (172, 182)]
  assert history.sizes[-1] == (182, 9)


def test_slice_that_fails_while_it_waits_is_not_waited_for():
  history = run([(100, 3, 50), (155, 3, 2000)])
  assert [p[:2] for p in history.pauses] == [(100, 110)]
  assert history.sizes == [(110, 9)]


def test_slice_that_is_out_cannot_fail_again():
  once = run([(100, 3, 300)])
  again = run([(100, 3, 300), (200, 3, 300)])
  assert again.useful == once.useful and again.coalesced == 1


def test_too_few_slices_are_an_outage_until_some_are_back():
  history = run([(100, 0, 60), (100, 1, 80)], slices=2)
  # One of two is enough: nothing trains until the first is back.
  assert loss(history, "outage") == 2 * (160 - 110 + 4)
  assert history.sizes[0] == (164, 1)


def test_rigid_job_waits_for_the_repair():
  history = run([(100, 3, 50)], elastic=False)
  assert [p[:2] for p in history.pauses] == [(100, 150)]
  assert history.useful == pytest.approx(10 * 950)


def test_rigid_recovery_is_begun_anew_by_a_further_failure():
  history = run([(100, 3, 300), (120, 4, 30)], elastic=False)
  assert [p[:2] for p in history.pauses] == [(100, 150)]


def test_rigid_job_waits_for_a_whole_group_whatever_fails_meanwhile():
  group = failures.CAUSES.index("site")
  history = run([(100, 3, 300, group), (120, 4, 30)], elastic=False)
  assert [p[:2] for p in history.pauses] == [(100, 400)]


def test_steps_since_the_last_saved_state_are_lost():
  times = dataclasses.replace(TIMES, checkpoint_every_secs=30, step_secs=1)
  history = run([(100, 3, 50)], elastic=False, times=times)
  assert loss(history, "lost_work") == pytest.approx(10 * 10)  # 90 .. 100


def test_saving_state_takes_its_time():
  times = dataclasses.replace(
    TIMES, checkpoint_every_secs=8, checkpoint_secs=2, step_secs=1
  )
  history = run([(105, 3, 50)], elastic=False, times=times)
  assert loss(history, "checkpoint") == pytest.approx(10 * (10 + 84) * 2)
  assert loss(history, "lost_work") == pytest.approx(10 * 5)


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("every", [8, 0])
def test_saves_are_paid_for_where_nothing_fails_too(elastic, every):
  times = dataclasses.replace(
    TIMES, checkpoint_every_secs=every, checkpoint_secs=2, step_secs=1
  )
  history = run([], elastic=elastic, times=times)
  assert history.goodput == pytest.approx(8 / 10 if every else 1 / 3, abs=1e-3)


@pytest.mark.parametrize("second", [150, 152])
def test_elastic_job_that_loses_all_slices_goes_back_to_its_saved_state(second):
  times = dataclasses.replace(TIMES, checkpoint_every_secs=60, step_secs=8)
  history = run([(150, 0, 50), (second, 1, 50)], slices=2, times=times)
  assert loss(history, "lost_work") == pytest.approx(2 * 30)  # 120 .. 150


@pytest.mark.parametrize("elastic", [True, False])
def test_capacity_that_comes_and_goes_is_no_failure(elastic):
  block = jobs.Block(10, 15, 200, 700)
  history = run([], elastic=elastic, extras=(block,))
  assert (history.interruptions, history.coalesced) == (0, 0)


def test_growing_elastic_job_has_saved_no_longer_than_saves_take():
  times = dataclasses.replace(
    TIMES, checkpoint_secs=1, checkpoint_every_secs=0, step_secs=4
  )
  history = run([(100, 3, 200)], times=times)
  trained = history.useful + loss(history, "checkpoint")
  assert loss(history, "checkpoint") == pytest.approx(trained / 5, rel=0.02)


def test_elastic_job_loses_no_more_than_its_step_however_seldom_it_saves():
  times = dataclasses.replace(
    TIMES, checkpoint_every_secs=90, checkpoint_secs=10, step_secs=8
  )
  history = run([(150, 3, 500)], times=times)
  assert loss(history, "lost_work") == pytest.approx(10 * (50 % 8))


def test_elastic_job_loses_the_step_in_flight():
  times = dataclasses.replace(TIMES, step_secs=8)
  history = run([(100, 3, 500)], times=times)
  assert loss(history, "lost_work") == pytest.approx(10 * 4)


@pytest.mark.parametrize("elastic", [True, False])
def test_extra_slices_come_and_go(elastic):
  block = jobs.Block(10, 15, 200, 700)
  history = run([], elastic=elastic, extras=(block,))
  assert history.allocated == 10 * 1000 + 5 * 500
  sizes = [size for _, size in history.sizes]
  assert sizes == [15, 10]
  assert history.useful + history.losses.sum() == pytest.approx(
    history.allocated
  )


rows = st.lists(
  st.tuples(
    st.floats(0, 900), st.integers(0, 9), st.floats(0, 300), st.integers(0, 3)
  ),
  max_size=30,
).map(sorted)


@given(rows, st.booleans())
@settings(max_examples=150, deadline=None)
def test_time_is_useful_or_lost_and_never_both(found, elastic):
  times = dataclasses.replace(TIMES, step_secs=1, checkpoint_every_secs=7)
  history = run(found, elastic=elastic, times=times)
  assert history.useful + history.losses.sum() == pytest.approx(
    history.allocated
  )
  assert history.useful >= 0 and (history.losses >= -1e-9).all()
  ends = [0.0] + [end for _, end, _ in history.pauses]
  assert all(
    end <= start <= stop
    for end, (start, stop, _) in zip(ends, history.pauses, strict=False)
  )


def paused_secs(found):
  history = run(found, elastic=False)
  return sum(end - start for start, end, _ in history.pauses)


@given(rows, st.floats(0, 50))
@settings(max_examples=100, deadline=None)
def test_longer_recovery_never_helps_a_rigid_job(found, more):
  longer = [(secs, i, repair + more, cause) for secs, i, repair, cause in found]
  before = paused_secs(found)
  assert paused_secs(longer) >= before - 1e-6


@given(rows)
@settings(max_examples=100, deadline=None)
def test_extra_failure_never_helps_a_rigid_group(found):
  group = failures.CAUSES.index("rack")
  grouped = [(secs, i, repair, group) for secs, i, repair, _ in found]
  before = paused_secs(grouped)
  more = sorted([*grouped, (450.0, 0, 60.0, group)])
  assert paused_secs(more) >= before - 1e-6
