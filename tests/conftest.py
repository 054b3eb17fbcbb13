"""Eight virtual CPU devices for all tests, and one cache of what is compiled.

Set before JAX is imported. Workers of one session, and the processes of the
runs that they start, inherit the cache's place; it goes with the session.
"""

import os
import shutil
import tempfile

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
_OWNS_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if _OWNS_CACHE:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="diloco-")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_unconfigure():
  if _OWNS_CACHE:
    shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


_LONG = ("test_real_runs.py", "test_whole_run_cuts.py")


def pytest_collection_modifyitems(items):
  """Whole runs go one after another: most in one worker, beside all the rest.

  The others go first in the other worker, so that both end together.
  """
  for item in items:
    if "integration" in item.path.parts:
      which = "most" if item.path.name in _LONG else "others"
      item.add_marker(pytest.mark.xdist_group(f"whole_runs_{which}"))
