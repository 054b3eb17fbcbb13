"""Options of the merge: does any earn its place?

Question: four islands with Muon, two of them at a quarter of the speed, so that
contributions come late. What does each option of the merge give against the
plain mean, when all are tuned by as many learning rates?

Command: `diloco sweep --sweep=experiments/studies/options.py --workdir=DIR`,
then `diloco compare DIR`. Cost: 18 runs of 3 to 5 minutes of one core.
Variants: `:medium`, `:smoke`. Expected: no difference larger than that between
two seeds, half a per cent.
"""

import ml_collections

from diloco import hyper
from experiments.studies import base


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  config = base.get_config("options", variant, 4, fragments=6)
  config.sync.every = 6
  config.sync.merge = "mean"
  config.task.options.optimizer = "muon"
  fast, slow = ({"relative_speed": speed} for speed in (1.0, 0.25))
  config.fleet.slices = (fast, fast, slow, slow)
  return config


def get_sweep() -> list[hyper.Point]:
  """Six ways to merge by three learning rates, by the seed that tunes."""
  arms: list[hyper.Point] = [
    {},
    {"sync.merge": "rda"},
    {"sync.merge": "median"},
    {"sync.merge": "trimmed_mean"},
    {"sync.merge_clip": 1.5},
    {"outer.momentum": 0.5, "outer.learning_rate": 0.5},
  ]
  rates = hyper.sweep("task.options.learning_rate", [0.016, 0.008, 0.032])
  return base.named(hyper.product(rates, arms))
