"""Cost of a token in virtual time, over the bare loop of its task.

Question: what do exchange, merges, store, tapes and the schedule of events add
to the inner steps of eight islands in one thread?

Expected, written before measuring: with P = H = 24 an island sends and adopts a
24th of 0.3 M parameters in each step, 50 kB each way, and a fragment is merged
each step: copies and sums of some 100 kB, about 1 ms of dispatch beside a step
of 30 ms, so 1.03 to 1.05.

Both are measured by the processor time of one process, which bears other work
on the machine; steps of the bare loop and of the study alternate in blocks.

Command: `diloco bench study`; cost: two minutes of processor time, 0.6 GB.
"""

import os
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np

from diloco import config as config_lib
from diloco.fragments import partition
from diloco.islands import compilation, inner_step
from diloco.tasks import registry
from diloco.virtual import fleet
from experiments.benchmarks import island as island_bench


def run() -> dict[str, Any]:
  """Measures in a process with the environment islands have."""
  return island_bench.as_island(measure)


def make_config(islands: int, steps: int, model: dict[str, Any]) -> Any:
  """A study of so many islands that do so many steps each."""
  tokens = model["seq_len"] * model["batch_size"]
  return config_lib.from_mapping(
    {
      "engine": "virtual",
      "total_tokens": islands * steps * tokens,
      "task": {"name": "language_model", "options": model},
      "fleet": {
        "slices": [{"kind": "cpu"}] * islands,
        "pace_step_secs": 0.1,
        "jitter": 0.1,
      },
      "sync": {"num_fragments": 24, "every": 24},
      "programs": {"checkpoint_every_steps": 0, "final_eval_batches": 1},
    }
  )


def measure(
  *,
  islands: int = 8,
  blocks: int = 6,
  block_steps: int = 24,
  d_model: int = 96,
  num_layers: int = 3,
  batch_size: int = 16,
) -> dict[str, Any]:
  """Measures `cost_ratio`, the median over blocks.

  Args:
    islands: M.
    blocks: pairs that are measured.
    block_steps: steps of every island in each.
    d_model: width; with the others 0.3 M parameters by default.
    num_layers: depth.
    batch_size: rows of 128 bytes.

  Returns:
    The ratio with its spread, and what it was measured on.
  """
  model = {
    "d_model": d_model,
    "num_layers": num_layers,
    "num_heads": 4,
    "d_ff": 3 * d_model,
    "seq_len": 128,
    "batch_size": batch_size,
  }
  config = make_config(islands, (blocks + 2) * block_steps, model)
  task = registry.make_task(config.task.name, config.task.options)
  tree = inner_step.ParamTree(task, config.seed)
  plan = partition.partition(tree.tensors(), config.sync.num_fragments)
  with tempfile.TemporaryDirectory(prefix="diloco-bench-") as directory:
    compilation.use_cache(pathlib.Path(directory) / "cache")
    made = fleet.Fleet(config, pathlib.Path(directory), task, plan, None)
    made.begin()
    bare = _Bare(made)
    step_tokens = islands * block_steps * task.tokens_per_batch
    secs = []
    for block in range(blocks + 1):
      until = (block + 1) * step_tokens
      secs.append(
        (
          _cpu_secs(lambda until=until: made.train_until(until)),
          _cpu_secs(lambda: bare.steps(islands * block_steps)),
        )
      )
    made.end()
  ratios = sorted(study / alone for study, alone in secs[1:])
  study, alone = np.median(np.array(secs[1:]), axis=0)
  return {
    "cost_ratio": float(np.median(ratios)),
    "cost_ratio_spread": [ratios[0], ratios[-1]],
    "step_cpu_secs": study / islands / block_steps,
    "bare_step_cpu_secs": alone / islands / block_steps,
    "tokens_per_cpu_sec": step_tokens / study,
    "parameters": plan.num_params,
    "islands": islands,
    "tokens_per_step": task.tokens_per_batch,
    "blocks": blocks,
    "cores": len(os.sched_getaffinity(0)),
  }


class _Bare:
  """The loop of a task without anything around it."""

  def __init__(self, made: fleet.Fleet):
    self._trainer = made.like((1,))
    self._state = jax.tree.map(jax.numpy.copy, self._trainer.state)

  def steps(self, count: int) -> None:
    self._state = self._trainer.bare_loop(count, self._state)


def _cpu_secs(do: Any) -> float:
  started = time.process_time()
  do()
  return time.process_time() - started
