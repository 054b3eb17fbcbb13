"""The quickstart's own settings: what would its islands learn with others?

Question: the quickstart in virtual time, its killed island included, with less
H, the mean, other inner learning rates, a round for all three, and with Muon at
equal tokens and at tokens that take the time of the processor which it has?
Tokens are those of four minutes, so the studies' rules do not hold here: 2.7 a
parameter, and some 65 periods of H = 24.

Command: `diloco sweep --sweep=experiments/studies/quickstart.py --workdir=DIR`,
then `diloco compare DIR`. Cost: 22 runs of 5 to 8 minutes of one core.
Variants: `:smoke`. Expected: 1.2 % less loss with H = 12 than with 24, and 1.6
with 6.
"""

from typing import Any

import ml_collections

from diloco import hyper
from experiments.configs import quickstart
from experiments.studies import base

_MEAN = {"sync.merge": "mean"}


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """The quickstart, with a held-out loss of eight times as many batches."""
  config = quickstart.get_config("smoke" if variant == "smoke" else "")
  config.engine = "virtual"
  config.programs.final_eval_batches = 2 if variant == "smoke" else 256
  config.virtual = ml_collections.ConfigDict(dict(latency_secs=0.01))
  return config


def get_sweep() -> list[hyper.Point]:
  """One setting after another on the quickstart's own seed; H by three more."""
  others: list[hyper.Point] = [
    _often(3),
    *(_MEAN | _often(every) for every in (24, 12, 6, 3)),
    _often(6) | {"task.options.learning_rate": 0.0015},
    _often(6) | {"task.options.learning_rate": 0.006},
    _often(6) | {"sync.quorum": 3},
    _often(6) | base.MUON,
    _often(6) | base.MUON | {"total_tokens": 1_370_000},
  ]
  seeds = hyper.sweep("seed", [base.TUNING_SEED, *base.CONFIRMING_SEEDS[:3]])
  return base.named(
    hyper.chain(
      hyper.product(seeds, [_often(every) for every in (24, 12, 6)]),
      hyper.product([{"seed": base.TUNING_SEED}], others),
    )
  )


def _often(every: int) -> dict[str, Any]:
  return {"sync.every": every, "sync.num_fragments": every}
