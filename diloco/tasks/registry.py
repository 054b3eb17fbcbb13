"""From a task's name and options, as configs give them, to a `Task`."""

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from diloco import errors
from diloco.tasks import language_model, replicated, task, vision

_TASKS: dict[str, tuple[type, Callable[[Any], task.Task]]] = {
  "language_model": (
    language_model.LanguageModelConfig,
    language_model.LanguageModel,
  ),
  "vision": (vision.VisionConfig, vision.Vision),
}
_REQUIRED = (
  "tokens_per_batch",
  *(name for name in vars(task.Task) if not name.startswith("_")),
)


def make_task(
  name: str, options: Mapping[str, Any], replicas: int = 1
) -> task.Task:
  """Builds the task called `name`.

  Args:
    name: "language_model", "vision", or "package.module:Factory" for a task of
      the user's own; the factory is called with `options` and returns the task.
    options: for a named task, fields of its config.
    replicas: shares whose batches make one batch.

  Returns:
    The task.

  Raises:
    UserError: the name, the factory or an option is unknown, an option's
      value cannot work, or the factory's product is no task.
  """
  made = _make_custom(name, options) if ":" in name else _make(name, options)
  return made if replicas == 1 else replicated.Replicated(made, replicas)


def _make(name: str, options: Mapping[str, Any]) -> task.Task:
  if name not in _TASKS:
    raise errors.UserError(
      f"task={name!r}",
      "no task has this name",
      f"{_nearest(name, _TASKS)}, or name your own as 'package.module:Factory'",
    )
  config_class, build = _TASKS[name]
  fields = [field.name for field in dataclasses.fields(config_class)]
  for option in options:
    if option not in fields:
      raise errors.UserError(
        f"option {option!r} of task {name!r}",
        "there is no such option",
        _nearest(option, fields),
      )
  return build(config_class(**options))


def _make_custom(name: str, options: Mapping[str, Any]) -> task.Task:
  factory = _load_factory(name)
  try:
    made = factory(options)
  except errors.UserError:
    raise
  except Exception as error:  # whatever their code does wrong
    raise errors.UserError(
      f"task={name!r}",
      f"its factory raised {errors.with_place(error)}",
      "correct it, or config.task.options",
    ) from error
  missing = [part for part in _REQUIRED if not hasattr(made, part)]
  if missing:
    raise errors.UserError(
      f"task={name!r}",
      f"its {type(made).__name__} has no {', '.join(missing)}",
      "implement diloco.tasks.task.Task",
    )
  return made


def _load_factory(name: str) -> Callable[[Mapping[str, Any]], Any]:
  module_name, _, attribute = name.partition(":")
  try:
    module = importlib.import_module(module_name)
  except (ModuleNotFoundError, ValueError, TypeError) as error:
    # An import that fails inside the user's module is theirs to see whole.
    missing = getattr(error, "name", None) or module_name
    if not f"{module_name}.".startswith(f"{missing}."):
      raise
    raise errors.UserError(
      f"task={name!r}",
      f"there is no module {missing!r}",
      "install it, or put its folder on PYTHONPATH",
    ) from error
  factory = getattr(module, attribute, None)
  if not callable(factory):
    names = [n for n, v in vars(module).items() if callable(v)]
    raise errors.UserError(
      f"task={name!r}",
      f"module {module_name!r} has no factory {attribute!r}",
      _nearest(attribute, names),
    )
  return factory


def _nearest(name: str, names: Iterable[str]) -> str:
  """A remedy: the name probably meant, else all names."""
  names = list(names)
  close = difflib.get_close_matches(name, names, n=1)
  if close:
    return f"did you mean {close[0]!r}?"
  return f"known are {', '.join(names) or 'none'}"
