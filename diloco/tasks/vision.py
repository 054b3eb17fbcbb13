"""The vision task: a small vision transformer tells kinds of characters."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from diloco import errors
from diloco.tasks import glyphs, inner_optimizer, options, streams, task
from diloco.tasks.models import transformer, vit

_RANGES = {
  "at least 1": ("patch", "batch_size"),
  "between 0 and 1, exclusive": ("heldout_fraction",),
}


@dataclasses.dataclass(frozen=True)
class VisionConfig(inner_optimizer.Options):
  """Model, data and inner optimizer of a `Vision`.

  Raises `UserError` when built from values that cannot work.
  """

  d_model: int = 64
  num_layers: int = 4
  num_heads: int = 4
  d_ff: int = 192
  mlp: str = "geglu"  # or "swiglu"
  compute_dtype: str = "float32"  # or "bfloat16"; parameters are float32
  patch: int = 6  # pixels along a side of the square patches
  batch_size: int = 32
  heldout_fraction: float = 0.1  # of characters

  def __post_init__(self):
    super().__post_init__()
    options.check(self, _RANGES, {})
    transformer.TransformerConfig.of(self, vocab=1)
    if glyphs.SIZE % self.patch:
      raise errors.UserError(
        f"patch={self.patch}",
        f"an image has {glyphs.SIZE} pixels along each side",
        f"use a divisor of {glyphs.SIZE}",
      )


class Vision:
  """Kinds of characters from their glyphs; see `glyphs`.

  Implements `task.Task`; a token is one image. A batch is {"image": uint8
  [B, 24, 24], "label": int32 [B]}.
  """

  heldout_sets = glyphs.HELDOUT_SETS

  def __init__(self, config: VisionConfig):
    """Raises `UserError` if a split has no glyph."""
    self.config = config
    self.tokens_per_batch = config.batch_size
    self._glyphs = glyphs.load(config.heldout_fraction)
    self._model = vit.VisionTransformer(
      transformer.TransformerConfig.of(
        config, vocab=len(self._glyphs.kinds), causal=False
      ),
      config.patch,
    )
    self._init = jax.jit(self._model.init)

  def init(self, rng: jax.Array) -> task.Params:
    """Returns initial parameters, float32, equal for equal `rng`."""
    blank = jnp.zeros((1, glyphs.SIZE, glyphs.SIZE))
    return self._init(rng, blank)["params"]

  def loss(
    self, params: task.Params, batch: task.Batch
  ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Returns the mean cross-entropy in nats and {"accuracy"}."""
    nats_B, right_B = self._judge(params, batch)
    return jnp.mean(nats_B), {"accuracy": jnp.mean(right_B)}

  def eval_loss(
    self, params: task.Params, batch: task.Batch
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (sum of cross-entropy in nats, number of images), float32."""
    nats_B, _ = self._judge(params, batch)
    return jnp.sum(nats_B), jnp.float32(nats_B.size)

  def optimizer(self, schedule_steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of the options; see `inner_optimizer.make`."""
    return inner_optimizer.make(self.config, schedule_steps, self.is_embedding)

  def learning_rate(self, schedule_steps: int) -> optax.Schedule:
    """Returns the optimizer's schedule, for the metric log."""
    return inner_optimizer.learning_rate(self.config, schedule_steps)

  def batches(
    self, split: task.Split, *, share: int, num_shares: int, seed: int
  ) -> streams.Stream:
    """Returns share `share` of `num_shares` disjoint, seeded streams."""
    return streams.stream(
      self._glyphs.rows(split),
      f"the {split} glyphs",
      "another heldout_fraction",
      shuffled=split == "train",
      batch_size=self.config.batch_size,
      share=share,
      num_shares=num_shares,
      seed=seed,
    )

  def is_embedding(self, path: str) -> bool:
    """Whether the leaf at '/'-joined `path` merges by plain weighted mean."""
    return path == "positions"

  def _judge(
    self, params: task.Params, batch: task.Batch
  ) -> tuple[jax.Array, jax.Array]:
    """Returns of each image the cross-entropy in nats, and 1 if it is right."""
    image_BxHxW = jnp.asarray(batch["image"], jnp.float32) / 255
    label_B = jnp.asarray(batch["label"])
    logits_BxC = self._model.apply({"params": params}, image_BxHxW)
    nats_B = optax.softmax_cross_entropy_with_integer_labels(
      logits_BxC, label_B
    )
    right_B = jnp.argmax(logits_BxC, axis=-1) == label_B
    return nats_B, right_B.astype(jnp.float32)
