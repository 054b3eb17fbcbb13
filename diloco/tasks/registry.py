"""From a task's name and options, as configs give them, to a `Task`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from diloco import errors, own_file
from diloco.tasks import replicated, task

_Maker = tuple[type, Callable[[Any], task.Task]]  # of its options, and of it


def _language_model() -> _Maker:
  from diloco.tasks import language_model

  return language_model.LanguageModelConfig, language_model.LanguageModel


def _vision() -> _Maker:
  from diloco.tasks import vision

  return vision.VisionConfig, vision.Vision


# Flax and Grain take a third of a second, and a task of the user's may do
# without.
_TASKS: dict[str, Callable[[], _Maker]] = {
  "language_model": _language_model,
  "vision": _vision,
}
# Of one whose steps are a loop's; the other parts are tried with it.
_REQUIRED = (
  "tokens_per_batch",
  *("init", "eval_loss", "batches", "is_embedding"),
)


def make_task(
  name: str, options: Mapping[str, Any], replicas: int = 1
) -> task.Task:
  """Builds the task called `name`.

  Args:
    name: "language_model", "vision", or for a task of the user's own
      "package.module:Factory" or "FILE.py:Factory"; the factory is called with
      `options` and returns the task.
    options: for a named task, fields of its config.
    replicas: shares whose batches make one batch.

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
      f"{own_file.nearest(name, _TASKS)}, or name your own as"
      " 'FILE.py:Factory' or 'package.module:Factory'",
    )
  config_class, build = _TASKS[name]()
  fields = [field.name for field in dataclasses.fields(config_class)]
  for option in options:
    if option not in fields:
      raise errors.UserError(
        f"option {option!r} of task {name!r}",
        "there is no such option",
        own_file.nearest(option, fields),
      )
  return build(config_class(**options))


def _make_custom(name: str, options: Mapping[str, Any]) -> task.Task:
  factory = own_file.load(f"task={name!r}", name)
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
