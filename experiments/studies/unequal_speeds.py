"""Islands of unequal speed: whom should a round wait for?

Question: four islands, two of them slower (to 0.82 or 0.25 of the others), step
times with 10 % jitter. A round closes with all islands, with one, or with one
and the adaptive grace window: what becomes of goodput, and of the loss?

Command: `diloco sweep --sweep=experiments/studies/unequal_speeds.py
--workdir=DIR`, then `diloco compare DIR`. Cost: 30 runs of 2 to 3 minutes of
one core. Variants: `:medium`, `:smoke`. Expected: goodput of quorum 1 with the
loss of the full quorum (Decoupled DiLoCo, arXiv 2604.21428); not measured.
"""

import ml_collections

from diloco import hyper
from experiments.studies import base


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  return base.get_config("unequal_speeds", variant, 4)


def get_sweep() -> list[hyper.Point]:
  """Three ways to close a round for two fleets."""
  rounds = hyper.zip(
    hyper.sweep("sync.quorum", [4, 1, 1]),
    hyper.sweep("sync.grace", ["0", "0", "adaptive"]),
    hyper.sweep("sync.wait_secs", [3600.0, 0.0, 0.0]),
  )
  points = hyper.product(
    hyper.sweep("fleet.slices", [_slices(slow) for slow in (0.82, 0.25)]),
    rounds,
    hyper.sweep("seed", base.CONFIRMING_SEEDS),
  )
  return base.named(points)


def _slices(slow: float) -> tuple[dict[str, float], ...]:
  fast, slower = {"relative_speed": 1.0}, {"relative_speed": slow}
  return (fast, fast, slower, slower)
