"""Step rate of an island that syncs, over the bare jitted loop.

Expected cost, written before measuring: with P = H = 24 each step copies,
encodes and writes one 24th of the parameters (0.8 MB of 4.8 M), the syncer
merges as much and the island reads it back, all in the background: about
20 ms of processor time a step beside a second of matrix work on two cores, so
a ratio of about 0.99.

Both loops run the same compiled step on the same cores in turn, block by
block, so that a drift of the machine's speed cancels. The syncer is a process
of its own and runs all the time.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

import jax
import numpy as np

from diloco import config as config_lib
from diloco import process
from diloco.islands import island as island_lib
from diloco.islands import trainer as trainer_lib
from diloco.tape import events, reader
from diloco.tasks import registry
from diloco.tasks import task as task_lib

T = TypeVar("T")

_SYNC = {"num_fragments": 24, "every": 24, "overlap_steps": 2}


def make_config(model: dict[str, Any], sync: dict[str, Any]):
  """The benchmark's run: one island, its syncer, real text."""
  return config_lib.from_mapping(
    {
      "name": "bench_island",
      "total_tokens": 10_000_000,
      "task": {"name": "language_model", "options": model},
      "sync": sync,
      "outer": {"learning_rate": 1.0, "momentum": 0.0},
      "controller": {"orphan_secs": 3600.0},  # there is no controller here
    }
  )


def run() -> dict[str, Any]:
  """Measures in a process with the environment islands have."""
  return as_island(measure)


def as_island(work: Callable[..., T], *args: Any) -> T:
  """Calls a function in a process with the environment islands have."""
  spawn = multiprocessing.get_context("spawn")
  with (
    mock.patch.dict(os.environ, {**process.MALLOC_ENV, **os.environ}),
    concurrent.futures.ProcessPoolExecutor(1, spawn) as pool,
  ):
    return pool.submit(work, *args).result()


def measure(
  *,
  d_model: int = 256,
  num_layers: int = 9,
  seq_len: int = 256,
  batch_size: int = 8,
  block_steps: int = 8,
  trials: int = 15,
) -> dict[str, Any]:
  """Measures `step_rate_ratio`, the median over `trials` pairs of blocks.

  Args:
    d_model: width; with `num_layers` about 5 M parameters by default.
    num_layers: depth.
    seq_len: tokens a row.
    batch_size: rows a step.
    block_steps: steps of each loop before the other has its turn.
    trials: pairs of blocks.

  Returns:
    The ratio with its spread, and what it was measured on.
  """
  model = dict(
    d_model=d_model,
    num_layers=num_layers,
    num_heads=4,
    seq_len=seq_len,
    batch_size=batch_size,
  )
  config = make_config(model, _SYNC)
  with tempfile.TemporaryDirectory(prefix="diloco-bench-") as directory:
    run_dir = pathlib.Path(directory)
    task = registry.make_task(config.task.name, config.task.options)
    island = joined(run_dir, config, task)
    num_params = island.learner.plan.num_params
    with running_syncer(run_dir):
      rates = _measure(island, block_steps, trials)
      island.drain(30.0)
      island.close("measured")
    record = reader.read(run_dir)
  merges = sum(e["event"] == events.MERGED for e in record.events)
  return _summary(rates, block_steps) | {
    "parameters": num_params,
    "tokens_per_step": task.tokens_per_batch,
    "fragments": _SYNC["num_fragments"],
    "sync_every": _SYNC["every"],
    "merges": merges,
    "cores": len(os.sched_getaffinity(0)),
  }


def joined(
  run_dir: pathlib.Path, config: config_lib.RunConfig, task: task_lib.Task
) -> island_lib.Island:
  """The one island of a new run, ready for its first step."""
  process.write_config(config, run_dir)
  url, hardware = process.store_url(run_dir), config.fleet.slices[0]
  spec = island_lib.Spec(run_dir, url, 0, 1, hardware)
  island = island_lib.Island(spec, config, task, jax.devices())
  island.perform(island.joining())
  return island


def _measure(
  island: island_lib.Island, block_steps: int, trials: int
) -> list[tuple[float, float]]:
  """Seconds of a (syncing, bare) block, once per trial."""
  trainer = island.learner
  assert isinstance(trainer, trainer_lib.Trainer)
  state = jax.tree.map(jax.numpy.copy, trainer.state)

  def bare(num_steps: int) -> None:
    nonlocal state
    state = trainer.bare_loop(num_steps, state)

  island.train(2 * block_steps)  # every fragment has been around once
  bare(block_steps)
  rates = []
  for trial in range(trials):
    blocks = [lambda: island.train(block_steps), lambda: bare(block_steps)]
    secs = [0.0, 0.0]
    for index in (0, 1) if trial % 2 else (1, 0):
      started = time.perf_counter()
      blocks[index]()
      secs[index] = time.perf_counter() - started
    rates.append((secs[0], secs[1]))
  return rates


def _summary(
  rates: list[tuple[float, float]], block_steps: int
) -> dict[str, Any]:
  ratios = sorted(bare / syncing for syncing, bare in rates)
  syncing, bare = np.median(np.array(rates), axis=0) / block_steps
  return {
    "step_rate_ratio": float(np.median(ratios)),
    "step_rate_ratio_spread": [ratios[0], ratios[-1]],
    "step_secs": float(syncing),
    "bare_step_secs": float(bare),
    "trials": len(ratios),
    "block_steps": block_steps,
  }


@contextlib.contextmanager
def running_syncer(run_dir: pathlib.Path) -> Iterator[None]:
  """A syncer process beside the island that is measured."""
  args = ["--run_dir", str(run_dir), "--incarnation", "1"]
  with (run_dir / "syncer.log").open("wb") as log:
    syncer = subprocess.Popen(
      [sys.executable, "-m", "diloco.syncer.main", *args], stderr=log
    )
  try:
    yield
    if syncer.poll() is not None:
      raise RuntimeError((run_dir / "syncer.log").read_text())
  finally:
    syncer.kill()
    syncer.wait()
