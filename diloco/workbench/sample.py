"""`diloco sample`: a run's global parameters write text."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco import errors
from diloco.tasks import text
from diloco.workbench import loaded

_END = 0  # the byte between two files


def sample(
  model: loaded.Model,
  prompt: str,
  num_tokens: int = 200,
  temperature: float = 0.8,
  seed: int = 0,
) -> str:
  """Goes on with a text, byte by byte.

  Args:
    model: the parameters and their task.
    prompt: what to go on with; empty for the beginning of a text.
    num_tokens: bytes to write at most; it stops where a text ends.
    temperature: the logits are divided by it; 0 takes the likeliest byte.
    seed: of the draws.

  Returns:
    What comes after the prompt. Bytes that are no text become \ufffd.

  Raises:
    UserError: the task cannot, or a value will not do.
  """
  task = model.task
  if not (hasattr(task, "logits") and hasattr(task, "context")):
    raise errors.UserError(
      f"a sample of the run in {model.run.dir}",
      f"its task {model.run.settings.task.name!r} has no logits and context, so"
      " it writes no text",
      "give it both, see diloco.tasks.task.Task",
    )

  @jax.jit
  def draw(params: Any, window: jax.Array, last: Any, key: jax.Array) -> Any:
    logits = task.logits(params, window[None])[0, last, : text.VOCAB]
    if not temperature:
      return jnp.argmax(logits)
    return jax.random.categorical(key, logits / temperature)

  given = prompt.encode(errors="surrogateescape") or bytes([_END])
  written = bytearray(given)
  key = jax.random.key(seed)
  for i in range(num_tokens):
    seen = written[-task.context :]
    # One length for all, so it is compiled once; what is behind is not seen.
    window = np.zeros(task.context, np.int32)
    window[: len(seen)] = seen
    byte = int(
      draw(model.params, window, len(seen) - 1, jax.random.fold_in(key, i))
    )
    if byte == _END:
      break
    written.append(byte)
  return shown(bytes(written[len(given) :]))


def shown(raw: bytes) -> str:
  """Bytes as text that does nothing to a terminal."""
  return "".join(
    char if char.isprintable() or char in "\n\t" else "\ufffd"
    for char in raw.decode(errors="replace")
  )
