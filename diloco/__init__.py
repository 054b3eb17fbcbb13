"""Decoupled DiLoCo: asynchronous, fault-isolated training islands in JAX.

Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training",
arXiv 2604.21428.

    import diloco

    run = diloco.train("experiments/configs/quickstart.py:smoke", "runs/mine")
    params = run.params()
    run = diloco.start(run.config, "runs/beside")  # and go on in this cell
    print(diloco.simulate(chips=1_200_000, islands=8, mtbi_years=1))

What is named here is loaded once it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from diloco.errors import FailedRunError, UserError
  from diloco.interface import plan, simulate, train
  from diloco.islands.link import Link
  from diloco.tasks.model import Model
  from diloco.workbench.opened import Run
  from diloco.workbench.session import Session, start

__version__ = "0.2.0"
__all__ = [
  "FailedRunError",
  "Link",
  "Model",
  "Run",
  "Session",
  "UserError",
  "plan",
  "simulate",
  "start",
  "train",
]

_HOMES = {
  "FailedRunError": "diloco.errors",
  "Link": "diloco.islands.link",
  "Model": "diloco.tasks.model",
  "Run": "diloco.workbench.opened",
  "Session": "diloco.workbench.session",
  "UserError": "diloco.errors",
  "plan": "diloco.interface",
  "simulate": "diloco.interface",
  "start": "diloco.workbench.session",
  "train": "diloco.interface",
}


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f"module 'diloco' has no attribute {name!r}")
  value = getattr(importlib.import_module(_HOMES[name]), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *_HOMES})
