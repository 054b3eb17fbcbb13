"""What a run's config says of its model: parameters, layers and tokens."""

from diloco import config as config_lib
from diloco import launch
from diloco.islands import trial
from diloco.tasks import registry


def of(place: str) -> tuple[int, int | None, int]:
  """Returns parameters, layers (None if it has no such option) and tokens.

  Of "FILE.py" or "FILE.py:VARIANT". The task's `init` is traced; no array is
  made.

  Raises:
    UserError: the file, the configuration or the task will not do.
  """
  config = config_lib.from_mapping(launch.load_config(place))
  options = config.task.options
  task = registry.make_task(config.task.name, options)
  tensors = trial.parameters(task, config).tensors()
  layers = options.get("num_layers")
  params = sum(tensor.size for tensor in tensors)
  return (
    params,
    layers if isinstance(layers, int) else None,
    config.total_tokens,
  )
