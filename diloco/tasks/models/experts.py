"""A mixture of experts in the place of a layer's MLP, in Flax Linen.

Each token goes through the `experts_per_token` gated MLPs that its router
prefers, and their outputs are summed by the router's probabilities. An expert
has room for so many tokens of a batch, its *capacity*; what comes later, in the
order of the batch, is dropped and goes by the residual stream alone. So all
shapes are fixed, experts divide over a mesh axis by their leading axis, and a
token never depends on one that follows it in its row. With capacity for all,
nothing is dropped, and no token depends on another row.

Shape suffixes beside the transformer's: T tokens of the batch, E experts,
A assignments of tokens to experts, C capacity.

References: Shazeer et al. (1701.06538), Switch (2101.03961) for the loss that
balances, ST-MoE (2202.08906) for the router's z-loss.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from diloco.tasks.models import transformer

_COLLECTION = "routing"
MUTABLE = (_COLLECTION,)  # for `Transformer.apply`; see `routed`
# Of initial router weights: nearly even probabilities, which a few steps of the
# balancing loss can move.
_ROUTER_SCALE = 0.02


@dataclasses.dataclass(frozen=True)
class RoutingConfig:
  """How tokens are routed."""

  num_experts: int  # E
  experts_per_token: int  # k, at most E
  # Room of an expert over its even share, k T / E; from E / k on nothing is
  # dropped.
  capacity_factor: float

  def capacity(self, tokens: int) -> int:
    """Tokens an expert has room for, of so many in the batch."""
    even = self.experts_per_token * tokens / self.num_experts
    return min(tokens, math.ceil(self.capacity_factor * even))


class Routed(NamedTuple):
  """What the router of one layer did, float32."""

  share: jax.Array  # [E], of all assignments, by expert; sums to 1
  balance: jax.Array  # [], E sum_e share_e p_e, p_e mean probability; 1 if even
  z: jax.Array  # [], mean of log(Z)^2, Z the router's normaliser
  dropped: jax.Array  # [], share of assignments beyond capacity


def routed(collections: Any) -> Routed:
  """What all routers did, each field with a leading axis of layers.

  The collections are what `Transformer.apply` gives with `mutable=MUTABLE`.
  """
  layers = jax.tree.leaves(
    collections, is_leaf=lambda node: isinstance(node, Routed)
  )
  return jax.tree.map(lambda *parts: jnp.stack(parts), *layers)


class Experts(transformer.Projections):
  """sum_e p_e MLP_e(x) over a token's experts e, p the router's softmax.

  p is not scaled to a sum of 1, so that a router learns with one expert a token
  too.
  """

  routing: RoutingConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    """Returns the block's update of the residual stream."""
    count, k = self.routing.num_experts, self.routing.experts_per_token
    width = x_BxLxD.shape[-1]
    x_BxLxD = transformer.RMSNorm(name="norm")(x_BxLxD)
    x_TxD = x_BxLxD.reshape(-1, width)
    weight_A, expert_A = self._route(x_TxD)
    slot_A = _slots(expert_A, self.routing, len(x_TxD))
    gathered_ExCxD = (
      jnp.zeros((count * self.routing.capacity(len(x_TxD)), width), x_TxD.dtype)
      .at[slot_A]
      .set(jnp.repeat(x_TxD, k, axis=0), mode="drop", unique_indices=True)
      .reshape(count, -1, width)
    )
    out_ExCxD = self._mlps(gathered_ExCxD)
    out_AxD = (
      out_ExCxD.reshape(-1, width).at[slot_A].get(mode="fill", fill_value=0)
    )
    weighed_AxD = out_AxD * weight_A[:, None].astype(out_AxD.dtype)
    return weighed_AxD.reshape(-1, k, width).sum(axis=1).reshape(x_BxLxD.shape)

  def _route(self, x_TxD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns probability and expert of each assignment, token by token."""
    routing = self.routing
    router = self.param(
      "router",
      nn.initializers.normal(_ROUTER_SCALE),
      (x_TxD.shape[-1], routing.num_experts),
    )
    logits_TxE = x_TxD.astype(jnp.float32) @ router
    probability_TxE = nn.softmax(logits_TxE)
    weight_TxK, expert_TxK = jax.lax.top_k(
      probability_TxE, routing.experts_per_token
    )
    expert_A = expert_TxK.reshape(-1)
    counts_E = jnp.bincount(expert_A, length=routing.num_experts)
    share_E = counts_E / len(expert_A)
    kept_E = jnp.minimum(counts_E, routing.capacity(len(x_TxD)))
    done = Routed(
      share=share_E,
      balance=routing.num_experts * share_E @ probability_TxE.mean(axis=0),
      z=jnp.mean(jnp.square(nn.logsumexp(logits_TxE, axis=-1))),
      dropped=1 - jnp.sum(kept_E) / len(expert_A),
    )
    self.sow(_COLLECTION, "routed", done)
    return weight_TxK.reshape(-1), expert_A

  def _mlps(self, x_ExCxD: jax.Array) -> jax.Array:
    """Applies each expert to its own tokens."""
    count, _, width = x_ExCxD.shape
    hidden, dtype = self.config.d_ff, x_ExCxD.dtype
    gate, up = (
      self.kernel(name, count, width, hidden).astype(dtype)
      for name in ("gate", "up")
    )
    down = self.kernel("down", count, hidden, width).astype(dtype)
    activation = transformer.ACTIVATIONS[self.config.mlp]
    return (activation(x_ExCxD @ gate) * (x_ExCxD @ up)) @ down


def _slots(
  expert_A: jax.Array, routing: RoutingConfig, tokens: int
) -> jax.Array:
  """Returns each assignment's row among all experts' places, [A].

  Earlier assignments come first; those beyond capacity get a row that is not
  there.
  """
  capacity = routing.capacity(tokens)
  chosen_AxE = jax.nn.one_hot(expert_A, routing.num_experts, dtype=jnp.int32)
  place_A = jnp.sum(jnp.cumsum(chosen_AxE, axis=0) * chosen_AxE, axis=1) - 1
  beyond = routing.num_experts * capacity + jnp.arange(len(expert_A))
  return jnp.where(place_A < capacity, expert_A * capacity + place_A, beyond)
