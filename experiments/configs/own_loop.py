"""A training loop of one's own: the quickstart, its steps sharpness-aware.

Question: what must somebody write whose steps are none of an optimizer, and
does an island of theirs die and come back as any? The loop is
`experiments/loops/sharpness.py`, which takes two gradients a step.

Command: `diloco train --config=experiments/configs/own_loop.py --workdir=DIR`.
Cost: not measured; `:smoke` 42 s of processor time.
Expected: not measured; `:smoke` 4.4 held-out bits per byte (one seed).
Reference: the method is that of Foret et al., arXiv 2010.01412.

Variants: `:smoke` trains a tiny model for half a minute.
"""

import ml_collections

from experiments.configs import quickstart


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "" or "smoke"."""
  config = quickstart.like("own_loop", variant)
  config.loop = "experiments.loops.sharpness:train"
  return config
