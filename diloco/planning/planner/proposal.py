"""The proposed configuration, as `diloco.config` takes it.

A slice of the configuration is an island's whole hardware: its slices times the
chips of one. The task, the optimizers and the programs are left to the user.
"""

from typing import Any

from diloco.planning.planner import division
from diloco.planning.planner import plan as plan_lib

QUORUM = 1  # K
GRACE = "adaptive"


def to_config(
  request: plan_lib.Request, outcome: plan_lib.Prospect
) -> dict[str, Any]:
  """Returns nested mappings for `config.from_mapping`."""
  choice, count = outcome.exchange, len(outcome.islands)
  secs = [
    division.step_secs(island, count, request.model)
    for island in outcome.islands
  ]
  return {
    "name": "planned",
    "total_tokens": int(request.model.tokens),
    "fleet": {
      "num_islands": count,
      "slices": [
        {
          "kind": island.hardware.kind,
          "topology": f"{island.slices}x{island.hardware.slice_chips}",
          "relative_speed": min(secs) / own,
        }
        for island, own in zip(outcome.islands, secs, strict=True)
      ],
    },
    "sync": {
      "num_fragments": choice.num_fragments,
      "every": choice.every,
      "overlap_steps": choice.overlap_steps,
      "quorum": QUORUM,
      "grace": GRACE,
      "codec": choice.codec,
      "adoption": "carry" if choice.carry else "overwrite",
    },
  }
