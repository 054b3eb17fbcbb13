"""The pilot: what each island is asked to do next."""

import pytest

from diloco import config as config_lib
from diloco.controller import pilot


def make(speeds=(1.0, 0.5), tokens_per_step=10, total_tokens=1000, **programs):
  base = {
    "window_steps": 8,
    "windows_ahead": 2,
    "eval_every_tokens": 0,
    "checkpoint_every_steps": 0,
  }
  config = config_lib.from_mapping(
    {
      "total_tokens": total_tokens,
      "fleet": {"slices": [{"relative_speed": s} for s in speeds]},
      "programs": base | programs,
    }
  )
  return pilot.Pilot(config, tokens_per_step)


def names(wanted, island):
  return [w.name for w in wanted if w.island == island]


TRAIN = {"num_steps": 8}


@pytest.mark.parametrize(
  ("ahead", "queued", "num_windows"),
  [(1, 0, 1), (2, 0, 2), (2, 1, 1), (2, 2, 0), (2, 3, 0), (5, 1, 4)],
)
def test_windows_are_kept_ahead(ahead, queued, num_windows):
  wanted = make(windows_ahead=ahead).wanted({0: queued})
  assert wanted == [pilot.Wanted(0, "train", TRAIN)] * num_windows


def test_only_ready_islands_get_programs():
  assert make().wanted({}) == []
  wanted = make().wanted({1: 1, 0: 2})
  assert wanted == [pilot.Wanted(1, "train", TRAIN)]


def test_budget_counts_what_an_elastic_job_has_trained():
  run = make(total_tokens=1000)
  run.joined(0, 0, 30)
  run.observe(0, 10)
  run.joined(0, 10, 20)
  run.observe(0, 15)
  assert run.tokens == 300 + 100
  run.joined(0, 4, 10)  # it died, and goes back
  run.observe(0, 6)
  assert run.tokens == 120 + 20
  run.observe(1, 5)  # never joined
  run.joined(1, 7)
  run.observe(1, 8)
  assert run.tokens == 120 + 20 + 80


def test_budget_counts_the_steps_of_all_islands():
  run = make(total_tokens=100)
  assert not run.observe(0, 99)  # it starts, and cannot be asked anything yet
  assert run.tokens == 0
  run.joined(0, 0)
  run.joined(1, 0)
  assert run.observe(0, 6)
  assert run.observe(1, 3)
  assert not run.observe(0, 6)
  assert not run.observe(0, 5)  # heard late
  assert (run.tokens, run.budget_spent) == (90, False)
  assert run.observe(1, 4)
  assert (run.tokens, run.budget_spent) == (100, True)


def test_island_that_lost_steps_counts_from_where_it_joined():
  run = make()
  run.joined(0, 0)
  run.observe(0, 50)
  run.joined(0, 40)
  assert run.tokens == 400
  assert run.observe(0, 41)  # progress, though it has been further before


@pytest.mark.parametrize(("chosen", "done"), [(0, 9), (2, 2)])
def test_evaluations_are_on_the_batches_of_the_last_one(chosen, done):
  run = make(eval_every_tokens=100, eval_batches=chosen, final_eval_batches=9)
  evaluate = next(w for w in run.wanted({0: 0}) if w.name == "evaluate")
  assert evaluate.args["num_batches"] == done


def test_evaluation_is_asked_of_the_fastest_ready_island():
  run = make(speeds=(0.5, 1.0, 0.7), eval_every_tokens=100, eval_batches=3)
  wanted = run.wanted({0: 0, 2: 0})  # the fastest of all is not ready
  assert names(wanted, 0) == ["train", "train"]
  assert names(wanted, 2) == ["evaluate", "train", "train"]
  evaluate = next(w for w in wanted if w.name == "evaluate")
  assert evaluate.args == {"target": "global", "num_batches": 3}


def test_evaluations_come_once_every_so_many_tokens():
  run = make(eval_every_tokens=100)
  run.joined(1, 0)
  assert names(run.wanted({0: 0, 1: 0}), 0)[0] == "evaluate"
  assert "evaluate" not in names(run.wanted({0: 0, 1: 0}), 0)
  run.observe(1, 9)
  assert "evaluate" not in names(run.wanted({0: 0, 1: 0}), 0)
  run.observe(1, 10)
  wanted = run.wanted({0: 0, 1: 0})
  assert names(wanted, 0)[0] == "evaluate"
  assert "evaluate" not in names(wanted, 1)


def test_evaluations_that_were_missed_are_not_made_up_for():
  run = make(eval_every_tokens=100)
  run.joined(0, 55)  # a run that is gone on with
  assert names(run.wanted({0: 0}), 0)[0] == "evaluate"
  assert "evaluate" not in names(run.wanted({0: 0}), 0)
  run.observe(0, 64)
  assert "evaluate" not in names(run.wanted({0: 0}), 0)
  run.observe(0, 65)
  assert names(run.wanted({0: 0}), 0)[0] == "evaluate"


def test_evaluation_waits_for_the_next_window_of_a_busy_island():
  run = make(eval_every_tokens=100)
  assert run.wanted({0: 2}) == []
  assert names(run.wanted({0: 1}), 0) == ["evaluate", "train"]


def test_evaluation_at_the_end_only_is_not_asked_here():
  assert names(make().wanted({0: 0}), 0) == ["train", "train"]


def test_every_island_is_checkpointed_every_so_many_steps():
  run = make(checkpoint_every_steps=20)
  run.joined(0, 0)
  run.joined(1, 100)
  assert names(run.wanted({0: 0, 1: 0}), 0) == ["train", "train"]
  run.observe(0, 20)
  run.observe(1, 119)
  wanted = run.wanted({0: 0, 1: 0})
  assert names(wanted, 0) == ["checkpoint", "train", "train"]
  assert names(wanted, 1) == ["train", "train"]
  assert wanted[0].args == {"wait": False}
  assert "checkpoint" not in names(run.wanted({0: 0}), 0)
  run.observe(1, 120)
  assert names(run.wanted({1: 0}), 1)[0] == "checkpoint"


def test_evaluator_does_all_evaluations_and_says_which_it_left_out():
  run = make(evaluator=True, eval_every_tokens=100, eval_batches=3)
  run.joined(0, 0)
  assert "evaluate" not in names(run.wanted({0: 0, 1: 0}), 0)
  assert run.evaluation(free=False) == {}
  run.observe(0, 21)  # 210 tokens
  asked = run.evaluation(free=True)
  assert asked == {"num_batches": 3, "step": 21, "skipped": 2}
  run.observe(0, 39)
  assert run.evaluation(free=False) == {}
  run.evaluated()
  late = run.evaluation(free=True)
  assert late == {"num_batches": 3, "step": 39, "skipped": 0}
  run.evaluated()
  assert run.evaluation(free=True) == {}
  run.observe(0, 40)
  assert run.evaluation(free=True)["skipped"] == 0
  # It died meanwhile, and the next life is asked.
  assert run.evaluation(free=True)["skipped"] == 0


def test_evaluation_that_an_earlier_controller_asked_for_counts_for_nothing():
  run = make(evaluator=True, eval_every_tokens=100)
  run.joined(0, 55)  # a run that is gone on with
  run.evaluated()
  assert run.evaluation(free=True)["skipped"] == 0


@pytest.mark.parametrize(
  ("step", "after"), [(0, 20), (13, 20), (33, 20), (40, 13), (500, 1)]
)
def test_island_that_joins_again_saves_no_later_than_was_due(step, after):
  run = make(checkpoint_every_steps=20)
  run.joined(0, 0)
  run.observe(0, 33)
  assert names(run.wanted({0: 0}), 0)[0] == "checkpoint"
  run.joined(0, step)  # from a cut, a saved state, or a peer's
  for more in range(1, 21):
    run.observe(0, step + more)
    saves = "checkpoint" in names(run.wanted({0: 0}), 0)
    assert saves == (more == after)


def test_lives_shorter_than_the_time_between_checkpoints_save():
  run = make(checkpoint_every_steps=20)
  run.joined(0, 0)
  saved, step = [], 0
  for _ in range(8):
    for _ in range(12):  # and dies
      step += 1
      run.observe(0, step)
      if "checkpoint" in names(run.wanted({0: 0}), 0):
        saved.append(step)
    run.joined(0, step)
  assert saved == [20, 40, 60, 80]


def test_run_that_was_set_back_has_trained_what_its_islands_say():
  run = make(total_tokens=1000)
  for island in (0, 1):
    run.joined(island, 0)
    run.observe(island, 50)
  assert run.budget_spent
  run.begin_anew()
  assert run.tokens == 0 and not run.budget_spent
  run.joined(0, 40)
  assert run.tokens == 400


def test_late_checkpoint_puts_off_the_next():
  run = make(checkpoint_every_steps=10)
  run.joined(0, 0)
  asked = []
  for step in range(1, 60, 4):
    # It does not look while a long window of steps 8 to 33 lasts.
    if not 8 <= step <= 33:
      run.observe(0, step)
      if "checkpoint" in names(run.wanted({0: 0}), 0):
        asked.append(step)
  assert asked == [37, 49]
