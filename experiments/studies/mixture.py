"""Four islands against one job, with a mixture of experts.

Question: what does it cost to train 2 of 4 experts on four islands that
exchange, against one data-parallel job at equal tokens? Both are tuned by as
many learning rates, on a seed that no confirmation has. How much of it is left
where islands exchange twice as often and all wait for all?

Command: `diloco sweep --sweep=experiments/studies/mixture.py --workdir=DIR`,
then `diloco compare DIR`. Cost: 24 runs of 4 to 8 minutes of a core.
Variants: `:medium`, `:smoke`. Expected: 1.4 %, and 0.9 with half of H (five
seeds); published dense models of 35 M parameters pay 2 % for four (arXiv
2503.09799).
"""

import ml_collections

from diloco import hyper
from experiments.studies import base


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  config = base.get_config("mixture", variant, 4)
  options = config.task.options
  # A token costs what it does in the dense model.
  options.update(
    num_experts=4,
    experts_per_token=2,
    d_ff=options.d_ff // 2,
    capacity_factor=1.5,
    balance_loss=0.1,
    optimizer="muon",
  )
  return config


def get_sweep() -> list[hyper.Point]:
  """Learning rates by one seed, then the best of each arm by five."""
  often: hyper.Point = {
    **base.TOGETHER,
    "sync.merge": "mean",
    "sync.every": 3,
    "sync.num_fragments": 3,
  }
  return base.against_one_job(
    (0.008, 0.016, 0.032), 0.016, 0.016, (often, 0.016)
  )
