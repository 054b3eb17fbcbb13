"""`diloco replay`: from a run directory to an outcome in words."""

import pathlib
import tempfile
from collections.abc import Callable

from diloco import errors, process
from diloco.islands import surroundings
from diloco.replay import order, plan, replayer
from diloco.report import liveness
from diloco.tape import reader


def run(
  run_dir: pathlib.Path,
  until_version: int | None = None,
  task: str | None = None,
  told: Callable[[str], None] = lambda text: None,
) -> replayer.Replayed:
  """Replays a run.

  Args:
    run_dir: of a run that has ended, in whatever way; only read.
    until_version: leave out later versions.
    task: its task, see `process.check_task`.
    told: hears of progress, a line at a time.

  Raises:
    UserError: no run, a live one, or a tape that does not tell enough.
  """
  config = process.read_config(run_dir)
  process.check_task(config, run_dir, task)
  if liveness.controller_alive(run_dir):
    raise errors.UserError(
      f"the run directory {run_dir}",
      "a controller of this run is alive",
      "stop it first",
    )
  if config.loop:
    raise errors.UserError(
      f"the run in {run_dir}",
      f"its steps are those of config.loop = {config.loop!r}, and no tape tells"
      " what such a loop reads and draws",
      "replay runs of a task's own steps",
    )
  record = reader.read(run_dir, strict=True)
  planned = plan.make(record, replayer.head_facts(run_dir), until_version)
  with tempfile.TemporaryDirectory(prefix="diloco-replay-") as folder:
    replay = replayer.Replayer(
      run_dir.absolute(), config, planned, pathlib.Path(folder), told
    )
    for text in _warnings(planned):
      told(f"warning: {text}")
    return replay.run()


def _warnings(planned: order.Plan) -> list[str]:
  """What is not as it was: bits may differ."""
  changed, left_out = set(), set()
  for life in planned.lives.values():
    changed |= set(surroundings.changes(life.settings.software))
    left_out |= set(surroundings.left_out(life.settings.environ))
  return [f"the run had {text}" for text in sorted(changed)] + [
    f"the run had {text} in its environment, which is not taken over"
    for text in sorted(left_out)
  ]


def describe(outcome: replayer.Replayed) -> str:
  """Returns the outcome in words."""
  first = outcome.difference
  lines = [
    f"{outcome.equal} of {outcome.compared} versions are equal to the bit,"
    f" {outcome.arrays_compared} of them compared with the stored values too",
    f"replayed {outcome.lives} lives, {outcome.steps:,} inner steps in"
    f" {outcome.wall_secs:.1f} s",
  ]
  if first is not None:
    lines += [
      f"first difference: version {first.version} of fragment {first.fragment}",
      f"  the run has {first.expected}, the replay {first.found}",
      f"  contributions of another norm: {', '.join(first.contributions)}"
      if first.contributions
      else "  all its contributions have the norms they had",
      *(f"  {text}" for text in first.weights),
    ]
  return "\n".join(lines)
