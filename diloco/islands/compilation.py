"""How XLA begins: where what it compiled is kept, and in how many threads.

A program's key must not depend on where the cache is: JAX would make the place
of its per-fusion autotuning results, below the cache, part of every key. Those
are switched off; what was tuned is in the compiled program anyway.
"""

import os
import pathlib

import jax
from jax._src import xla_bridge

from diloco.islands import surroundings

_DEFAULTS = {
  "jax_persistent_cache_min_compile_time_secs": 0.05,  # a fragment's programs
  "jax_persistent_cache_enable_xla_caches": "none",
}


def use_cache(folder: pathlib.Path) -> None:
  """Compiles nothing twice.

  Args:
    folder: where to keep it, unless the environment names another place in
      `JAX_COMPILATION_CACHE_DIR`, which several runs may share.
  """
  for name, value in {
    "jax_compilation_cache_dir": str(folder),
    **_DEFAULTS,
  }.items():
    if name.upper() not in os.environ:
      jax.config.update(name, value)


def in_one_thread() -> None:
  """Has XLA compute in one thread from now on, however many cores there are.

  For runs in virtual time, which are the same on any number of cores then. A
  process that has computed already goes on as it began; its tapes say how.
  """
  if xla_bridge.backends_are_initialized():
    return
  name = surroundings.THREADS
  before = os.environ.get(name)
  os.environ[name] = "1"
  jax.devices()
  surroundings.forced[name] = os.environ.pop(name)
  if before is not None:  # what else this process starts has its cores
    os.environ[name] = before
