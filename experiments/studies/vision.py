"""Four islands against one job, on images: a small vision transformer.

Question: what does it cost to learn kinds of glyphs on four islands that
exchange, against one data-parallel job at equal images? Both are tuned by as
many learning rates, on a seed that no confirmation has.

Command: `diloco sweep --sweep=experiments/studies/vision.py --workdir=DIR`,
then `diloco compare DIR`. Cost: 22 runs of 3 to 6 minutes of a core. Variants:
`:medium` (twice the width), `:smoke`. Expected: +5.6 % [-1.0, +12.1], five
seeds; published text models of 35 M parameters pay 2 % for four (arXiv
2503.09799).
"""

import ml_collections

from diloco import hyper
from experiments.studies import base

_ROWS = 16  # images a step and island


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  config = base.get_config("vision", variant, 4)
  width = {"smoke": 32, "small": 64, "medium": 128}[variant]
  # Five times through the glyphs; beyond it the held-out loss rises.
  config.total_tokens = 4_000 if variant == "smoke" else 200_000
  config.task = ml_collections.ConfigDict(
    dict(
      name="vision",
      options=dict(
        d_model=width,
        num_layers=4,
        d_ff=3 * width,
        batch_size=_ROWS,
        optimizer="muon",
        learning_rate=0.016,
      ),
    )
  )
  return config


def get_sweep() -> list[hyper.Point]:
  """Learning rates by one seed, then the best of each arm by five."""
  return base.against_one_job(
    (0.004, 0.008, 0.016, 0.032, 0.064, 0.128), job=0.064, islands=0.032
  )
