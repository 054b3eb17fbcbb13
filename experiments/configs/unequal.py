"""Two kinds of chip in one run: an island on v5p and one on v6e.

Question: what is a slower kind of chip worth, when no island waits for another?
The step rates are as the published peaks of the two kinds, 459 to 918 bf16
Tflop/s a chip; `--config.fleet.slices[0].relative_speed=...` tries another
ratio. Both are emulated on this machine's cores.

Command: `diloco train --config=experiments/configs/unequal.py --workdir=DIR`;
`:alone` is the v6e island by itself, on two thirds of the tokens, which is what
it trains in the same time.
Cost: not measured; the pace makes it about four minutes, and as long alone.
`:smoke` 41 s of processor time.
Expected: not measured.
Reference: Decoupled DiLoCo, arXiv 2604.21428.

Variants: `:smoke` trains a tiny model for half a minute; `:alone`.
"""

import ml_collections

from experiments.configs import quickstart

_SLICES = (
  dict(kind="v5p", topology="1", relative_speed=0.5),
  dict(kind="v6e", topology="1", relative_speed=1.0),
)


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "", "smoke" or "alone"."""
  config = quickstart.like("unequal", variant, "alone")
  config.faults = ()
  config.fleet.slices = _SLICES
  config.total_tokens = 150_000 if variant == "smoke" else 1_800_000
  if variant == "alone":
    config.fleet.slices = _SLICES[1:]
    config.total_tokens = 1_200_000
  return config
