"""Radial-directional averaging against the mean, as islands become many.

Question: does the learning rate that works for M = 2 work for M = 16, with
either merge? Nobody has published this ablation.

Command: `diloco sweep --sweep=experiments/studies/merges.py --workdir=DIR`,
then `diloco compare DIR`. Cost: 78 runs of 3 to 4 minutes of one core.
Variants: `:medium`, `:smoke`. Expected: radial-directional merging wants one
learning rate for all M, the mean a higher one the larger M is.
"""

import ml_collections

from diloco import hyper
from experiments.studies import base


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  config = base.get_config("merges", variant, 2, fragments=6)
  config.sync.every = 6  # 100 rounds for 16 islands
  return config


def get_sweep() -> list[hyper.Point]:
  """Two merges, three M, four learning rates, three seeds."""
  seeds = hyper.sweep("seed", base.CONFIRMING_SEEDS[:3])  # a table by each
  field = "task.options.learning_rate"
  return base.named(
    hyper.chain(
      hyper.product(
        seeds,
        hyper.sweep("fleet.slices", [base.slices(m) for m in (2, 16, 8)]),
        hyper.sweep("sync.merge", ["rda", "mean"]),
        hyper.sweep(field, [0.002, 0.004, 0.008, 0.016]),
      ),
      hyper.product(  # where the best was at the edge
        seeds,
        hyper.sweep("fleet.slices", [base.slices(m) for m in (16, 8)]),
        [{"sync.merge": "mean", field: 0.032}],
      ),
    )
  )
