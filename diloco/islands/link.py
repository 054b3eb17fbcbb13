"""A training loop of one's own, and what ties it to a run.

Such as::

    def train(island: diloco.Link) -> None:
      params, state = island.begin(optimizer.init)
      for batch in my_data(island.index, start=island.step):
        params, state, loss = my_step(params, state, batch)
        params, state = island.exchange(params, state, {"loss": loss})

Named in `config.loop`, it takes the place of the task's steps on every island,
and of nothing else: what goes on between two steps, publication, adoption,
saving, evaluation, recovery, is what goes on between the task's own.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from diloco import config as config_lib
from diloco import errors, own_file
from diloco.islands import inner_step, own, trainer
from diloco.islands import island as island_lib
from diloco.snapshots import operations
from diloco.tasks import task as task_lib

# Scalars that the metric log has beside the loss; others are the loop's own.
_KNOWN = ("loss", "grad_norm", "update_norm", "learning_rate")


class Stopped(BaseException):
  """Ends a loop from within `exchange`, or `begin`; `finally` still runs.

  It is no `Exception`, so that a loop which handles those ends all the same.
  """


class Link:
  """One island of a run, for the loop that does its steps.

  A loop calls `begin` once and `exchange` after every step, from one thread,
  and goes on for ever: `exchange` does not return once the run wants no more.

  Attributes:
    index: this island's number, from 0.
    num_islands: islands of the run, M.
    num_steps: inner steps the run expects of this island, for schedules.
    seed: the run's.
    task: the run's task.
    mesh: this island's devices.
  """

  def __init__(
    self,
    island: island_lib.Island,
    script: operations.Script[None],
    config: config_lib.RunConfig,
    index: int,
  ):
    """Ties the loop to an island of this number, and its life to its steps."""
    learner = island.learner
    assert isinstance(learner, own.Own)
    self.index = index
    self.num_islands = config.fleet.islands
    self.num_steps = trainer.schedule_steps(config, learner.task, index)
    self.seed = config.seed
    self.task: Any = learner.task
    self.mesh: jax.sharding.Mesh = learner.placement.mesh
    self._island = island
    self._learner = learner
    self._script = script
    self._name = config.loop
    self._begun = False
    self._ended: BaseException | None = None  # what nobody may go on after
    self._compiling = contextlib.ExitStack()

  @property
  def step(self) -> int:
    """Inner steps done, over all lives: data and schedules go on from here."""
    return self._learner.step

  def put(self, batch: task_lib.Batch) -> Mapping[str, jax.Array]:
    """Returns a batch on the mesh, divided as the task says."""
    return self._learner.placement.put_batch(batch)

  def begin(
    self, init: Callable[[Any], Any] = lambda params: ()
  ) -> tuple[Any, Any]:
    """Joins the run: the first life of an island, or one that goes on.

    What it returns may be donated to the first step, which may take
    `config.controller.start_secs`, for it is compiled.

    Args:
      init: gives the loop's own state before the first step, from the initial
        parameters: a pytree of arrays, such as an optimizer's state. It is
        saved with the island; its shapes and dtypes must not change.

    Returns:
      Parameters, a pytree like that of the task's `init`, as the run begins or
      goes on with. And the state: this one, or of an island that has died what
      was saved last, or if that was long ago the state of another island. It
      may be some steps older than `step`, by which schedules must go then.

    Raises:
      TypeError, ValueError: it was called before, or the state cannot be saved.
      Stopped: the run wants no step of this island.
    """
    if self._begun:
      raise ValueError("begin was called twice")
    self._begun = True
    self._learner.begin(init(self._learner.pair[0]))
    with self._ours():
      self._go_on(None)
    limit_secs = self._island.times.start_secs
    self._compiling.enter_context(self._island.progress.may_take(limit_secs))
    return self._learner.pair

  def exchange(
    self, params: Any, state: Any, metrics: Mapping[str, Any]
  ) -> tuple[Any, Any]:
    """Ends a step: publishes, adopts and saves what is due.

    It waits for no other island unless the run's configuration says so; but
    evaluations and other programs of the controller are done within it.

    Args:
      params: what the step made of those it was given; the same pytree.
      state: the same of the loop's own state.
      metrics: scalars for the metric log, on devices or not, with the training
        `loss` in nats. They are read after the next step has been dispatched.

    Returns:
      Parameters and state to go on with. Both may be donated to the next step.

    Raises:
      ValueError: shapes, dtypes or names are not what they were, or the very
        first step of the run gave parameters that are not finite.
      Stopped: the run wants no more steps.
    """
    if not self._begun:
      raise ValueError("exchange was called before begin")
    if self._ended is None:
      told = _metrics(metrics)
      self._learner.take(params, state)
    with self._ours():
      self._compiling.close()
      self._go_on(told)
    return self._learner.pair

  def run(self, loop: Callable[["Link"], None]) -> None:
    """Lets a loop do the steps until the run wants no more.

    Raises:
      OwnCodeError: the loop has raised something, or returned.
    """
    why, cause = "it returned, and the run goes on", None
    try:
      with jax.default_device(self.mesh.devices.flat[0]):
        loop(self)
    except Stopped:
      pass
    except (Exception, SystemExit) as error:
      why, cause = f"it raised {errors.with_place(error)}", error
    if self._ended is None:
      raise errors.OwnCodeError(
        f"config.loop = {self._name!r}, after step {self.step}",
        why,
        "correct it; it is to step until exchange ends it",
      ) from cause
    if not isinstance(self._ended, Stopped):
      raise self._ended

  def _go_on(self, metrics: Any) -> None:
    try:
      self._island.go_on(self._script, metrics)
    except StopIteration:
      raise Stopped from None

  @contextlib.contextmanager
  def _ours(self) -> Iterator[None]:
    """What is raised here is none of the loop's, and ends it for good."""
    if self._ended is not None:
      raise self._ended
    try:
      yield
    except BaseException as error:
      self._ended = error
      raise


def load(place: str) -> Callable[[Link], None]:
  """Loads the function that `config.loop` names; see `own_file.load`.

  Raises:
    UserError: there is none, or it does not take one argument.
  """
  what = f"config.loop = {place!r}"
  loop = own_file.load(what, place)
  errors.require(
    not inspect.isgeneratorfunction(loop)
    and not inspect.iscoroutinefunction(loop),
    what,
    "its steps begin only when somebody goes through them or awaits them",
    "write a function without yield and async, whose steps end in exchange",
  )
  try:
    inspect.signature(loop).bind(None)
  except (TypeError, ValueError) as error:
    raise errors.UserError(
      what,
      f"it cannot be called with the island alone ({error})",
      "give it one argument, a diloco.Link",
    ) from error
  return loop


def _metrics(given: Mapping[str, Any]) -> dict[str, Any]:
  """As `step_log` has them."""
  if not isinstance(given, Mapping) or "loss" not in given:
    raise ValueError("exchange wants metrics as a dict with the step's 'loss'")
  for name, value in given.items():
    if np.shape(value):
      raise ValueError(
        f"the metric {name!r} has shape {np.shape(value)}, and must be a scalar"
      )
    if not inner_step.is_real(value):
      raise ValueError(
        f"the metric {name!r} is a {type(value).__name__}, and must be a number"
      )
  known = {name: given[name] for name in _KNOWN if name in given}
  rest = {name: given[name] for name in given if name not in _KNOWN}
  return known | {"task": rest}
