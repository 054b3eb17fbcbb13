"""Radial-directional averaging against the mean, as islands become many.

Question: does the learning rate that works for M = 2 work for M = 16, with
either merge? Nobody has published this ablation.

Command: `diloco sweep --sweep=experiments/studies/merges.py --workdir=DIR`,
then `diloco compare DIR`. Cost: 50 runs of 3 to 4 minutes of one core.
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
  """Two merges and three M: by learning rate, then five seeds at the best."""
  field = "task.options.learning_rate"
  first, *others = base.CONFIRMING_SEEDS
  slices = {m: {"fleet.slices": base.slices(m)} for m in (2, 16, 8)}
  grid = hyper.chain(
    hyper.product(
      slices.values(),
      hyper.sweep("sync.merge", ["rda", "mean"]),
      hyper.sweep(field, [0.002, 0.004, 0.008, 0.016]),
    ),
    # Where the best was at the edge.
    [slices[m] | {"sync.merge": "mean", field: 0.032} for m in (16, 8)],
  )
  best = [
    slices[m] | {"sync.merge": merge, field: rate}
    for m, mean_rate in ((2, 0.004), (16, 0.008), (8, 0.016))
    for merge, rate in (("rda", 0.004), ("mean", mean_rate))
  ]
  return base.named(
    hyper.chain(
      hyper.product([{"seed": first}], grid),
      hyper.product(hyper.sweep("seed", others), best),
    )
  )
