"""What a run's config says of its model: parameters, layers and tokens."""

from typing import NamedTuple

from diloco import config as config_lib
from diloco import launch
from diloco.islands import trial
from diloco.tasks import registry


class Shape(NamedTuple):
  """Of a model that was never made.

  Attributes:
    params: N, all leaves together.
    layers: the task's option `num_layers`; None if it has none.
    tokens: the budget.
  """

  params: int
  layers: int | None
  tokens: int


def of(place: str) -> Shape:
  """Traces the task's `init`; no array is made.

  Args:
    place: "FILE.py" or "FILE.py:VARIANT".

  Raises:
    UserError: the file, the configuration or the task will not do.
  """
  config = config_lib.from_mapping(launch.load_config(place))
  options = config.task.options
  task = registry.make_task(config.task.name, options)
  tensors = trial.parameters(task, config).tensors()
  layers = options.get("num_layers")
  return Shape(
    sum(tensor.size for tensor in tensors),
    layers if isinstance(layers, int) else None,
    config.total_tokens,
  )
