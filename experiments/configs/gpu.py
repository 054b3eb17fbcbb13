"""Four accelerators of one host, two for each of two islands.

Question: does Decoupled DiLoCo use a host's accelerators as it does emulated
devices, each island those of its own slice and no others?

Command: with `pip install 'jax[cuda13]'` and `export JAX_PLATFORMS=cuda`,
`diloco train --config=experiments/configs/gpu.py --workdir=DIR`. Without that
variable islands are emulated on the processor, accelerators or not.

The slices divide the host's accelerators in their order: island 0 sees the
first two, island 1 the next two. Name as many as the host has. Controller and
syncers leave them alone.

Cost: not measured, as nothing here was: this never ran on an accelerator. What
is tested is how devices are divided.
Expected: not measured.
Reference: Decoupled DiLoCo, arXiv 2604.21428.

Variants: `:smoke` trains a tiny model, an island on one device each; without an
accelerator too.
"""

import ml_collections


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "" or "smoke"."""
  if variant not in ("", "smoke"):
    raise ValueError(f"variant {variant!r}: there is only 'smoke'")
  config = ml_collections.ConfigDict()
  config.name = "gpu"
  config.total_tokens = 50_000_000
  config.task = ml_collections.ConfigDict(
    {
      "name": "language_model",
      "options": {
        "d_model": 768,
        "num_layers": 12,
        "num_heads": 12,
        "seq_len": 1024,
        "batch_size": 32,
        "learning_rate": 0.001,
      },
    }
  )
  slices = ({"kind": "gpu", "topology": "2"}, {"kind": "gpu", "topology": "2"})
  config.fleet = ml_collections.ConfigDict({"slices": slices})
  config.sync = ml_collections.ConfigDict(
    {"num_fragments": 24, "every": 48, "overlap_steps": 2, "adoption": "carry"}
  )
  config.outer = ml_collections.ConfigDict(
    {"learning_rate": 1.0, "momentum": 0.0}
  )
  config.programs = ml_collections.ConfigDict(
    {"window_steps": 48, "eval_every_tokens": 5_000_000}
  )
  if variant == "smoke":
    _shrink(config)
  return config


def _shrink(config: ml_collections.ConfigDict) -> None:
  config.total_tokens = 60_000
  config.fleet.slices = ({"kind": "gpu", "topology": "1"},) * 2
  config.task.options.update(
    d_model=32, num_layers=1, num_heads=2, seq_len=64, batch_size=4
  )
  config.sync.update(num_fragments=8, every=8)
  config.programs.update(
    window_steps=8, eval_every_tokens=20_000, final_eval_batches=4
  )
