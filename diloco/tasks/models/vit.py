"""A small vision transformer, in Flax Linen.

Square patches, learned positions, the language model's layers without its mask
and rotations, and the mean over patches before a linear head.

Shape suffixes beside the transformer's: H and W pixels, P patches, S pixels of
a patch, C classes.

Reference: ViT, 2010.11929; the mean over patches, 2205.01580.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from diloco.tasks.models import transformer


class VisionTransformer(nn.Module):
  """Grey images to logits of classes.

  `config.vocab` is the number of classes.
  """

  config: transformer.TransformerConfig
  patch: int  # pixels along a side; divides those of the image

  @nn.compact
  def __call__(self, image_BxHxW: jax.Array) -> jax.Array:
    """Returns logits [B, C], float32, of pixels between 0 and 1."""
    config, side = self.config, self.patch
    batch, height, width = image_BxHxW.shape
    rows, columns = height // side, width // side
    patch_BxPxS = (
      image_BxHxW.reshape(batch, rows, side, columns, side)
      .transpose(0, 1, 3, 2, 4)
      .reshape(batch, rows * columns, side * side)
      .astype(config.dtype)
    )
    embed_SxD = self.param(
      "patches",
      nn.initializers.normal(1 / side),
      (side * side, config.d_model),
    )
    position_PxD = self.param(
      "positions",
      nn.initializers.normal(1.0),
      (rows * columns, config.d_model),
    )
    x_BxPxD = transformer.product(patch_BxPxS, embed_SxD)
    x_BxPxD += position_PxD.astype(config.dtype)
    for index in range(config.num_layers):
      x_BxPxD = transformer.Layer(config, name=f"layer_{index}")(x_BxPxD)
    x_BxPxD = transformer.RMSNorm(name="final_norm")(x_BxPxD)
    head_DxC = self.param(
      "head", nn.initializers.normal(0.02), (config.d_model, config.vocab)
    )
    return x_BxPxD.mean(axis=1).astype(jnp.float32) @ head_DxC
