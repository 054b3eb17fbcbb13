"""Where an island keeps what XLA compiled, so that its next life need not.

A program's key must not depend on where the cache is: JAX would make the place
of its per-fusion autotuning results, below the cache, part of every key. Those
are switched off; what was tuned is in the compiled program anyway.
"""

import os
import pathlib

import jax

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
