"""Global parameters of a run put to use: `diloco evaluate`, `diloco sample`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco import errors, process
from diloco.islands import evaluation, inner_step
from diloco.report import figures
from diloco.snapshots import portable
from diloco.tasks import registry, text
from diloco.tasks import task as task_lib
from diloco.workbench import opened

DEFAULT_SET = "held_out"  # that of every run's own evaluations
_END = 0  # the byte between two files


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


def evaluate(model: Model, num_batches: int = 0) -> dict[str, Any]:
  """Measures parameters on every held-out set of their task.

  Args:
    model: the parameters and their task.
    num_batches: of each set, the first ones; 0 takes as many as the run's own
      last evaluation.

  Returns:
    What was evaluated, what a token of it is, and by the name of the set
    `loss` in nats per token, `tokens` and `bits_per_token`.
  """
  num_batches = num_batches or model.run.settings.programs.final_eval_batches
  splits = {DEFAULT_SET: task_lib.HELDOUT}
  splits |= {name: name for name in getattr(model.task, "heldout_sets", ())}
  eval_loss = jax.jit(model.task.eval_loss)
  return {
    "run": model.run.settings.name,
    "versions": model.versions,
    "merged_tokens": model.run.merged_tokens(model.versions),
    "batches": num_batches,
    "token_unit": figures.token_unit(model.run.settings.task.name),
    "sets": {
      name: evaluation.held_out_loss(
        model.task, num_batches, lambda b: eval_loss(model.params, b), split
      )
      for name, split in splits.items()
    },
  }


def describe(facts: dict[str, Any]) -> str:
  """The losses, in words."""
  unit = facts["token_unit"]
  return "\n".join(
    f"{name}: {found['loss']:.6f} nats, {found['bits_per_token']:.6f} bits a"
    f" {unit}, over {found['tokens']:,} {unit}s"
    for name, found in facts["sets"].items()
  )


def sample(
  model: Model,
  prompt: str,
  num_tokens: int = 200,
  temperature: float = 0.8,
  seed: int = 0,
) -> str:
  """Goes on with a text, byte by byte.

  Args:
    model: the parameters and their task.
    prompt: what to go on with; empty for the beginning of a text.
    num_tokens: bytes to write at most; it stops where a text ends.
    temperature: the logits are divided by it; 0 takes the likeliest byte.
    seed: of the draws.

  Returns:
    What comes after the prompt. Bytes that are no text become \ufffd.

  Raises:
    UserError: the task cannot, or a value will not do.
  """
  task = model.task
  if not (hasattr(task, "logits") and hasattr(task, "context")):
    raise errors.UserError(
      f"a sample of the run in {model.run.dir}",
      f"its task {model.run.settings.task.name!r} has no logits and context, so"
      " it writes no text",
      "give it both, see diloco.tasks.task.Task",
    )

  @jax.jit
  def draw(params: Any, window: jax.Array, last: Any, key: jax.Array) -> Any:
    logits = task.logits(params, window[None])[0, last, : text.VOCAB]
    if not temperature:
      return jnp.argmax(logits)
    return jax.random.categorical(key, logits / temperature)

  given = prompt.encode(errors="surrogateescape") or bytes([_END])
  written = bytearray(given)
  key = jax.random.key(seed)
  for i in range(num_tokens):
    seen = written[-task.context :]
    # One length for all, so it is compiled once; what is behind is not seen.
    window = np.zeros(task.context, np.int32)
    window[: len(seen)] = seen
    byte = int(
      draw(model.params, window, len(seen) - 1, jax.random.fold_in(key, i))
    )
    if byte == _END:
      break
    written.append(byte)
  return shown(bytes(written[len(given) :]))


def shown(raw: bytes) -> str:
  """Bytes as text that does nothing to a terminal."""
  return "".join(
    char if char.isprintable() or char in "\n\t" else "\ufffd"
    for char in raw.decode(errors="replace")
  )
