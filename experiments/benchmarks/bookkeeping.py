"""What tape, metric log and checkpoints cost an island, as a share of its work.

And what costs whoever shows or copies the run while it is on: the live view on
a terminal with its file for a scraper, drawn as the controller does, and event
files for TensorBoard as of `diloco metrics --follow`.

Expected cost, written before measuring: about six lines a step at 30 us each,
0.2 ms of a step of a second of processor time; a checkpoint of 5 M parameters
(16 bytes each with moments and unsent progress) 0.4 s every 200 steps, 2 ms a
step. Together 0.2 %. The ledger is computed by readers and costs islands
nothing.

Shares of processor time, not of wall time: they say the same on a busy machine.
"""

import io
import os
import pathlib
import tempfile
import threading
import time
from typing import Any

import numpy as np

from diloco.report import live
from diloco.tape import reader, recorder
from diloco.tasks import registry
from diloco.workbench import metrics, opened
from experiments.benchmarks import island as island_bench

_MODEL = {
  "d_model": 256,
  "num_layers": 9,
  "num_heads": 4,
  "seq_len": 256,
  "batch_size": 8,
}
_SYNC = {"num_fragments": 24, "every": 24, "overlap_steps": 2}
_TICK_SECS = 0.1  # as the controller's turns
_SCRAPE_SECS = 15.0
_FOLLOW_SECS = 5.0  # of `diloco metrics --follow`


def run() -> dict[str, Any]:
  """Measures in a process with the environment islands have."""
  return island_bench.as_island(measure)


class _Terminal(io.StringIO):
  """What the live view draws on."""

  def isatty(self) -> bool:
    """As a terminal says."""
    return True


class _Watching:
  """Draws a run and converts its metrics while it goes on; counts CPU time."""

  def __init__(self, run_dir: pathlib.Path):
    """Starts, in a thread of its own; the controller has one as well."""
    self.view_secs = self.writer_secs = 0.0
    self._run_dir = run_dir
    self._view = live.LiveView(run_dir, _Terminal(), exposed_secs=_SCRAPE_SECS)
    self._follower = reader.Follower(run_dir)
    self._points = metrics.Points()
    self._writer = metrics._tensorboard(run_dir / "events", opened.Run(run_dir))
    self._due = 0.0
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._run)
    self._thread.start()

  def _run(self) -> None:
    while not self._ended.wait(_TICK_SECS):
      began = time.thread_time()
      self._view.tick()
      drawn = time.thread_time()
      if time.monotonic() >= self._due:
        self._due = time.monotonic() + _FOLLOW_SECS
        for point in self._points.of(self._follower.news()):
          self._writer.write(point)
      self.view_secs += drawn - began
      self.writer_secs += time.thread_time() - drawn

  def close(self) -> None:
    """Ends the thread."""
    self._ended.set()
    self._thread.join()
    self._view.close()
    self._writer.close()


class _TimedLines:
  """Counts lines and the processor time of the threads that write them."""

  def __init__(self) -> None:
    self.lines, self.secs = 0, 0.0
    self._write = recorder._LineWriter.write

  def install(self) -> None:
    """Puts itself in front of every tape and metric log of this process."""
    timed = self

    def write(writer: Any, fields: dict[str, Any]) -> None:
      started = time.thread_time()
      timed._write(writer, fields)
      timed.secs += time.thread_time() - started
      timed.lines += 1

    recorder._LineWriter.write = write  # type: ignore[assignment,method-assign]

  def remove(self) -> None:
    """Leaves the recorder as it was."""
    recorder._LineWriter.write = self._write  # type: ignore[method-assign]


def measure(
  *,
  model: dict[str, Any] | None = None,
  steps: int = 96,
  checkpoints: int = 5,
) -> dict[str, Any]:
  """Measures `bookkeeping_share` at the default intervals.

  Args:
    model: options of the language model; about 5 M parameters by default.
    steps: inner steps to measure.
    checkpoints: to take, one after another, a step between each.

  Returns:
    The share and its parts, in processor seconds.
  """
  config = island_bench.make_config(model or _MODEL, _SYNC)
  lines = _TimedLines()
  with tempfile.TemporaryDirectory(prefix="diloco-bench-") as directory:
    run_dir = pathlib.Path(directory)
    task = registry.make_task(config.task.name, config.task.options)
    island = island_bench.joined(run_dir, config, task)
    with island_bench.running_syncer(run_dir):
      island.train(48)  # every fragment has been around twice
      watching = _Watching(run_dir)
      lines.install()
      try:
        started, clock = time.process_time(), time.monotonic()
        island.train(steps)
        step_cpu = (time.process_time() - started) / steps
        step_secs = (time.monotonic() - clock) / steps
      finally:
        lines.remove()
        watching.close()
      # A view is drawn so often a second, however many steps are done in it.
      cores = len(os.sched_getaffinity(0))
      view_share = watching.view_secs / (steps * step_secs * cores)
      writer_cpu = watching.writer_secs / steps
      step_cpu -= writer_cpu + watching.view_secs / steps
      island.drain(30.0)
      saves = []
      for _ in range(checkpoints):
        island.train(1)  # a step is saved once
        started = time.process_time()
        island.checkpoint(wait=True)
        saves.append(time.process_time() - started)
      island.close("measured")
    num_params = island.learner.plan.num_params
  programs = config.programs
  save_cpu = float(np.median(saves))
  per_step = (
    lines.secs / steps,
    save_cpu / programs.checkpoint_every_steps,
    save_cpu * step_secs / programs.cut_every_secs,
  )
  return {
    "bookkeeping_share": sum(per_step) / step_cpu,
    "shown_share": (per_step[0] + writer_cpu) / step_cpu + view_share,
    "view_share": view_share,
    "writer_cpu_secs_per_step": writer_cpu,
    "step_secs": step_secs,
    "step_cpu_secs": step_cpu,
    "line_cpu_secs_per_step": per_step[0],
    "lines_per_step": lines.lines / steps,
    "checkpoint_cpu_secs": save_cpu,
    "checkpoint_cpu_secs_spread": [min(saves), max(saves)],
    "checkpoint_cpu_secs_per_step": per_step[1],
    "cut_cpu_secs_per_step": per_step[2],
    "checkpoint_every_steps": programs.checkpoint_every_steps,
    "cut_every_secs": programs.cut_every_secs,
    "parameters": num_params,
    "steps": steps,
    "cores": cores,
  }
