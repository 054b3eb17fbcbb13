"""Benchmarks: each measures a part as a ratio to a reference in the same run.

Every module has `run(...) -> dict` and prints its result as one JSON object
when started by itself.
"""

import importlib
from typing import Any


def run(part: str) -> dict[str, Any]:
  """Runs one benchmark at its published size, by its module's name."""
  module = importlib.import_module(f"experiments.benchmarks.{part}")
  return module.run()
