"""Learning-rate schedules, wherever an optimizer's state has their counts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

# Counts of schedules that stand beside more than counts.
_SCHEDULED = {
  "InjectHyperparamsState": ("count",),
  "InjectStatefulHyperparamsState": ("count",),
  "MultiStepsState": ("gradient_step",),
}


def set_step(
  optimizer: optax.GradientTransformation,
  opt_state: Any,
  params: Mapping[str, jax.Array],
  step: int,
) -> Any:
  """Moves learning-rate schedules to `step`, leaving moments alone.

  A schedule follows the island's cumulative steps. Adam's own count belongs to
  its moments, which may be older than that after a recovery. What a schedule's
  count is after so many steps, wherever in the state it stands, tells the
  optimizer itself: it is asked for its counts alone, which costs no tensor.
  """
  if not _counts(opt_state):
    return opt_state  # a constant learning rate
  shapes = {name: (x.shape, x.dtype) for name, x in params.items()}

  def zeros() -> dict[str, jax.Array]:
    return {name: jnp.zeros(*shape) for name, shape in shapes.items()}

  def advance(_: Any, integers: list[jax.Array]) -> list[jax.Array]:
    state = _with_integers(optimizer.init(zeros()), integers)
    return _integers(optimizer.update(zeros(), state, zeros())[1])

  def count(steps: int) -> list[jax.Array]:
    fresh = optimizer.init(zeros())
    last = jax.lax.fori_loop(0, steps, advance, _integers(fresh))
    return _counts(_with_integers(fresh, last))

  return _with_counts(opt_state, jax.device_get(jax.jit(count)(step)))


def _scheduled(state: Any) -> tuple[str, ...]:
  """Fields that schedules follow, of what may be a named tuple.

  A count beside moments is the age of those. Where there is nothing but
  counts, they can be only of steps.
  """
  if not hasattr(state, "_fields"):
    return ()
  known = _SCHEDULED.get(type(state).__name__)
  if known is not None:
    return known
  return state._fields if all(map(_is_count, state)) else ()


def _is_count(value: Any) -> bool:
  return (
    hasattr(value, "dtype")
    and value.ndim == 0
    and jnp.issubdtype(value.dtype, jnp.integer)
  )


def _integers(state: Any) -> list[jax.Array]:
  """All that an optimizer may count by, whosever count it is."""
  return [jnp.asarray(x) for x in jax.tree.leaves(state) if _is_count(x)]


def _with_integers(state: Any, integers: Sequence[jax.Array]) -> Any:
  left = iter(integers)
  return jax.tree.map(lambda x: next(left) if _is_count(x) else x, state)


def _counts(state: Any) -> list[Any]:
  """All counts that schedules follow, in an order of their own."""
  found: list[Any] = []

  def note(count: Any) -> Any:
    found.append(count)
    return count

  _map_counts(state, note)
  return found


def _with_counts(state: Any, counts: Sequence[Any]) -> Any:
  """The state with other counts, in the same order."""
  left = iter(counts)
  return _map_counts(state, lambda c: jnp.asarray(next(left), c.dtype))


def _map_counts(state: Any, change: Callable[[Any], Any]) -> Any:
  def changed(node: Any) -> Any:
    if not (names := _scheduled(node)):
      return node
    fields = {
      name: change(value) if name in names else _map_counts(value, change)
      for name, value in node._asdict().items()
    }
    return node._replace(**fields)

  return jax.tree.map(changed, state, is_leaf=lambda x: bool(_scheduled(x)))
