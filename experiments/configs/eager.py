"""Eager updates: communication under way for a whole round, and nobody waits.

Question: what does it cost to hear of the others a round late, if an island
goes on at once with its own share of the outer step? Three equal islands in
virtual time, over a link so slow that a fragment takes some ten steps there and
back, of the 24 between two of its publications.

Command: `diloco train --config=experiments/configs/eager.py --workdir=DIR`;
`:streaming` waits two steps after a publication, over the same link.
Cost: not measured; `:smoke` a third of a minute of one core.
Expected: not measured.
Reference: eager updates, arXiv 2502.12996, with the outer optimizer of
Streaming DiLoCo, arXiv 2501.18512.

Variants: `:smoke` trains a tiny model; `:streaming`.
"""

import ml_collections

from experiments.configs import quickstart


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "", "smoke" or "streaming"."""
  config = quickstart.like("eager", variant, "streaming")
  config.method = "streaming" if variant == "streaming" else "eager"
  config.engine = "virtual"
  config.faults = ()
  config.fleet.slices = (dict(kind="v5p", topology="1"),) * 3
  del config.outer
  config.sync = ml_collections.ConfigDict(dict(num_fragments=4, every=24))
  config.virtual = dict(latency_secs=config.fleet.pace_step_secs)
  return config
