"""Many schedules, on several processes, and what they added up to."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

from diloco import workers
from diloco.verification import rare, schedules, world

_CHUNK = 200  # schedules a process takes at a time
_KEPT = 20  # violations told in full
_LOOK_SECS = 0.5  # between two looks for an interrupt


@dataclasses.dataclass
class Tally:
  """What a set of schedules added up to."""

  schedules: int = 0  # how many were played
  rounds: int = 0  # versions committed
  events: int = 0  # resumptions of threads
  virtual_secs: float = 0.0  # of simulated time
  cpu_secs: float = 0.0  # of real time on one core
  num_violations: int = 0  # of all
  # (seed, reason), the first of them.
  violations: list[tuple[int, str]] = dataclasses.field(default_factory=list)
  # Faults that happened, by kind and by operation.
  struck: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  # Rare states.
  seen: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  # In how many schedules there was one.
  reached: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )

  def add(self, seed: int, outcome: world.Played) -> None:
    """Takes in one schedule."""
    self.schedules += 1
    self.rounds += outcome.rounds
    self.events += outcome.events
    self.virtual_secs += outcome.secs
    self.struck.update(outcome.struck)
    self.seen.update(outcome.seen)
    self.reached.update(name for name, n in outcome.seen.items() if n)
    if outcome.violation:
      self.num_violations += 1
      self.violations = [*self.violations, (seed, outcome.violation)][:_KEPT]

  def merge(self, other: Tally) -> None:
    """Takes in what another process did."""
    for name, more in vars(other).items():
      if isinstance(more, collections.Counter):
        getattr(self, name).update(more)
      elif name != "violations":
        setattr(self, name, getattr(self, name) + more)
    found = sorted([*self.violations, *other.violations])
    self.violations = found[:_KEPT]

  @property
  def unreached(self) -> list[str]:
    """Rare states it should have come to, being so long, and did not."""
    return rare.unreached(self.reached) if self.schedules >= rare.ENOUGH else []

  def to_dict(self) -> dict[str, Any]:
    """For `--json`."""
    faults = {k: n for k, n in sorted(self.struck.items()) if "@" not in k}
    points = {k: n for k, n in sorted(self.struck.items()) if "@" in k}
    return {
      "schedules": self.schedules,
      "violations": self.num_violations,
      "failures": [
        {"seed": seed, "reason": reason} for seed, reason in self.violations
      ],
      "schedules_per_sec_per_core": self.schedules / max(self.cpu_secs, 1e-9),
      "rounds_per_schedule": self.rounds / max(self.schedules, 1),
      "events_per_schedule": self.events / max(self.schedules, 1),
      "virtual_secs": self.virtual_secs,
      "cpu_secs": self.cpu_secs,
      "faults": faults,
      "faults_by_operation": points,
      "states": dict(sorted(self.seen.items())),
      "reached": dict(sorted(self.reached.items())),
      "unreached": self.unreached,
    }


def play(first: int, count: int) -> Tally:
  """Plays the schedules of consecutive seeds in this process."""
  tally = Tally()
  started = time.process_time()
  # Production code warns of what is provoked here a thousand times.
  loggers = [
    logging.getLogger(f"diloco.{name}")
    for name in ("controller", "islands", "syncer")
  ]
  levels = [logger.level for logger in loggers]
  for logger in loggers:
    logger.setLevel(logging.ERROR)
  collecting = gc.isenabled()
  # Worlds are freed by their last reference; looking for cycles costs a third.
  gc.disable()
  try:
    for seed in range(first, first + count):
      tally.add(seed, world.run(schedules.draw(seed)))
  finally:
    if collecting:
      gc.enable()
    for logger, level in zip(loggers, levels, strict=True):
      logger.setLevel(level)
  tally.cpu_secs = time.process_time() - started
  return tally


def _end_with_parent() -> None:
  """Ends this process with its parent, however that ends.

  A pool's processes keep each other's pipes open, so none of them would see
  the end of its own.
  """
  parent = multiprocessing.parent_process()
  assert parent is not None

  def watch() -> None:
    parent.join()
    os._exit(1)

  threading.Thread(target=watch, name="parent", daemon=True).start()


def run(
  first: int,
  count: int,
  jobs: int,
  progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
  """Plays the schedules of consecutive seeds."""
  total = Tally()
  chunks = [
    (first + start, min(_CHUNK, count - start))
    for start in range(0, count, _CHUNK)
  ]
  if jobs <= 1:
    for start, size in chunks:
      total.merge(play(start, size))
      progress(total)
    return total
  # Not by fork: who calls this may have threads, of JAX for one.
  spawn = multiprocessing.get_context("spawn")
  others = set(multiprocessing.active_children())
  todo = iter(chunks)
  with _noting_interrupts() as interrupts:
    pool = futures.ProcessPoolExecutor(jobs, spawn, _end_with_parent)
    try:
      under_way: set[futures.Future[Tally]] = set()
      while True:
        more = itertools.islice(todo, 2 * jobs - len(under_way))
        with workers.deaf_children():
          under_way |= {pool.submit(play, *chunk) for chunk in more}
        if not under_way:
          return total
        done, under_way = futures.wait(
          under_way, _LOOK_SECS, futures.FIRST_COMPLETED
        )
        for one in done:
          total.merge(one.result())
          progress(total)
        if interrupts:
          for process in set(multiprocessing.active_children()) - others:
            process.kill()
          raise KeyboardInterrupt
    finally:
      pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
  """Collects interrupts, which would leave locks of a pool held for ever."""
  noted: list[int] = []
  if (
    threading.current_thread() is not threading.main_thread()
    or signal.getsignal(signal.SIGINT) is signal.SIG_IGN
  ):
    yield noted
    return
  before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
  try:
    yield noted
  finally:
    signal.signal(signal.SIGINT, before)
