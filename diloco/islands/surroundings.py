"""What a process runs under that can change the bits it computes.

The number of cores and devices decides how XLA divides its sums, flags and
versions which code runs. An island puts this on the tape, so that a replay can
run under the same.
"""

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

_PREFIXES = ("XLA_", "JAX_", "MALLOC_", "OMP_", "OPENBLAS_", "MKL_", "NPY_")
_PACKAGES = ("diloco", "flax", "grain", "jax", "jaxlib", "numpy", "optax")


def describe() -> dict[str, Any]:
  """Returns `cores`, `environ` and `software` of this process."""
  return {
    "cores": sorted(os.sched_getaffinity(0)),
    "environ": {
      name: value
      for name, value in sorted(os.environ.items())
      if name.startswith(_PREFIXES)
    },
    "software": {
      "python": platform.python_version(),
      "machine": platform.machine(),
      **{name: _version(name) for name in _PACKAGES},
    },
  }


def environ(told: Mapping[str, str]) -> dict[str, str]:
  """This process's environment, with what `describe` looks at as told."""
  others = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(_PREFIXES)
  }
  return {**others, **told}


def changes(told: Mapping[str, str]) -> list[str]:
  """What of the software is not as told, one text each."""
  now = describe()["software"]
  return [
    f"{name} {told.get(name, 'unknown')}, now {now.get(name, 'unknown')}"
    for name in sorted({*told, *now})
    if told.get(name) != now.get(name)
  ]


def choose_cores(
  told: Sequence[int], available: Sequence[int]
) -> tuple[int, ...] | None:
  """As many cores as told, the same ones if they are there; None if not.

  Which cores they are changes nothing, how many does.
  """
  if set(told) <= set(available):
    return tuple(told)
  if len(told) > len(available):
    return None
  return tuple(sorted(available)[: len(told)])


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "unknown"
