import pytest

from diloco.syncer import grace


@pytest.mark.parametrize(
  ("facts", "expected"),
  [
    # slack = 2 * 1.0 - 0.5 = 1.5; 0.5 of it
    ((1.0, 0.2, 0.3), 0.75),
    # capped at one step
    ((0.1, 0.0, 0.0), 0.1),
    # no slack left
    ((0.1, 0.5, 0.5), 0.0),
    # nothing known yet
    ((0.0, 0.0, 0.0), 0.0),
  ],
)
def test_adaptive_grace_spends_a_share_of_the_slack(facts, expected):
  policy = grace.AdaptiveGrace(2, gamma=0.5)
  assert policy.grace_secs(grace.GraceFacts(*facts)) == pytest.approx(expected)


def test_moving_average_starts_at_its_first_sample():
  average = grace.MovingAverage(weight=0.5).observe(4.0)
  assert average.value == 4.0
  assert average.observe(8.0).value == 6.0


def test_fixed_grace_ignores_the_facts():
  facts = grace.GraceFacts(1.0, 2.0, 3.0)
  assert grace.FixedGrace(0.25).grace_secs(facts) == 0.25


@pytest.mark.parametrize(("step_secs", "expected"), [(1.0, 1.0), (0.1, 0.1)])
def test_window_is_at_most_one_step_however_long_the_slack(step_secs, expected):
  policy = grace.AdaptiveGrace(10, gamma=0.5)  # five steps of slack
  facts = grace.GraceFacts(step_secs, 0.0, 0.0)
  assert policy.grace_secs(facts) == expected
