"""Global parameters of a run with the task they belong to, ready for use."""

from typing import Any, NamedTuple

from diloco import process
from diloco.islands import inner_step
from diloco.snapshots import portable
from diloco.tasks import registry
from diloco.tasks import task as task_lib
from diloco.workbench import opened


class Model(NamedTuple):
  """A task and parameters of it.

  Attributes:
    run: they are of.
    task: the run's.
    params: as the task has them.
    versions: [P], which version of each fragment they are.
  """

  run: opened.Run
  task: Any  # a `task.Task`, with what such a task may have besides
  params: task_lib.Params
  versions: list[int]


def load(
  run: opened.Run,
  version: int | None = None,
  cut: int | None = None,
  task: str | None = None,
) -> Model:
  """Makes a run's task and reads its parameters.

  Args:
    run: which.
    version: as for `opened.Run.params`.
    cut: as for `opened.Run.params`.
    task: its task, see `process.check_task`.

  Raises:
    UserError: there is no such version, or the task is another by now.
    CorruptSnapshotError: the version is damaged.
  """
  settings = run.settings
  process.check_task(settings, run.dir, task)
  made = registry.make_task(settings.task.name, settings.task.options)
  values = run.values(version, cut)
  tree = inner_step.ParamTree(made, settings.seed)
  portable.check_fits(f"the run in {run.dir}", values.params, tree.shapes)
  return Model(run, made, tree.unflatten(values.params), values.versions)
