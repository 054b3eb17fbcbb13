"""Inner optimizers by name, for tasks that have no reason for one of their own.

All of them share one schedule and one convention of weight decay: with the
direction u that the optimizer proposes and the learning rate r of the step,

    p <- p - r (u + weight_decay p),

for leaves of two or more axes, embeddings included; vectors do not decay. So
decay follows the schedule and does not pass through any moment (AdamW,
1711.05101).
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import optax

from diloco.tasks import options as options_lib
from diloco.tasks import task

# A Muon update has this root mean square, about that of Adam's updates, so that
# one learning rate and one weight decay serve both (2502.16982, section 2.2).
_MUON_RMS = 0.2

_RANGES = {
  "at least 0": ("warmup_steps", "weight_decay"),
  "above 0": ("learning_rate", "eps", "clip_norm"),
  "at least 0 and below 1": ("b1", "b2", "muon_momentum"),
  "between 0 and 1": ("final_lr_fraction",),
}


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the inner optimizer; a task's own options inherit them.

  Raises `UserError` when built from values that cannot work, those of the
  inheriting class included if their types are not those of their defaults.
  """

  optimizer: str = "adamw"  # or "muon"
  learning_rate: float = 4e-3  # peak
  warmup_steps: int = 50  # at most half of the schedule is warmup
  final_lr_fraction: float = 0.05  # of the peak
  b1: float = 0.9  # of Adam, and so the next two
  b2: float = 0.95
  eps: float = 1e-8
  muon_momentum: float = 0.95
  weight_decay: float = 0.1  # see the module
  clip_norm: float = 1.0  # of the gradient of all leaves together

  def __post_init__(self):
    options_lib.check(self, _RANGES, {"optimizer": _DIRECTIONS})


def learning_rate(options: Options, schedule_steps: int) -> optax.Schedule:
  """Returns linear warmup, then a cosine that ends at `schedule_steps`."""
  warmup_steps = min(options.warmup_steps, schedule_steps // 2)
  return optax.warmup_cosine_decay_schedule(
    # From zero, the first step would be wasted.
    init_value=options.learning_rate / (warmup_steps + 1),
    peak_value=options.learning_rate,
    warmup_steps=warmup_steps,
    decay_steps=max(1, schedule_steps),
    end_value=options.learning_rate * options.final_lr_fraction,
  )


def make(
  options: Options,
  schedule_steps: int,
  is_embedding: Callable[[str], bool],
) -> optax.GradientTransformation:
  """Returns the optimizer of these options.

  The schedule's step count is the `count` of the chain's only
  `optax.ScaleByScheduleState`, apart from those that are the age of moments:
  either can be set without the other.
  """
  return optax.chain(
    optax.clip_by_global_norm(options.clip_norm),
    _DIRECTIONS[options.optimizer](options, is_embedding),
    optax.add_decayed_weights(options.weight_decay, mask=_is_matrix),
    optax.scale_by_learning_rate(learning_rate(options, schedule_steps)),
  )


def _adam(
  options: Options, is_embedding: Callable[[str], bool]
) -> optax.GradientTransformation:
  del is_embedding
  return optax.scale_by_adam(b1=options.b1, b2=options.b2, eps=options.eps)


def _muon(
  options: Options, is_embedding: Callable[[str], bool]
) -> optax.GradientTransformation:
  """Muon for matrices, Adam for embeddings and vectors.

  A leaf of more than two axes is a stack of matrices, each taken for itself.

  Reference: Jordan et al., https://kellerjordan.github.io/posts/muon, and
  2502.16982 for the scale of updates.
  """

  def label(path: tuple, leaf: jax.Array) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return "adam" if leaf.ndim < 2 or is_embedding(name) else "muon"

  def axes(updates: task.Params) -> task.Params:
    last_two = optax.contrib.MuonDimensionNumbers(-2, -1)
    return jax.tree.map(lambda _: last_two, updates)

  def scale(update: jax.Array) -> jax.Array:
    # An orthogonal update [m, n] has the norm sqrt(min(m, n)).
    return update * (_MUON_RMS * math.sqrt(max(update.shape[-2:])))

  muon = optax.chain(
    optax.contrib.scale_by_muon(
      beta=options.muon_momentum, weight_dimension_numbers=axes
    ),
    optax.stateless(lambda updates, _: jax.tree.map(scale, updates)),
  )
  return optax.partition(
    {"muon": muon, "adam": _adam(options, is_embedding)},
    lambda params: jax.tree_util.tree_map_with_path(label, params),
  )


_DIRECTIONS = {"adamw": _adam, "muon": _muon}


def _is_matrix(params: task.Params) -> task.Params:
  return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
