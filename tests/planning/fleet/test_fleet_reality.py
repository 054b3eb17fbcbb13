"""A run is measured from its tape, and predicted from what was measured."""

import dataclasses
import json
import sys

import pytest

from diloco import config as config_lib
from diloco import errors
from diloco.planning.fleet import measured, reality
from diloco.tape import events, recorder

STEPS = ((0.1, 400), (0.2, 170))  # seconds a step, steps
START, DEATH, BACK, LENGTH = 5.0, 20.0, 26.0, 46.0
EPOCH = 1_790_000_000.0


class Clock:
  now = EPOCH

  def __call__(self):
    return self.now


def publish(tape, island, life, first_step, step):
  for fragment in range(4):
    tape.record(
      events.PUBLISHED,
      fragment=fragment,
      base_version=0,
      first_step=first_step,
      step=step,
      c_tokens=10 * (step - first_step),
      bytes=1,
      codec="f32",
      trigger="schedule",
      key=f"{fragment:04d}.{island:04d}.{life:04d}.{step:09d}",
      secs=0.01,
    )


def write_run(folder):
  """Two islands; island 1 dies at 20 s and steps again at 26 s."""
  config = config_lib.from_mapping(
    {
      "fleet": {"slices": ({}, {})},
      "sync": {"num_fragments": 4, "every": 8},
      "programs": {"checkpoint_every_steps": 10},
    }
  )
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config.to_dict()))
  clock = Clock()
  control = recorder.Recorder(folder, "controller", 1, clock)
  control.record(
    events.RUN_STARTED, method="test", islands=2, total_tokens=10_000
  )
  for island, (secs, _) in enumerate(STEPS):
    log = recorder.MetricLog(folder, island, clock)
    lives = [(1, START, LENGTH - 1)]
    if island == 1:
      lives = [(1, START, DEATH), (2, BACK, LENGTH - 1)]
    step = 0
    for life, begin, end in lives:
      clock.now = EPOCH + begin - 1
      tape = recorder.Recorder(folder, f"island-{island}", life, clock)
      tape.record(
        events.STARTED,
        step=step,
        restored_from="",
        tokens_per_step=10,
        kind="cpu",
        topology="1",
        devices=1,
        relative_speed=1.0,
        paced_step_secs=0.0,
        share=[island, 2],
      )
      clock.now, first = EPOCH + begin, step
      while clock.now < EPOCH + end - 1e-6:
        step += 1
        log.record(
          step=step,
          loss=1.0,
          tokens=10,
          step_secs=0.9 * secs,
          gap_secs=secs,
          incarnation=life,
        )
        clock.now += secs
      publish(tape, island, life, first, step)
      tape.close()
    log.close()
  clock.now = EPOCH + DEATH + 1
  control.record(
    events.ISLAND_DIED, island=1, island_incarnation=1, cause="SIGKILL"
  )
  clock.now = EPOCH + LENGTH
  control.record(events.RUN_FINISHED, status="finished", reason="")
  control.close()
  return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
  return write_run(tmp_path_factory.mktemp("reality") / "run")


def test_parameters_are_measured(run_dir):
  run = measured.measure(run_dir)
  assert [i.step_secs for i in run.islands] == pytest.approx([0.1, 0.2])
  assert [i.useful_secs for i in run.islands] == pytest.approx([0.09, 0.18])
  assert run.islands[1].deaths == pytest.approx((DEATH - 0.2,))
  assert run.islands[0].deaths == () and not run.islands[1].gone
  assert run.restart_secs == pytest.approx(BACK - DEATH + 0.2)
  assert run.tail_secs == pytest.approx(1, abs=0.15)
  assert run.wall_secs == pytest.approx(LENGTH)
  assert run.steps == pytest.approx(STEPS[0][1] + STEPS[1][1], abs=2)


def test_run_is_predicted_within_three_points(run_dir):
  facts = reality.compare(run_dir, seeds=(0, 1))
  assert abs(facts["goodput_error_points"]) < 3
  wall = facts["predicted"]["wall_secs"]["mean"]
  assert wall == pytest.approx(LENGTH, rel=0.02)
  assert "what_if" not in facts
  assert "goodput" in reality.text(facts)


def test_what_if_changes_the_rounds_and_not_the_run(run_dir):
  changes = {"quorum": 2, "grace": "0"}
  facts = reality.compare(run_dir, seeds=(0,), changes=changes)
  other = facts["what_if"]
  assert other["given"] == changes
  assert other["predicted"]["contributors_per_merge"]["mean"] == 2
  assert facts["predicted"]["contributors_per_merge"]["mean"] < 2
  assert other["predicted"]["wall_secs"]["mean"] == pytest.approx(
    facts["predicted"]["wall_secs"]["mean"], rel=0.02
  )


@pytest.mark.parametrize(
  ("change", "why"), [({"quorum": 3}, "no round"), ({"every": 2}, "P must")]
)
def test_what_cannot_be_is_refused(run_dir, change, why):
  with pytest.raises(errors.UserError, match=why):
    reality.compare(run_dir, seeds=(0,), changes=change)


def test_directory_without_training_is_refused(tmp_path):
  with pytest.raises(errors.UserError, match="no island has trained"):
    reality.compare(tmp_path, seeds=(0,))


def test_run_is_predicted_from_another_ones_times(
  run_dir, tmp_path, monkeypatch
):
  own = reality.compare(run_dir, seeds=(0,))
  assert not own["is_prediction"]
  assert "--measured_from" in reality.text(own)
  with monkeypatch.context() as slower:
    module = sys.modules[__name__]
    slower.setattr(module, "STEPS", ((0.2, 200), (0.4, 85)))
    slower.setattr(module, "DEATH", 14.0)
    slower.setattr(module, "BACK", 18.0)
    other = write_run(tmp_path / "other")
  facts = reality.compare(run_dir, seeds=(0,), measured_from=other)
  assert facts["is_prediction"]
  assert facts["measured"] == own["measured"]
  times, before = facts["parameters"], own["parameters"]
  assert times["step_secs"] == pytest.approx([0.2, 0.4])
  assert times["restart_secs"] == pytest.approx(18 - 13.8)
  assert times["kills"] == before["kills"] and times["steps"] == before["steps"]
  # As many steps of twice the length, and not what the run itself took.
  wall = facts["predicted"]["wall_secs"]["mean"]
  assert wall == pytest.approx(2 * LENGTH, rel=0.2)
  assert "--measured_from" not in reality.text(facts)


def test_run_of_another_fleet_predicts_nothing(run_dir):
  run = measured.measure(run_dir)
  other = dataclasses.replace(run, islands=run.islands[:1])
  with pytest.raises(errors.UserError, match="its fleet is not"):
    measured.as_on(run, other)
