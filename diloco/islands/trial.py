"""A task tried before anything is started: its functions are traced.

Nothing is computed and no parameter is made. What the user's code raises is
told as theirs, in one line with its file and line.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco import config as config_lib
from diloco import errors
from diloco.islands import inner_step, link, placement, trainer
from diloco.tasks import task as task_lib

logger = logging.getLogger(__name__)

_STREAM = ("position", "seek", "close")


def check(
  task: task_lib.Task, config: config_lib.RunConfig
) -> inner_step.ParamTree:
  """Tries every part of a task that an island will use.

  Returns:
    The task's parameters, as an island will name them.

  Raises:
    UserError: the first part that cannot work; naming a line of the user's
      where their code raised something.
  """
  name = f"task={config.task.name!r}"
  errors.require(
    not jax.config.jax_disable_jit,
    "jax_disable_jit = True",
    "islands run programs that are compiled before their first step",
    "leave it off; to debug a loss, call it by itself",
  )
  guard = jax.config.jax_transfer_guard_host_to_device
  guard = guard or jax.config.jax_transfer_guard or "allow"
  errors.require(
    not guard.startswith("disallow"),
    f"jax_transfer_guard = {guard!r}",
    "islands bring batches and versions to their devices as they come",
    "leave it off, or put jax.transfer_guard around code of your own",
  )
  if not isinstance(task.tokens_per_batch, int) or task.tokens_per_batch < 1:
    raise errors.UserError(
      name,
      f"its tokens_per_batch is {task.tokens_per_batch!r}",
      "say as an integer what each step counts as, at least 1",
    )
  tree = parameters(task, config)
  train, heldout = _batches(task, config, name)
  with _theirs(name, "mesh_axes, batch_axes or sharding"):
    _check_divisible(config, task, tree, train, heldout)
  params = {
    n: jax.ShapeDtypeStruct(shape, jnp.float32)
    for n, shape in tree.shapes.items()
  }
  if config.loop:
    link.load(config.loop)
  else:
    _check_step(task, config, tree, params, train)
  with _theirs(name, "eval_loss"):
    out = jax.eval_shape(
      lambda flat, batch: task.eval_loss(tree.unflatten(flat), batch),
      params,
      heldout,
    )
    if not isinstance(out, tuple) or len(out) != 2:
      raise errors.UserError(
        name,
        "its eval_loss gives no pair",
        "return the sum of the loss and the number of tokens summed over",
      )
    _require_scalars(dict(zip(("sum", "tokens"), out, strict=True)), name)
  with _theirs(name, "is_embedding"):
    tree.tensors()
  return tree


def _check_step(
  task: task_lib.Task,
  config: config_lib.RunConfig,
  tree: inner_step.ParamTree,
  params: Any,
  train: task_lib.Batch,
) -> None:
  """The task's own steps, which a loop of the user's does without."""
  name = f"task={config.task.name!r}"
  with _theirs(name, "loss"):
    out = jax.eval_shape(
      lambda flat, batch: task.loss(tree.unflatten(flat), batch), params, train
    )
    _check_loss(out, name)
  with _theirs(name, "optimizer, or the gradient of its loss,"):
    steps = trainer.schedule_steps(config, task, island=0)
    optimizer = task.optimizer(steps)
    state = inner_step.TrainState(
      params,
      jax.eval_shape(optimizer.init, params),
      jax.ShapeDtypeStruct((), jnp.int32),
    )
    kept = jax.tree.leaves(state.opt_state)
    for value, (leaf, told) in zip(
      kept, inner_step.described(state.opt_state).items(), strict=True
    ):
      if not inner_step.is_saveable(value):
        raise errors.UserError(
          name,
          f"its optimizer has {told} at {leaf!r}, which cannot be saved",
          "keep jax.random.key_data of a key, and nothing without elements",
        )
    step = inner_step.make_step(task, optimizer, tree, steps)
    after, _ = jax.eval_shape(step, state, train)
    _require_same(state, after, name)


def parameters(
  task: task_lib.Task, config: config_lib.RunConfig
) -> inner_step.ParamTree:
  """Returns the task's parameters, as an island will name them.

  Raises:
    UserError: the task's `init` cannot work.
  """
  with _theirs(f"task={config.task.name!r}", "init"):
    return inner_step.ParamTree(task, config.seed)


@contextlib.contextmanager
def _theirs(name: str, part: str) -> Iterator[None]:
  """What the user's code raises is told as theirs."""
  try:
    yield
  except errors.UserError:
    raise
  except Exception as error:  # whatever their code does wrong
    logger.debug("task_failed part=%s", part, exc_info=True)
    raise errors.UserError(
      name,
      f"its {part} raised {errors.with_place(error)}",
      "correct the task",
    ) from error


def _batches(
  task: task_lib.Task, config: config_lib.RunConfig, name: str
) -> tuple[task_lib.Batch, task_lib.Batch]:
  """The first batch of island 0 and the first held-out one.

  A loop of the user's has batches of its own: the first is held out as well.
  """
  islands = 0 if config.loop else config.fleet.islands
  with _theirs(name, "batches"):
    streams = [
      task.batches("train", share=m, num_shares=islands, seed=config.seed)
      for m in range(islands)
    ]
    streams.append(task.batches("heldout", share=0, num_shares=1, seed=0))
    for stream in streams:
      missing = [part for part in _STREAM if not hasattr(stream, part)]
      if missing:
        raise errors.UserError(
          name,
          f"the {type(stream).__name__} of its batches has no"
          f" {', '.join(missing)}",
          "implement diloco.tasks.task.BatchStream",
        )
    first = _checked(task_lib.drawn(streams[0]), name)
    streams[0].seek(0)
    again = _checked(task_lib.drawn(streams[0]), name)
    heldout = _checked(task_lib.drawn(streams[-1]), name)
    for stream in streams:
      stream.close()
    # By their bytes, for what is unknown may be NaN, which equals nothing.
    if inner_step.described(first) != inner_step.described(again) or any(
      np.asarray(first[k]).tobytes() != np.asarray(again[k]).tobytes()
      for k in first
    ):
      raise errors.UserError(
        name,
        "its batches give another first batch after seek(0)",
        "give the batch at a position, whatever was read before",
      )
  return first, heldout


def _checked(batch: Any, name: str) -> task_lib.Batch:
  """The batch, if it is one."""
  told = "" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
  for key, value in {} if told else batch.items():
    shape, dtype = np.shape(value), getattr(value, "dtype", None)
    if dtype is None:
      told = f"a {type(value).__name__} at {key!r}"
    elif 0 in (shape or (0,)) or not _is_number(dtype):
      told = f"{dtype}{list(shape)} at {key!r}"
  errors.require(
    not told,
    name,
    f"its batches give {told}",
    "give a dict of numpy arrays of numbers, whose leading axis is the batch",
  )
  checked: task_lib.Batch = batch
  return checked


def _is_number(dtype: Any) -> bool:
  return any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))


def _check_divisible(
  config: config_lib.RunConfig,
  task: task_lib.Task,
  tree: inner_step.ParamTree,
  *batches: task_lib.Batch,
) -> None:
  """Every slice can divide batches and parameters among its devices."""
  rules = placement.Rules.of(task)
  lengths = {len(array) for batch in batches for array in batch.values()}
  for i, hardware in enumerate(config.fleet.slices):
    sizes = rules.sizes(hardware.shape)
    count = rules.batch_devices(sizes)
    for length in sorted(lengths):
      if length % count:
        raise errors.UserError(
          f"config.fleet.slices[{i}].topology = {hardware.topology!r}",
          f"a batch of {length} cannot be divided among {count} devices along"
          f" {', '.join(rules.batch)}",
          "make what the topology says of these a divisor of the batch size",
        )
    for name, shape in tree.shapes.items():
      rules.spec(sizes, name, shape)


def _check_loss(out: Any, name: str) -> None:
  if not isinstance(out, tuple) or len(out) != 2:
    raise errors.UserError(
      name, "its loss gives no pair", "return the loss and a dict of scalars"
    )
  loss, scalars = out
  if not isinstance(scalars, Mapping):
    raise errors.UserError(
      name,
      f"its loss gives a {type(scalars).__name__} beside the loss",
      "return the loss and a dict of scalars, which may be empty",
    )
  _require_scalars({"loss": loss}, name)
  _require_scalars(scalars, name)  # one of which may be called "loss", too


def _require_same(
  before: inner_step.TrainState, after: inner_step.TrainState, name: str
) -> None:
  """A step gives back what the next one takes."""
  found = inner_step.changed(*map(inner_step.described, (before, after)))
  if found is not None:
    leaf, old, new = found
    raise errors.UserError(
      name,
      f"a step of its optimizer makes {new} of the {old} at {leaf}",
      "keep every shape and dtype from step to step",
    )


def _require_scalars(values: Mapping[str, Any], name: str) -> None:
  for key, value in values.items():
    if not hasattr(value, "shape"):
      raise errors.UserError(
        name,
        f"its {key!r} is a {type(value).__name__}, and must be a scalar",
        "give each number a name of its own",
      )
    if value.shape:
      raise errors.UserError(
        name,
        f"its {key!r} has shape {value.shape}, and must be a scalar",
        "sum or average it",
      )
    floating = jnp.issubdtype(value.dtype, np.floating)
    if not (floating if key == "loss" else inner_step.is_real(value)):
      raise errors.UserError(
        name,
        f"its {key!r} is {value.dtype}[], and must be a real number",
        "make it a float32",
      )
