"""Three unequal islands train a byte-level language model; one is killed.

Question: does Decoupled DiLoCo train a real model on real text while an island
dies and comes back?

Command: `make quickstart`, or
`diloco train --config=experiments/configs/quickstart.py --workdir=DIR`.

Cost: four minutes on two cores.
Expected: 2.1 to 2.2 held-out bits per byte; one island's training alone on half
of the tokens reaches 2.21.
Reference: Decoupled DiLoCo, arXiv 2604.21428.

Data: the source files of Python's own standard library, split by file.

Variants: `:smoke` trains a tiny model for half a minute; `:alone` trains the
same model as a single island on 1.2 M tokens, for comparison.
"""

import ml_collections


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "", "smoke" or "alone"."""
  if variant not in ("", "smoke", "alone"):
    raise ValueError(f"variant {variant!r}: there are 'smoke' and 'alone'")
  config = ml_collections.ConfigDict()
  config.name = "quickstart"
  config.seed = 0
  config.total_tokens = 2_400_000

  config.task = ml_collections.ConfigDict()
  config.task.name = "language_model"
  config.task.options = ml_collections.ConfigDict(
    dict(
      d_model=128,
      num_layers=4,
      num_heads=4,
      seq_len=128,
      batch_size=4,
      learning_rate=0.003,
    )
  )

  # Kinds and speeds are emulated: all three run on this machine's cores.
  config.fleet = ml_collections.ConfigDict()
  config.fleet.slices = (
    dict(kind="v6e", topology="1", relative_speed=1.0),
    dict(kind="v5p", topology="1", relative_speed=0.6),
    dict(kind="v5p", topology="1", relative_speed=0.4),
  )
  config.fleet.pace_step_secs = 0.09

  # H by a study of its own, `experiments/studies/quickstart.py`.
  config.sync = ml_collections.ConfigDict(
    dict(
      num_fragments=12, every=12, overlap_steps=2, quorum=1, adoption="carry"
    )
  )
  config.outer = ml_collections.ConfigDict(
    dict(learning_rate=1.0, momentum=0.0)
  )
  config.programs = ml_collections.ConfigDict(
    dict(
      window_steps=24,
      eval_every_tokens=100_000,
      final_eval_batches=32,
      checkpoint_every_steps=100,
    )
  )
  config.faults = (dict(target="island-1", at_fraction=0.33, kind="sigkill"),)
  if variant == "smoke":
    _shrink(config)
  if variant == "alone":
    _leave_one_island(config)
  return config


def like(name: str, variant: str, *others: str) -> ml_collections.ConfigDict:
  """What another experiment starts from: all of this one, or its `:smoke`.

  Args:
    name: of the other.
    variant: its variant.
    others: the variants that it has besides `:smoke`.
  """
  known = ("smoke", *others)
  if variant not in ("", *known):
    raise ValueError(f"variant {variant!r}: choose of {', '.join(known)}")
  config = get_config("smoke" if variant == "smoke" else "")
  config.name = name
  return config


def _leave_one_island(config: ml_collections.ConfigDict) -> None:
  # With outer learning rate 1 and "carry" a lone island's global parameters
  # are its own, so this is ordinary training.
  config.total_tokens = 1_228_800
  config.fleet.slices = (dict(kind="cpu", topology="1"),)
  config.fleet.pace_step_secs = 0.0
  config.faults = ()


def _shrink(config: ml_collections.ConfigDict) -> None:
  config.total_tokens = 60_000
  config.fleet.pace_step_secs = 0.05
  config.faults = (dict(target="island-1", at_fraction=0.1, kind="sigkill"),)
  config.task.options.update(
    d_model=32, num_layers=1, num_heads=2, seq_len=64, batch_size=4
  )
  config.sync.update(num_fragments=8, every=8)
  config.programs.update(
    window_steps=8,
    eval_every_tokens=20_000,
    final_eval_batches=4,
    checkpoint_every_steps=40,
  )
