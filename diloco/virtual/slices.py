"""Slices of islands: which are there, when they die and come back.

A slice of a data-parallel job lives and dies as the island of the same number
of a decoupled run with the same seed does, whatever became of the job: so
methods may be compared under the same deaths.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from diloco import config as config_lib
from diloco.virtual import scheduler


class Slices:
  """All slices of an island: one, or as many as a job has replicas.

  Attributes:
    present: which of them are there, from 0 on, in order.
  """

  def __init__(
    self,
    config: config_lib.RunConfig,
    island: int,
    time: scheduler.Scheduler,
    changed: Callable[[], None],
  ):
    """All are there; `changed` is called when one has gone or come back."""
    self._all = self.present = tuple(range(config.replicas))
    self._virtual = config.virtual
    self._time = time
    self._changed = changed
    self._random = [
      np.random.default_rng([config.seed, 1, island + m]) for m in self._all
    ]
    self._lives = [0] * config.replicas
    for number in self._all:
      self._begin(number)

  @property
  def complete(self) -> bool:
    """Whether all are there."""
    return self.present == self._all

  def lose(self, number: int, repair_secs: float) -> None:
    """One dies, and comes back after that time; if it is there."""
    if number in self.present:
      self.present = tuple(m for m in self.present if m != number)
      self._time.after(repair_secs, functools.partial(self._return, number))
      self._changed()

  def _return(self, number: int) -> None:
    self.present = tuple(sorted((*self.present, number)))
    self._begin(number)
    self._changed()

  def _begin(self, number: int) -> None:
    """Draws when its life ends, unless something else ends it before."""
    self._lives[number] += 1
    life = self._lives[number]
    if self._virtual.mtbi_secs:
      rng = self._random[number]
      secs = float(rng.exponential(self._virtual.mtbi_secs))
      repair_secs = float(rng.exponential(self._virtual.repair_secs))
      self._time.after(
        secs,
        lambda: (
          self.lose(number, repair_secs)
          if life == self._lives[number]
          else None
        ),
      )


def trained(lives: Sequence[tuple[int, int]], step: int) -> int:
  """Tokens of the first steps of a job, by the lives that it had.

  Args:
    lives: of each the step that it began after, and the tokens of its steps.
      What one trained after the step that the next began from is lost.
    step: so many steps.
  """
  tokens = 0
  for first, tokens_per_step in reversed(lives):
    if first < step:
      tokens += (step - first) * tokens_per_step
      step = first
  return tokens
