"""`docs/own_loop.md` done for real, with an island of it killed.

One run is made of the page's own files; each test looks at its part of it.
"""

import contextlib
import os
import pathlib
import re
import signal

import pytest
import real_run

import diloco
from diloco import errors, launch, process
from diloco.replay import replayer as replay
from diloco.tape import reader
from tests.inline import test_inline_engine as inline

TEXT = pathlib.Path(diloco.__file__).parents[1] / "docs" / "own_loop.md"
FILES = dict(
  re.findall(
    r"^`(\w+\.py)`[^`]*:\n\n```python\n(.*?)^```",
    TEXT.read_text(),
    re.DOTALL | re.MULTILINE,
  )
)
ISLAND = 1  # is killed


def merged_from_second_life(run):
  return any(
    (c["island"], c["incarnation"]) == (ISLAND, 2)
    for e in run.events("merged")
    for c in e["contributions"]
  )


def has_saved(run):
  return any(
    e["role"] == f"island-{ISLAND}" and e["durable"] and e["step"]
    for e in run.events("checkpointed")
  )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("own_loop")
  for name, body in FILES.items():
    (folder / name).write_text(body)
  with contextlib.chdir(folder), real_run.Run(folder) as run:
    run.config = "my_config.py"
    run.values = launch.load_config(run.config).to_dict()
    # A busy machine may need longer to start an island than the page's budget.
    run.start(
      f"--config.total_tokens={real_run.ENDLESS}",
      "--config.programs.eval_every_tokens=50_000",
      "--config.programs.eval_batches=4",
    )
    run.wait_for(lambda: has_saved(run) and run.steps(ISLAND) > 75)
    os.kill(run.pid(f"island-{ISLAND}"), signal.SIGKILL)
    run.wait_for(lambda: merged_from_second_life(run))
    run.wait_for(lambda: min(run.losses(), default=9) < 3.5)  # 5.5 untrained
    run.process.send_signal(signal.SIGINT)
    run.ended = run.finish()
    yield run


def test_page_is_whole():
  assert sorted(FILES) == ["my_config.py", "my_loop.py"]
  typed = re.findall(r"^```sh\n(.*?)^```", TEXT.read_text(), re.DOTALL | re.M)
  assert typed == ["diloco train --config=my_config.py --workdir=run\n"]


def test_run_trains_and_its_books_balance(run):
  code, _, err = run.ended
  assert code == 0, err
  facts = run.summary()
  assert facts["status"] == "stopped"
  run.check_books()


def test_killed_island_goes_on_with_the_loops_own_state(run):
  lives = [e for e in run.events("started") if e["role"] == f"island-{ISLAND}"]
  assert len(lives) == 2
  # Where one is slow to die, a peer's state may be younger than its own.
  start, saved = lives[1]["step"], lives[1]["checkpoint"] or lives[1]["peer"]
  assert saved["step"] > 0 and saved["incarnation"] == 1
  lines = reader.read(run.dir).metrics[ISLAND]
  # The loop counts its steps in its own state: as saved, and one more.
  first = next(line for line in lines if line["incarnation"] == 2)
  assert first["step"] == start + 1
  assert first["task"]["steps"] == saved["step"] + 1
  steps = {
    line["step"]: line["loss"] for line in lines if line["incarnation"] == 1
  }
  assert lines[0]["task"]["steps"] == 1 and len(steps) > 75
  assert first["loss"] < lines[0]["loss"] - 0.5


def test_replay_refuses_a_loop(run):
  with pytest.raises(errors.UserError, match="no tape tells what such a loop"):
    replay.run(run.dir)


def test_copy_of_the_run_asks_for_task_and_loop(run, tmp_path):
  config = process.read_config(run.dir)
  process.check_task(config, run.dir, None)
  process.write_config(config, tmp_path / "other")
  (tmp_path / "other").rename(tmp_path / "copy")
  both = "my_loop.py:model,my_loop.py:train"
  with pytest.raises(errors.UserError) as caught:
    process.check_task(config, tmp_path / "copy", None)
  assert f"--task={both}" in str(caught.value)
  process.check_task(config, tmp_path / "copy", both)


def loop_config(folder, body, **fields):
  """A run in threads whose loop is this body, of the quadratic task."""
  path = folder / "their_loop.py"
  path.write_text(f"import jax\n\n\ndef train(island):\n{body}")
  config = inline.make_config(2, loop=f"{path}:train", **fields)
  return config | {"total_tokens": 200}


STEP = """
  params, state = island.begin(lambda params: {"count": 0})
  while True:
    params = jax.tree.map(lambda x: x - 0.01, params)
    state = {"count": state["count"] + 1}
    params, state = island.exchange(params, state, {"loss": state["count"]})
"""


def test_threads_of_one_process_do_loops_too(tmp_path):
  faults = [{"target": "island-1", "at_fraction": 0.3}]
  config = loop_config(tmp_path, STEP, faults=faults)
  run = diloco.train(config, tmp_path / "run", quiet=True)
  assert run.summary["status"] == "finished"
  assert run.summary["tokens_unaccounted"] == 0
  assert run.summary["islands"]["1"]["restarts"] == 1


def test_loop_of_a_synchronous_method_waits_in_its_exchange(tmp_path):
  config = loop_config(tmp_path, STEP, method="diloco")
  config["sync"] = {"every": 4}
  run = diloco.train(config, tmp_path / "run", quiet=True)
  merged = [e for e in reader.read(run.dir).events if e["event"] == "merged"]
  rounds = [{c["step"] for c in e["contributions"]} for e in merged]
  # Nobody has made a step beyond the one that all wait at; the last round is
  # of what islands have when the budget is spent.
  assert rounds[:2] == [{4}, {8}]
  assert all(len(e["contributions"]) == 2 for e in merged[:2])


def test_later_mistake_is_one_islands_death(tmp_path):
  body = STEP.replace(
    "    params = jax",
    f"""    once = pathlib.Path({str(tmp_path / "once")!r})
    if island.index == 1 and island.step == 6 and not once.exists():
      once.touch()
      raise OSError("the disk of its data is gone")
    params = jax""",
  )
  config = loop_config(tmp_path, f"  import pathlib\n{body}")
  run = diloco.train(config, tmp_path / "run", quiet=True)
  assert run.summary["status"] == "finished"
  assert run.summary["tokens_unaccounted"] == 0
  lines = reader.read(run.dir).events
  (died,) = [e for e in lines if e["event"] == "island_died"]
  told = "after step 6: it raised OSError: the disk of its data is gone"
  assert died["island"] == 1 and told in died["cause"]


def test_mistake_that_comes_again_at_its_step_ends_the_run(tmp_path):
  body = STEP.replace(
    "    params = jax",
    """    if island.index == 1 and island.step == 6:
      {}[island.step]
    params = jax""",
  )
  config = loop_config(tmp_path, body)
  config["total_tokens"] = real_run.ENDLESS
  with pytest.raises(errors.UserError) as caught:
    diloco.train(config, tmp_path / "run", quiet=True)
  text = str(caught.value)
  assert "island-1 failed 3 times alike: config.loop = " in text
  assert "after step 6: it raised KeyError: 6 (their_loop.py:9)" in text
  assert "island-1.log" in text and "\n" not in text
  log = (tmp_path / "run" / "logs" / "island-1.log").read_text()
  assert log.count("Traceback (most recent call last)") == 3


def test_mistake_ends_the_run_with_the_loops_own_line(tmp_path):
  body = STEP.replace("x - 0.01", "x[:1]")
  with pytest.raises(errors.UserError) as caught:
    diloco.train(loop_config(tmp_path, body), tmp_path / "run", quiet=True)
  text = str(caught.value)
  assert "failed twice before any step: config.loop = " in text
  assert "exchange was given float32[1] for the float32[2] at 'a'" in text
  assert "(their_loop.py:10)" in text and "\n" not in text


def test_loop_that_is_not_there_is_refused_before_anything_starts(tmp_path):
  config = loop_config(tmp_path, STEP)
  config["loop"] = config["loop"].replace(":train", ":trian")
  with pytest.raises(errors.UserError, match="did you mean 'train'"):
    diloco.train(config, tmp_path / "run", quiet=True)
  assert not (tmp_path / "run").exists()
