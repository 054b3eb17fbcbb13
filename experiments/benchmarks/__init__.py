"""Benchmarks: each measures a part as a ratio to a reference in the same run.

`diloco bench PART` prints what `run(...) -> dict` of a module found. Others,
which take longer or need more, are started by themselves.
"""

import importlib
from typing import Any


def run(part: str) -> dict[str, Any]:
  """Runs one benchmark at its published size, by its module's name."""
  module = importlib.import_module(f"experiments.benchmarks.{part}")
  return module.run()
