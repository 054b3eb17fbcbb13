"""The language-model task: a byte-level transformer on text files."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from diloco import errors
from diloco.tasks import inner_optimizer, options, streams, task, text
from diloco.tasks.models import experts, transformer

_RANGES = {
  "at least 1": (
    *("seq_len", "batch_size", "experts_per_token", "capacity_factor"),
  ),
  "at least 0": ("num_experts", "z_loss", "balance_loss", "router_z_loss"),
  "between 0 and 1, exclusive": ("heldout_fraction",),
}


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig(inner_optimizer.Options):
  """Model, data and inner optimizer of a `LanguageModel`.

  Raises `UserError` when built from values that cannot work.
  """

  # Model.
  d_model: int = 128
  num_layers: int = 4
  num_heads: int = 4
  d_ff: int = 384
  vocab: int = text.VOCAB
  mlp: str = "geglu"  # or "swiglu"
  compute_dtype: str = "float32"  # or "bfloat16"; parameters are float32
  # Mixture of experts; see `models.experts`. `d_ff` is of one expert.
  num_experts: int = 0  # 0 for one MLP
  experts_per_token: int = 2
  capacity_factor: float = 2.0  # in training; elsewhere nothing is dropped
  # Batches and data. Small batches: at a million tokens, the number of steps
  # limits the loss, not the number of tokens.
  seq_len: int = 128
  batch_size: int = 8
  data_glob: str = ""  # "" for the running Python's standard library
  heldout_fraction: float = 0.02  # of files
  # Weights in the loss; see `LanguageModel.loss`.
  z_loss: float = 1e-4
  balance_loss: float = 1e-2
  router_z_loss: float = 1e-3

  def __post_init__(self):
    super().__post_init__()
    options.check(self, _RANGES, {})
    transformer.TransformerConfig.of(self)
    if self.vocab < text.VOCAB:
      raise errors.UserError(
        f"vocab={self.vocab}",
        f"tokens are bytes, of which there are {text.VOCAB}",
        f"use vocab={text.VOCAB}",
      )
    if 0 < self.num_experts < self.experts_per_token:
      raise errors.UserError(
        f"experts_per_token={self.experts_per_token}",
        f"there are only num_experts={self.num_experts}",
        f"use at most {self.num_experts}, or more experts",
      )


class LanguageModel:
  """Next-byte prediction with a decoder-only transformer.

  Implements `task.Task`. A batch is {"tokens": int [B, L + 1]}.
  """

  def __init__(self, config: LanguageModelConfig):
    """Raises `UserError` if `config.data_glob` matches nothing."""
    text.find_files(config.data_glob)
    self.config = config
    self.tokens_per_batch = config.batch_size * config.seq_len
    self.context = config.seq_len
    self._model, self._training_model = _models(config)
    if config.num_experts:
      # Experts lie apart, and each of their devices also takes rows of its own.
      self.mesh_axes = self.batch_axes = ("data", "expert")
      self.sharding = _divide_experts
    self._init = jax.jit(self._model.init)

  def init(self, rng: jax.Array) -> task.Params:
    """Returns initial parameters, float32, equal for equal `rng`."""
    # Parameter shapes do not depend on the length: a short row inits faster.
    return self._init(rng, jnp.zeros((1, 2), jnp.int32))["params"]

  def logits(self, params: task.Params, tokens: jax.Array) -> jax.Array:
    """Returns next-token logits [B, L, V], float32, for `tokens` [B, L]."""
    return self._model.apply({"params": params}, tokens)

  def loss(
    self, params: task.Params, batch: task.Batch
  ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Returns the training loss, a mean over tokens, in nats.

    loss = mean(nll) + z_loss * mean(log(Z)^2), Z the softmax normaliser: the
    second term keeps logits from drifting. With experts, balance_loss * balance
    + router_z_loss * router_z comes to it, means over layers.

    Args:
      params: float32 parameters.
      batch: {"tokens": int [B, L + 1]}.

    Returns:
      The loss and {"nll": its first term}; with experts also `balance` and
      `router_z`, `dropped`, `expert_<e>_share` (see `experts.Routed`), and
      `busiest_share`, the largest of any layer.

    References: PaLM, 2204.02311, section 5; those of `models.experts`.
    """
    tokens = jnp.asarray(batch["tokens"], jnp.int32)
    logits, collections = self._training_model.apply(
      {"params": params}, tokens[:, :-1], mutable=experts.MUTABLE
    )
    nll_BxL, log_z_BxL = _cross_entropy(logits, tokens)
    nll = jnp.mean(nll_BxL)
    loss = nll + self.config.z_loss * jnp.mean(jnp.square(log_z_BxL))
    metrics = {"nll": nll}
    if self.config.num_experts:
      routed = experts.routed(collections)
      metrics |= _routing_metrics(routed)
      loss += self.config.balance_loss * metrics["balance"]
      loss += self.config.router_z_loss * metrics["router_z"]
    return loss, metrics

  def eval_loss(
    self, params: task.Params, batch: task.Batch
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (sum of cross-entropy in nats, number of tokens), float32."""
    tokens = jnp.asarray(batch["tokens"], jnp.int32)
    logits = self.logits(params, tokens[:, :-1])
    nll_BxL, _ = _cross_entropy(logits, tokens)
    return jnp.sum(nll_BxL), jnp.float32(nll_BxL.size)

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
    config = self.config
    corpus = text.load_corpus(config.data_glob, config.heldout_fraction)
    return text.stream(
      corpus.split(split),
      split,
      batch_size=config.batch_size,
      seq_len=config.seq_len,
      share=share,
      num_shares=num_shares,
      seed=seed,
    )

  def is_embedding(self, path: str) -> bool:
    """Whether the leaf at '/'-joined `path` merges by plain weighted mean."""
    return path.split("/")[-1] == "embedding"


def _models(
  config: LanguageModelConfig,
) -> tuple[transformer.Transformer, transformer.Transformer]:
  """One that drops no token, and the one that is trained, which may."""
  sizes = transformer.TransformerConfig.of(config)
  if not config.num_experts:
    dense = transformer.Transformer(sizes)
    return dense, dense
  routing = experts.RoutingConfig(
    config.num_experts, config.experts_per_token, config.capacity_factor
  )
  # With room for all an expert drops nothing.
  roomy = dataclasses.replace(routing, capacity_factor=config.num_experts)
  whole, training = (
    transformer.Transformer(
      sizes, functools.partial(experts.Experts, routing=chosen)
    )
    for chosen in (roomy, routing)
  )
  return whole, training


def _divide_experts(path: str, shape: tuple[int, ...]) -> PartitionSpec:
  """Stacks of experts, the only leaves of three axes, along their first."""
  return PartitionSpec("expert") if len(shape) == 3 else PartitionSpec()


def _cross_entropy(
  logits_BxLxV: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns (cross-entropy, log normaliser), each [B, L], of [B, L + 1] tokens.

  Both are in nats; the logits are of the tokens after each but the last.
  """
  log_z_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
  target_BxL = jnp.take_along_axis(logits_BxLxV, tokens[:, 1:, None], axis=-1)[
    ..., 0
  ]
  return log_z_BxL - target_BxL, log_z_BxL


def _routing_metrics(routed: experts.Routed) -> dict[str, jax.Array]:
  """Means over layers, and the largest share of any."""
  share_E = routed.share.mean(axis=0)
  return {
    "balance": routed.balance.mean(),
    "router_z": routed.z.mean(),
    "dropped": routed.dropped.mean(),
    "busiest_share": routed.share.max(),
  } | {f"expert_{e}_share": share for e, share in enumerate(share_E)}
