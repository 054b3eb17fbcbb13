"""A decoder-only transformer in the Gemma manner, in Flax Linen.

RMSNorm before each block, rotary positions, normalised queries and keys, a
gated MLP, tied and scaled embeddings, no biases. Parameters are float32
whatever the compute dtype. Each layer keeps leaves of its own, because
fragments are sets of leaves: layers are unrolled and never stacked.

Shape suffixes: B batch, L length, D model width, F MLP width, N heads,
K head width, V vocabulary.

References: Gemma (2403.08295, 2503.19786), RoPE (2104.09864), GLU variants
(2002.05202), QK-norm (2302.05442).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from diloco import errors
from diloco.tasks import options as options_lib

_MAX_WAVELENGTH = 10_000.0
_NORM_EPSILON = 1e-6
# Causal attention works through queries in at most this many blocks, each
# against the keys before its end: the upper triangle is mostly never computed.
_QUERY_BLOCKS = 4
_MIN_QUERY_BLOCK = 64

_COMPUTE_DTYPES = ("float32", "bfloat16")
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "geglu": functools.partial(nn.gelu, approximate=True),
  "swiglu": nn.silu,
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Sizes of a `Transformer`.

  Raises `UserError` when built from values that cannot work.
  """

  vocab: int
  d_model: int
  num_layers: int
  num_heads: int
  d_ff: int
  mlp: str = "geglu"  # a key of `ACTIVATIONS`
  compute_dtype: str = "float32"  # or "bfloat16"
  # Whether positions have an order, each knowing those before it alone; without
  # one all know all, and what is where the model's input must say.
  causal: bool = True

  def __post_init__(self):
    sizes = ("vocab", "d_model", "num_layers", "num_heads", "d_ff")
    choices = {"mlp": ACTIVATIONS, "compute_dtype": _COMPUTE_DTYPES}
    options_lib.check(self, {"at least 1": sizes}, choices)
    if self.d_model % (2 * self.num_heads):
      raise errors.UserError(
        f"d_model={self.d_model} with num_heads={self.num_heads}",
        "every head needs the same even number of features",
        f"make d_model a multiple of {2 * self.num_heads}",
      )

  @classmethod
  def of(cls, options: Any, **others: Any) -> "TransformerConfig":
    """Takes what a task's options have of the same names, and others."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(
      **{
        n: getattr(options, n) for n in names - {*others} if hasattr(options, n)
      },
      **others,
    )

  @property
  def dtype(self) -> Any:
    """The dtype activations and matrix products are computed in."""
    return jnp.dtype(self.compute_dtype)


def rotate(x_BxNxLxK: jax.Array) -> jax.Array:
  """Rotates pairs of features by angles that grow with the position.

  (x_i, x_{i+K/2}) turns by t w_i, w_i = 10000^(-2i/K), at position t, so that
  the product of a query and a key depends on their distance alone.

  Args:
    x_BxNxLxK: queries or keys; K is even.

  Returns:
    The rotated array, same shape and dtype.

  Reference: 2104.09864, equation 34.
  """
  length, width = x_BxNxLxK.shape[-2:]
  frequency_H = _MAX_WAVELENGTH ** -(np.arange(width // 2) / (width // 2))
  angle_LxH = np.arange(length)[:, None] * frequency_H
  cos = jnp.asarray(np.cos(angle_LxH), x_BxNxLxK.dtype)
  sin = jnp.asarray(np.sin(angle_LxH), x_BxNxLxK.dtype)
  first, second = jnp.split(x_BxNxLxK, 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


def attention(
  query_BxNxLxK: jax.Array,
  key_BxNxMxK: jax.Array,
  value_BxNxMxK: jax.Array,
  mask_LxM: np.ndarray | None = None,
) -> jax.Array:
  """Softmax attention over M positions, or those where the mask is true.

  Scores and softmax are float32; scaling is the caller's.

  Returns:
    [B, N, L, K], in the dtype of the values.
  """
  scores = jnp.einsum(
    "bnlk,bnmk->bnlm",
    query_BxNxLxK,
    key_BxNxMxK,
    preferred_element_type=jnp.float32,
  )
  if mask_LxM is not None:
    scores = jnp.where(mask_LxM, scores, jnp.float32(-1e30))
  weights = nn.softmax(scores, axis=-1).astype(value_BxNxMxK.dtype)
  return jnp.einsum("bnlm,bnmk->bnlk", weights, value_BxNxMxK)


def causal_attention(
  query_BxNxLxK: jax.Array, key_BxNxLxK: jax.Array, value_BxNxLxK: jax.Array
) -> jax.Array:
  """Softmax attention over the own and earlier positions.

  out_t = sum_{s <= t} softmax_s(q_t . k_s) v_s; scaling is the caller's.

  Returns:
    [B, N, L, K], in the dtype of the values.
  """
  length = query_BxNxLxK.shape[-2]
  size = max(_MIN_QUERY_BLOCK, -(-length // _QUERY_BLOCKS))
  mask_LxL = np.tril(np.ones((length, length), bool))
  outputs = []
  for start in range(0, length, size):
    rows = slice(start, min(start + size, length))
    past = slice(0, rows.stop)
    outputs.append(
      attention(
        query_BxNxLxK[:, :, rows],
        key_BxNxLxK[:, :, past],
        value_BxNxLxK[:, :, past],
        mask_LxL[rows, past],
      )
    )
  return jnp.concatenate(outputs, axis=2)


def product(x_BxLxD: jax.Array, kernel_DxE: jax.Array) -> jax.Array:
  """Returns x @ kernel, [B, L, E], in the dtype of x.

  Its gradient sums over B L as one axis; over two, a CPU takes twice as long.
  """
  rows_TxD = x_BxLxD.reshape(-1, x_BxLxD.shape[-1])
  out_TxE = rows_TxD @ kernel_DxE.astype(rows_TxD.dtype)
  return out_TxE.reshape(*x_BxLxD.shape[:-1], -1)


def _project(
  x_BxLxD: jax.Array, kernels_DxE: Sequence[jax.Array]
) -> list[jax.Array]:
  """Applies several kernels as one product, faster than one by one."""
  joined = jnp.concatenate(kernels_DxE, axis=1)
  return jnp.split(product(x_BxLxD, joined), len(kernels_DxE), axis=-1)


class RMSNorm(nn.Module):
  """x / rms(x) (1 + scale), over the last axis, computed in float32."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the normalised `x`, same shape and dtype."""
    scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],))
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normed = x32 * jax.lax.rsqrt(mean_square + _NORM_EPSILON)
    return (normed * (1 + scale)).astype(x.dtype)


class Projections(nn.Module):
  """Base of blocks that hold square or rectangular kernels."""

  config: TransformerConfig

  def kernel(self, name: str, *shape: int) -> jax.Array:
    """A float32 kernel [..., rows, columns] with variance 1 / rows."""
    init = nn.initializers.normal(shape[-2] ** -0.5)
    return self.param(name, init, shape, jnp.float32)


class Attention(Projections):
  """Multi-head self-attention with normalised queries and keys."""

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    """Returns the block's update of the residual stream."""
    batch, length, width = x_BxLxD.shape
    heads = self.config.num_heads
    names = ("query", "key", "value")
    kernels = [self.kernel(name, width, width) for name in names]
    query, key, value = (
      x.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
      for x in _project(RMSNorm(name="norm")(x_BxLxD), kernels)
    )
    query = self._turned(RMSNorm(name="query_norm")(query))
    key = self._turned(RMSNorm(name="key_norm")(key))
    query = query * jnp.asarray((width // heads) ** -0.5, query.dtype)
    if self.config.causal:
      mixed = causal_attention(query, key, value)
    else:
      mixed = attention(query, key, value)
    mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, length, width)
    return product(mixed, self.kernel("out", width, width))

  def _turned(self, x_BxNxLxK: jax.Array) -> jax.Array:
    return rotate(x_BxNxLxK) if self.config.causal else x_BxNxLxK


class GatedMLP(Projections):
  """down(activation(gate(x)) * up(x))."""

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    """Returns the block's update of the residual stream."""
    width, hidden = x_BxLxD.shape[-1], self.config.d_ff
    kernels = [self.kernel(name, width, hidden) for name in ("gate", "up")]
    gate, up = _project(RMSNorm(name="norm")(x_BxLxD), kernels)
    hidden_BxLxF = ACTIVATIONS[self.config.mlp](gate) * up
    return product(hidden_BxLxF, self.kernel("down", hidden, width))


class Layer(nn.Module):
  """One attention and one MLP block, each added to its input."""

  config: TransformerConfig
  mlp: Callable[..., nn.Module] = GatedMLP

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    """Returns the residual stream after this layer."""
    x_BxLxD = x_BxLxD + Attention(self.config, name="attention")(x_BxLxD)
    return x_BxLxD + self.mlp(self.config, name="mlp")(x_BxLxD)


class Transformer(nn.Module):
  """Token ids to next-token logits.

  `mlp` makes the second block of each layer from the sizes and a name.
  """

  config: TransformerConfig
  mlp: Callable[..., nn.Module] = GatedMLP

  @nn.compact
  def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
    """Returns logits [B, L, V], float32.

    The one table E serves both ends: x = sqrt(D) E[token] at the input,
    logits = x E^T at the output.
    """
    config = self.config
    table_VxD = self.param(
      "embedding",
      nn.initializers.normal(0.02),
      (config.vocab, config.d_model),
      jnp.float32,
    )
    scale = jnp.asarray(config.d_model**0.5, config.dtype)
    x_BxLxD = table_VxD[tokens_BxL].astype(config.dtype) * scale
    for index in range(config.num_layers):
      x_BxLxD = Layer(config, self.mlp, name=f"layer_{index}")(x_BxLxD)
    x_BxLxD = RMSNorm(name="final_norm")(x_BxLxD)
    return jnp.einsum(
      "bld,vd->blv",
      x_BxLxD,
      table_VxD.astype(config.dtype),
      preferred_element_type=jnp.float32,
    )
