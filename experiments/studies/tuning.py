"""Tuning, on one seed: one data-parallel job, and four islands.

Question: how well does one synchronous job learn from these tokens at its best
batch, learning rate and inner optimizer; and which quorum, H, tau, merge, outer
rate, momentum and inner optimizer bring four decoupled islands nearest to it?

Command: `diloco sweep --sweep=experiments/studies/tuning.py --workdir=DIR`,
then `diloco compare DIR`. Cost: 73 runs of 3 to 8 minutes of one core.
Variants: `:medium` (886 k parameters), `:smoke`.
"""

from typing import Any

import ml_collections

from diloco import hyper
from experiments.studies import base


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  config = base.get_config("tuning", variant, 4)
  config.outer = ml_collections.ConfigDict(dict(count_absent=False))
  return config


def get_sweep() -> list[hyper.Point]:
  """One job by batch and rate; four islands by one thing after another."""
  batches = hyper.sweep("fleet.slices", [base.slices(n) for n in (1, 2, 4)])
  job = hyper.chain(
    hyper.product([base.ONE_JOB], batches, _rates(0.002, 0.004, 0.008)),
    [base.ONE_JOB | _rates(0.016)[0]],
    [
      base.ONE_JOB | base.MUON | more
      for more in (
        *_rates(0.008, 0.011, 0.016, 0.023, 0.032),
        *hyper.sweep("task.options.muon_momentum", [0.9, 0.98]),
        {"fleet.slices": base.slices(2)},
        {"fleet.slices": base.slices(8)} | _rates(0.032)[0],
      )
    ],
  )
  alone = hyper.chain(  # K = 1
    hyper.product(
      hyper.sweep("outer.momentum", [0.0, 0.5]),
      hyper.sweep("sync.merge", ["rda", "mean"]),
      _rates(0.004, 0.008),
    ),
    [{"sync.merge": "rda"} | _rates(0.002)[0]],
    hyper.product(
      _mean({"outer.learning_rate": 0.5}),
      hyper.sweep("sync.overlap_steps", [2, 8]),
    ),
    _mean({"sync.overlap_steps": 8}, {"sync.follow": False, "sync.every": 24}),
    _mean(base.MUON | {"outer.learning_rate": 0.5}),
  )
  muon = hyper.chain(
    _rates(0.008, 0.016),
    [{"sync.every": 6, "sync.num_fragments": 6} | _rates(0.008)[0]],
  )
  together = hyper.product(  # K = M
    [base.TOGETHER],
    hyper.chain(
      _mean({}, {"sync.every": 24}, {"sync.overlap_steps": 8}),
      [{"sync.merge": "rda"} | _rates(0.008)[0]],
      _mean(*(base.MUON | more for more in muon)),
    ),
  )
  whole = hyper.product(
    [
      {
        "method": "diloco",
        "sync.num_fragments": 1,
        "outer.learning_rate": 1.0,
      }
    ],
    [
      {"sync.every": 12, "outer.momentum": 0.0} | _rates(0.008)[0] | more
      for more in (
        {},
        base.MUON | _rates(0.008)[0],
        {"task.options.b2": 0.99},
        {"outer.momentum": 0.5},
      )
    ],
  )
  return base.named(hyper.chain(job, alone, together, whole, _near()))


def _near() -> list[hyper.Point]:
  """Muon: do islands come nearer that exchange more often?"""
  settings = (
    *((4, 4, 3, rate) for rate in (0.016, 0.011, 0.023, 0.032)),
    *((2, 8, every, 0.016) for every in (6, 3, 12)),
    *((8, 2, 6, 0.016), (8, 2, 3, 0.016), (8, 2, 3, 0.011), (8, 2, 3, 0.023)),
    *((8, 4, 3, 0.016), (8, 4, 3, 0.032)),
    *((4, 2, 6, 0.016), (4, 2, 3, 0.016), (4, 4, 12, 0.032), (4, 8, 3, 0.016)),
    *((4, 8, 6, 0.016), (4, 8, 6, 0.032), (4, 16, 6, 0.032), (2, 16, 6, 0.016)),
  )
  points: list[hyper.Point] = [
    {
      "name": f"muon.m{islands}.rows-{rows}.every-{every}"
      + (f".learningrate-{rate}" if rate != 0.016 else ""),
      **base.MUON,
      "task.options.learning_rate": rate,
      **base.TOGETHER,
      "fleet.slices": base.slices(islands),
      "sync.quorum": islands,
      "task.options.batch_size": rows,  # a step and island
      "sync.merge": "mean",
      "sync.every": every,
      "sync.num_fragments": every,
    }
    for islands, rows, every, rate in settings
  ]
  around: dict[str, hyper.Point] = {
    "outer-0.75": {"outer.learning_rate": 0.75},
    "outer-1.3": {"outer.learning_rate": 1.3},
    "tau-1": {"sync.overlap_steps": 1},
    "tau-1.every-2": {  # a fragment must be back before it leaves again
      "sync.overlap_steps": 1,
      "sync.every": 2,
      "sync.num_fragments": 2,
    },
    "quorum-1.grace-0": {
      "sync.quorum": 1,
      "sync.follow": True,
      "outer.count_absent": True,
    },
    "muonmomentum-0.9": {"task.options.muon_momentum": 0.9},
    "muonmomentum-0.98": {"task.options.muon_momentum": 0.98},
    "diloco": {
      "method": "diloco",
      "sync.num_fragments": 1,
      "outer.learning_rate": 1.0,
      "outer.momentum": 0.0,
    },
  }
  return points + [
    points[0] | fields | {"name": f"{points[0]['name']}.{name}"}
    for name, fields in around.items()
  ]


def _rates(*rates: float) -> list[hyper.Point]:
  return hyper.sweep("task.options.learning_rate", rates)


def _mean(*settings: dict[str, Any]) -> list[hyper.Point]:
  """Each setting with the mean, at the inner rate that was best."""
  return [{"sync.merge": "mean"} | _rates(0.008)[0] | one for one in settings]
