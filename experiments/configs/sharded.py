"""Islands of different shape: one on a 2x4 mesh, one on a single device.

Question: do islands with different meshes adopt the same values to the bit?
Each writes and reads only the shards its own mesh holds; the tape has a digest
of every version each island adopted.

Command: `diloco train --config=experiments/configs/sharded.py --workdir=DIR`.
Cost: about a minute on two cores, which stand in for nine devices.
Expected: for every version that both adopted, equal digests.
Reference: Decoupled DiLoCo, arXiv 2604.21428.

Variants: `:smoke` trains for some seconds.
"""

import ml_collections


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "" or "smoke"."""
  if variant not in ("", "smoke"):
    raise ValueError(f"variant {variant!r}: there is only 'smoke'")
  smoke = variant == "smoke"
  config = ml_collections.ConfigDict()
  config.name = "sharded"
  config.total_tokens = 30_000 if smoke else 300_000
  config.task = ml_collections.ConfigDict(
    {
      "name": "language_model",
      "options": {
        "d_model": 64,
        "num_layers": 2,
        "num_heads": 4,
        "seq_len": 64,
        "batch_size": 8,
        "learning_rate": 0.003,
      },
    }
  )
  config.fleet = ml_collections.ConfigDict(
    {
      "slices": (
        {"kind": "v5p", "topology": "2x4", "relative_speed": 1.0},
        {"kind": "v6e", "topology": "1", "relative_speed": 1.0},
      ),
      "pace_step_secs": 0.1,
    }
  )
  config.sync = ml_collections.ConfigDict(
    {"num_fragments": 12, "every": 12, "adoption": "carry"}
  )
  config.outer = ml_collections.ConfigDict(
    {"learning_rate": 1.0, "momentum": 0.0}
  )
  config.programs = ml_collections.ConfigDict(
    {"window_steps": 12, "eval_every_tokens": 50_000}
  )
  return config
