"""Tuning of the synchronous baseline: batch and learning rate.

Question: how well does one data-parallel job learn from these tokens, at its
best batch (512, 1024 or 2048 tokens) and learning rate?

Command: `diloco sweep --sweep=experiments/studies/data_parallel_tuning.py
--workdir=DIR`, then `diloco compare DIR`. Cost: 9 runs of 2 to 3 minutes of
one core. Variants: `:medium` (886 k parameters), `:smoke`.
"""

import ml_collections

from diloco import hyper
from experiments.studies import base


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  config = base.get_config("data_parallel", variant, 1, fragments=0)
  config.method = "data_parallel"
  return config


def get_sweep() -> list[hyper.Point]:
  """Three batches with three learning rates each."""
  return base.named(
    hyper.product(
      hyper.sweep("fleet.slices", [base.slices(n) for n in (1, 2, 4)]),
      hyper.sweep("task.options.learning_rate", [0.002, 0.004, 0.008]),
    )
  )
