"""What a process runs under that can change the bits it computes.

The number of cores and devices decides how XLA divides its sums, flags and
versions which code runs. An island puts this on the tape, so that a replay can
run under the same.
"""

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

from diloco import process
from diloco.islands import devices

_PREFIXES = ("XLA_", "JAX_", "MALLOC_", "OMP_", "OPENBLAS_", "MKL_", "NPY_")
# Where compiled programs are kept changes no bit.
_IGNORED = ("JAX_COMPILATION_CACHE_", "JAX_PERSISTENT_CACHE_")
# What a tape may set for a process: names that change bits and nothing else,
# plain words as values. A tape may come from anybody; no path, library or
# plug-in is taken from it.
_TAKEN = (
  *("JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION"),
  *("JAX_DEFAULT_PRNG_IMPL", "JAX_THREEFRY_PARTITIONABLE", "JAX_DISABLE_JIT"),
  *("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"),
  *(
    "NPROC",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
  ),
  # Which kernel of a dot product norms are made with, and so a merge's lengths.
  *("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"),
  *("NPY_DISABLE_CPU_FEATURES", *process.MALLOC_ENV, *devices.VISIBLE),
)
_FLAGS = "XLA_FLAGS"
THREADS = "NPROC"  # of XLA's pool on a processor; else one for each core
forced: dict[str, str] = {}  # of the environment, what XLA began with
_WORDS = re.compile(r"[\w., -]*").fullmatch
_FLAG = re.compile(
  r"--xla_(?!dump_)(?!\w+_(?:dir|file|path|to)(?:=|$))\w+(=[\w.,-]*)?"
)
_PACKAGES = ("diloco", "flax", "grain", "jax", "jaxlib", "numpy", "optax")


def describe() -> dict[str, Any]:
  """Returns `cores`, `environ` and `software` of this process.

  With one thread it does not matter which core it has, and is told as core 0.
  """
  environ = dict(os.environ) | forced
  alone = environ.get(THREADS) == "1"
  return {
    "cores": [0] if alone else sorted(os.sched_getaffinity(0)),
    "environ": {
      name: value for name, value in sorted(environ.items()) if _matters(name)
    },
    "software": {
      "python": platform.python_version(),
      "machine": platform.machine(),
      **{name: _version(name) for name in _PACKAGES},
    },
  }


def _matters(name: str) -> bool:
  known = name == THREADS or name.startswith(_PREFIXES)
  return known and not name.startswith(_IGNORED)


def environ(told: Mapping[str, str]) -> dict[str, str]:
  """This process's environment, with what `describe` looks at as told.

  Of what is told only that is taken which can do no more than change bits.
  """
  others = {n: v for n, v in os.environ.items() if not _matters(n)}
  taken = {n: v for n, v in told.items() if n in _TAKEN and _WORDS(v)}
  if _FLAGS in told:
    taken[_FLAGS] = " ".join(filter(_is_harmless, told[_FLAGS].split()))
  return {**others, **taken}


def left_out(told: Mapping[str, str]) -> list[str]:
  """What `environ` does not take, one text each."""
  taken = environ(told)
  names = [n for n in sorted(told) if n != _FLAGS and taken.get(n) != told[n]]
  flags = told.get(_FLAGS, "").split()
  return names + [flag for flag in flags if not _is_harmless(flag)]


def _is_harmless(flag: str) -> bool:
  """Whether a flag of XLA names no file and writes none."""
  return _FLAG.fullmatch(flag) is not None


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
