"""The language-model task: a byte-level transformer on text files."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from diloco import errors
from diloco.tasks import inner_optimizer, options, task, text
from diloco.tasks.models import transformer

_COMPUTE_DTYPES = ("float32", "bfloat16")
_RULES = (
  options.at_least_one(
    "d_model", "num_layers", "num_heads", "d_ff", "seq_len", "batch_size"
  ),
  options.not_negative("z_loss"),
  options.Rule(
    ("heldout_fraction",), lambda x: 0 < x < 1, "between 0 and 1, exclusive"
  ),
)


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
  # Batches and data. Small batches: at a million tokens, the number of steps
  # limits the loss, not the number of tokens.
  seq_len: int = 128
  batch_size: int = 8
  data_glob: str = ""  # "" for the running Python's standard library
  heldout_fraction: float = 0.02  # of files
  z_loss: float = 1e-4  # see `LanguageModel.loss`

  def __post_init__(self):
    super().__post_init__()
    options.check_ranges(self, _RULES)
    options.check_choice(self, "mlp", tuple(transformer.ACTIVATIONS))
    options.check_choice(self, "compute_dtype", _COMPUTE_DTYPES)
    _check_model(self)


class LanguageModel:
  """Next-byte prediction with a decoder-only transformer.

  Implements `task.Task`. A batch is {"tokens": int [B, L + 1]}.
  """

  def __init__(self, config: LanguageModelConfig):
    """Builds the model and checks that its text source exists.

    Args:
      config: all choices of the task.

    Raises:
      UserError: `config.data_glob` matches nothing.
    """
    text.find_files(config.data_glob)
    self.config = config
    self.tokens_per_batch = config.batch_size * config.seq_len
    self.context = config.seq_len
    self._model = transformer.Transformer(
      transformer.TransformerConfig(
        vocab=config.vocab,
        d_model=config.d_model,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        d_ff=config.d_ff,
        mlp=config.mlp,
        compute_dtype=config.compute_dtype,
      )
    )
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
    second term keeps logits from drifting.

    Args:
      params: float32 parameters.
      batch: {"tokens": int [B, L + 1]}.

    Returns:
      The loss and {"nll": its first term}.

    Reference: PaLM, 2204.02311, section 5.
    """
    nll_BxL, log_z_BxL = self._cross_entropy(params, batch)
    nll = jnp.mean(nll_BxL)
    penalty = self.config.z_loss * jnp.mean(jnp.square(log_z_BxL))
    return nll + penalty, {"nll": nll}

  def eval_loss(
    self, params: task.Params, batch: task.Batch
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (sum of cross-entropy in nats, number of tokens), float32."""
    nll_BxL, _ = self._cross_entropy(params, batch)
    return jnp.sum(nll_BxL), jnp.float32(nll_BxL.size)

  def optimizer(self, schedule_steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of the options; see `inner_optimizer.make`."""
    return inner_optimizer.make(self.config, schedule_steps, self.is_embedding)

  def learning_rate(self, schedule_steps: int) -> optax.Schedule:
    """Returns the optimizer's schedule, for the metric log."""
    return inner_optimizer.learning_rate(self.config, schedule_steps)

  def batches(
    self, split: task.Split, *, share: int, num_shares: int, seed: int
  ) -> text.TextStream:
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

  def _cross_entropy(
    self, params: task.Params, batch: task.Batch
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (cross-entropy, log normaliser), each [B, L], in nats."""
    tokens = jnp.asarray(batch["tokens"], jnp.int32)
    logits_BxLxV = self.logits(params, tokens[:, :-1])
    log_z_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1)
    target_BxL = jnp.take_along_axis(
      logits_BxLxV, tokens[:, 1:, None], axis=-1
    )[..., 0]
    return log_z_BxL - target_BxL, log_z_BxL


def _check_model(config: LanguageModelConfig) -> None:
  if config.vocab < text.VOCAB:
    raise errors.UserError(
      f"vocab={config.vocab}",
      f"tokens are bytes, of which there are {text.VOCAB}",
      f"use vocab={text.VOCAB}",
    )
  if config.d_model % (2 * config.num_heads):
    raise errors.UserError(
      f"d_model={config.d_model} with num_heads={config.num_heads}",
      "every head needs the same even number of features",
      f"make d_model a multiple of {2 * config.num_heads}",
    )
