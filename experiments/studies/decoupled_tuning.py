"""Tuning of Decoupled DiLoCo: gain, momentum, merge and inner learning rate.

Question: with which settings do M = 2, 4 and 8 islands learn best from the
tokens of the baseline (`data_parallel_tuning.py`)? Each M has as many runs.

Command: `diloco sweep --sweep=experiments/studies/decoupled_tuning.py
--workdir=DIR`, then `diloco compare DIR`. Cost: 27 runs of 2 to 3 minutes of
one core. Variants: `:medium` (886 k parameters), `:smoke`.
"""

import ml_collections

from diloco import hyper
from experiments.studies import base


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  return base.get_config("decoupled", variant, 4)


def get_sweep() -> list[hyper.Point]:
  """Nine settings for each M."""
  settings = hyper.chain(
    hyper.product(
      hyper.sweep("outer.momentum", [0.0, 0.5]),
      hyper.sweep("sync.merge", ["rda", "mean"]),
      hyper.sweep("task.options.learning_rate", [0.004, 0.008]),
    ),
    [
      {
        "outer.momentum": 0.0,
        "sync.merge": "rda",
        "task.options.learning_rate": 0.002,
      }
    ],
  )
  islands = hyper.sweep("fleet.slices", [base.slices(m) for m in (4, 8, 2)])
  return base.named(hyper.product(islands, settings))
