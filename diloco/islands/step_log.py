"""Step times and metrics of an island.

Metrics of a step are read while the next one runs, so that the host never
holds the device up.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from diloco import config as config_lib
from diloco.tape import recorder

_SPEED_WEIGHT = 0.1  # of the newest step in the moving average


@dataclasses.dataclass(frozen=True)
class Pace:
  """How long an island's steps take, where that is emulated."""

  median_secs: Sequence[float]  # of a step on each slice; 0 if not emulated
  jitter: float  # standard deviation of the logarithm of a slice's time
  seeds: Sequence[Sequence[int]]  # of it; a step takes as long in every life
  reduce_secs: float = 0.0  # what slices take to add their gradients

  @classmethod
  def of(
    cls,
    config: config_lib.RunConfig,
    island: int,
    hardware: config_lib.SliceConfig,
    num_params: int,
    present: Sequence[int] = (),
  ) -> "Pace":
    """That of an island; of a job on all slices, or those that are `present`.

    In virtual time such a job adds its gradients, `num_params` of float32, by
    a ring over the links that islands would have to the store.
    """
    slices, reduce_secs = [(island, hardware)], 0.0
    if config.replicas > 1:
      found = present or range(config.replicas)
      slices = [(m, config.fleet.slices[m]) for m in found]
    if len(slices) > 1:
      share = 2 * (len(slices) - 1) / len(slices)
      reduce_secs = 2 * config.virtual.latency_secs
      if config.virtual.bytes_per_sec:
        reduce_secs += share * 4 * num_params / config.virtual.bytes_per_sec
    pace_secs = config.fleet.pace_step_secs
    return cls(
      [pace_secs / s.relative_speed for _, s in slices],
      config.fleet.jitter,
      [(config.seed, m) for m, _ in slices],
      reduce_secs,
    )

  @property
  def step_secs(self) -> float:
    """Time of a step of which each slice's is its median."""
    return max(self.median_secs) + self.reduce_secs

  def next_secs(self, step: int) -> float:
    """Time that a step takes: the slowest slice's."""
    if not self.jitter:
      return self.step_secs
    drawn = [
      np.random.default_rng([*seed, step]).standard_normal()
      for seed in self.seeds
    ]
    secs = np.array(self.median_secs) * np.exp(self.jitter * np.array(drawn))
    return float(secs.max()) + self.reduce_secs


class StepLog:
  """Writes one metric line per finished step and keeps the pace."""

  def __init__(
    self,
    log: recorder.MetricLog,
    incarnation: int,
    tokens_per_step: int,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._clock = clock
    self._log = log
    self._incarnation = incarnation
    self._tokens_per_step = tokens_per_step
    self._pending: tuple[int, Mapping[str, Any], float] | None = None
    self._finished_secs: float | None = None
    self._waited_secs = 0.0  # since the last step
    self.step_secs = 0.0  # moving average between two steps; 0: unknown
    self.loss = float("nan")

  def dispatched(
    self, step: int, metrics: Mapping[str, Any], at_secs: float
  ) -> None:
    """Takes over a step's metrics and finishes the one before it."""
    self.finish()
    self._pending = step, metrics, at_secs

  def finish(self) -> None:
    """Waits for the last dispatched step and logs it."""
    pending, self._pending = self._pending, None
    if pending is None:
      return
    step, told, started = pending
    # All in one transfer, which waits for the step.
    metrics = jax.tree.map(_short, jax.device_get(dict(told)))
    now = self._clock()
    gap_secs = None
    if self._finished_secs is not None:
      gap_secs = now - self._finished_secs
      self._observe(gap_secs)
      started = max(started, self._finished_secs)
    self._finished_secs = now
    self.loss = metrics["loss"]
    if self._waited_secs:
      metrics["waited_secs"] = self._waited_secs
      self._waited_secs = 0.0
    self._log.record(
      step=step,
      tokens=self._tokens_per_step,
      step_secs=now - started,
      gap_secs=gap_secs,
      incarnation=self._incarnation,
      **metrics,
    )

  def pause(self) -> None:
    """Something else than steps comes next: no gap is counted over it."""
    self.finish()
    self._finished_secs = None

  def waited(self, secs: float) -> None:
    """No step could be done for so long, because an answer was missing."""
    self._waited_secs += secs

  def _observe(self, gap_secs: float) -> None:
    if not self.step_secs:
      self.step_secs = gap_secs
    self.step_secs += _SPEED_WEIGHT * (gap_secs - self.step_secs)

  def close(self) -> None:
    """Finishes the last step and closes the log."""
    self.finish()
    self._log.close()


def _short(value: Any) -> float:
  """A scalar as the log has it: it is read by people and by pictures."""
  return float(f"{float(value):.7g}")
