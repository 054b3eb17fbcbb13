"""Slices of an elastic job: which are there, when they die and come back.

Slice m lives and dies as island m of a decoupled run with the same seed does,
so two methods may be compared under the same deaths.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from diloco import config as config_lib
from diloco.virtual import scheduler


class Slices:
  """All slices of a job.

  Attributes:
    present: numbers of those that are there, in order.
  """

  def __init__(
    self,
    config: config_lib.RunConfig,
    time: scheduler.Scheduler,
    changed: Callable[[], None],
  ):
    """All are there; `changed` is called when one has gone or come back."""
    self.present = tuple(range(config.replicas))
    self._virtual = config.virtual
    self._time = time
    self._changed = changed
    self._random = [
      np.random.default_rng([config.seed, 1, m]) for m in self.present
    ]
    self._lives = [0] * config.replicas
    for number in self.present:
      self._begin(number)

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
      secs, repair_secs = draw(self._virtual, self._random[number], 1)
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


def draw(
  virtual: config_lib.VirtualConfig, rng: np.random.Generator, slices: int
) -> tuple[float, float]:
  """Seconds until the next death of any of some slices, and of its repair."""
  secs = rng.exponential(virtual.mtbi_secs / slices)
  return float(secs), float(rng.exponential(virtual.repair_secs))
