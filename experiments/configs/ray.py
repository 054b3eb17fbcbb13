"""The quickstart's islands and syncers, placed on the nodes of a Ray cluster.

Question: does the same run train on several machines, and go on when a node is
lost with its island?

Command: `ray start --head --num-cpus=8` on this machine, and
`diloco train --config=experiments/configs/ray.py --workdir=DIR`, where DIR is
seen by all nodes at that path; `ray stop` afterwards. `docs/ray.md` tells how
nodes are added and islands sent to those that have their chips.

Cost: not measured; the pace makes it about four minutes.
Expected: what the quickstart reaches; not measured.
Reference: Decoupled DiLoCo, arXiv 2604.21428.

Variants: `:smoke` trains a tiny model for half a minute.
"""

import ml_collections

from experiments.configs import quickstart


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "" or "smoke"."""
  config = quickstart.like("ray", variant)
  config.engine = "ray"
  return config
