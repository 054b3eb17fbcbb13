"""`diloco evaluate`: held-out loss of a run's global parameters, afterwards."""

from typing import Any

import jax

from diloco.islands import evaluation
from diloco.report import figures
from diloco.tasks import task as task_lib
from diloco.workbench import loaded

DEFAULT_SET = "held_out"  # that of every run's own evaluations


def evaluate(model: loaded.Model, num_batches: int = 0) -> dict[str, Any]:
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
