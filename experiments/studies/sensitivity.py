"""Sensitivity: what depends on H, P, tau, K, staleness, gain and momentum?

Question: four islands around the defaults. Which merge, and do islands that are
not in a round count, by three seeds; then, by one, one setting after another,
and learning rate and momentum together.

Command: `diloco sweep --sweep=experiments/studies/sensitivity.py
--workdir=DIR`, then `diloco compare DIR --html=FILE`. Cost: 38 runs of 2 to 5
minutes of one core. Variants: `:medium`, `:smoke`. Expected: not measured.
"""

import ml_collections

from diloco import hyper
from experiments.studies import base


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  return base.get_config("sensitivity", variant, 4, fragments=6)


def get_sweep() -> list[hyper.Point]:
  """Merges and weights, one at a time, a grid of rate and momentum."""
  return base.named(
    hyper.chain(
      hyper.product(
        hyper.sweep("seed", base.CONFIRMING_SEEDS[:3]),
        hyper.sweep("sync.merge", ["mean", "rda"]),
        hyper.sweep("outer.count_absent", [True, False]),
      ),
      # What is the default is in the grid.
      hyper.sweep("sync.every", [6, 24]),
      hyper.sweep("sync.num_fragments", [1, 3, 12]),
      hyper.sweep("sync.overlap_steps", [1, 4, 8]),
      hyper.sweep("sync.quorum", [2, 4]),
      hyper.sweep("sync.max_staleness", [0, 8]),
      hyper.sweep("sync.adoption", ["overwrite", "blend"]),
      hyper.product(
        hyper.sweep("outer.learning_rate", [0.4, 0.7, 1.0]),
        hyper.sweep("outer.momentum", [0.0, 0.3, 0.6, 0.9]),
      ),
    )
  )
