"""Decoupled islands against one synchronous job, at equal tokens.

Question: how much held-out loss do 2, 4 and 8 islands cost, with K = M and with
K = 1, also with a half and a quarter of H, against one data-parallel job? And
how much less where islands wait for each other, as DiLoCo's do? Settings are
those that `tuning.py` found.

Command: `diloco sweep --sweep=experiments/studies/islands.py --workdir=DIR`,
then `diloco compare DIR`. Cost: 65 runs of 4 to 8 minutes of one core.
Variants: `:medium` (886 k parameters, half an hour and more), `:smoke`.
Expected: published models of 35 M parameters pay 0.6, 2 and 4 % (arXiv
2503.09799).
"""

import ml_collections

from diloco import hyper
from experiments.studies import base


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  config = base.get_config("islands", variant, 4)
  config.sync.merge = "mean"
  config.outer = ml_collections.ConfigDict(dict(count_absent=False))
  return config


def get_sweep() -> list[hyper.Point]:
  """The job, and islands by M and K; five seeds each."""
  job = [base.ONE_JOB | {"fleet.slices": base.slices(4)}]
  islands = [
    {"fleet.slices": base.slices(m), **base.TOGETHER, "sync.quorum": m}
    for m in (4, 2, 8)
  ]
  eager = [{"fleet.slices": base.slices(4), "outer.learning_rate": 0.5}]
  counted = [
    {"fleet.slices": base.slices(m), "outer.count_absent": True}
    for m in (4, 8, 2)
  ]
  often = [
    {
      "fleet.slices": base.slices(4),
      "sync.every": 6,
      "sync.num_fragments": 6,
      "outer.count_absent": True,
    }
  ]
  # Steps of as many tokens as four islands make, and a quarter of H.
  oftener = [
    {
      "fleet.slices": base.slices(m),
      **base.TOGETHER,
      "sync.quorum": m,
      "task.options.batch_size": 16 // m,
      "sync.every": 3,
      "sync.num_fragments": 3,
    }
    for m in (4, 8, 2)
  ]
  # What of that is for nobody waiting: these do, for each sum of all.
  waiting = [
    {
      "fleet.slices": base.slices(4),
      "method": "diloco",
      "sync.every": 3,
      "sync.num_fragments": 1,
      "outer.learning_rate": 1.0,
      "outer.momentum": 0.0,
    }
  ]
  seeds = hyper.sweep("seed", base.CONFIRMING_SEEDS)
  arms = hyper.product(
    seeds,
    [base.MUON],
    hyper.chain(job, eager, islands, counted, often, oftener, waiting),
  )
  return base.named(arms)
