"""How many islands a round should wait for, in small: four runs.

Question: three unequal islands; does a round that waits for all of them learn
more from the same tokens than one that waits for a single one?

Command: `diloco sweep --sweep=experiments/sweeps/quorum.py
--workdir=runs/quorum`, then `diloco compare runs/quorum --html=quorum.html`.
Cost: 102 s of processor time.
Expected: 4.5 to 4.6 held-out bits a byte and no difference that two seeds of so
small a run could show; what waiting costs `unequal_islands.py` tells.
Reference: Decoupled DiLoCo, arXiv 2604.21428, for K.
"""

import ml_collections

from diloco import hyper
from experiments.configs import quickstart


def get_config(variant: str = "smoke") -> ml_collections.ConfigDict:
  """Returns what all points share; `variant` is one of the quickstart's."""
  config = quickstart.get_config(variant)
  config.name = "quorum"
  config.faults = ()
  return config


def get_sweep() -> list[hyper.Point]:
  """Returns two ways to close a round, each with two seeds."""
  return hyper.product(
    hyper.sweep("sync.quorum", [1, 3]), hyper.sweep("seed", [0, 1])
  )
