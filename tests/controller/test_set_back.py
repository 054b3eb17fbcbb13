"""A run that is on goes back to a cut, in a fleet of fakes."""

import errno

import pytest

from diloco import errors

EAGAIN = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def set_back_by(fleet, *attempts):
  """The outcomes of attempts to go back to a cut; True mends the run."""
  left, ended = list(attempts), []

  def set_back(end):
    attempt = left.pop(0)
    if isinstance(attempt, errors.UserError):
      raise attempt
    ended.append((end(), dict(fleet.living)))
    if isinstance(attempt, OSError):
      raise attempt
    fleet.damaged = []
    fleet.steps = dict.fromkeys(fleet.steps, 8)
    return attempt

  fleet.set_back = set_back
  return ended


NO_CUT = errors.UserError("the run", "no cut can be restored", "start anew")


@pytest.mark.parametrize(
  "attempts", [[True], [EAGAIN, EAGAIN, True], [EAGAIN, False]]
)
def test_damage_that_stands_sets_the_run_back_and_it_goes_on(
  session, fleet, attempts
):
  run = session(total_tokens=4000)
  run.open()
  run.turn_until(lambda: sum(fleet.steps.values()) > 20)
  ended = set_back_by(fleet, *attempts)
  fleet.damaged = [1]
  run.turn_until(lambda: ended, secs=100.0)
  # All were ended before anything changed, and none started before the end.
  names = sorted(run.controller.core.fleet.names.all)
  assert ended[0] == (names, {})
  run.turn_until(lambda: len(ended) == len(attempts))
  assert [living for _, living in ended] == [{}] * len(attempts)
  outcome = run.run()
  assert outcome.status == "finished"
  assert run.events("island_died") == run.events("syncer_died") == []
  starts = [launch.role for launch in fleet.launches]
  assert sorted(starts) == sorted(2 * names)


def test_return_to_a_cut_that_cannot_be_finished_fails_the_run(session, fleet):
  run = session(total_tokens=4000)
  run.open()
  run.turn_until(lambda: sum(fleet.steps.values()) > 20)
  set_back_by(fleet, EAGAIN, NO_CUT)
  fleet.damaged = [1]
  outcome = run.run()
  assert outcome.status == "failed" and "no cut" in outcome.reason
