"""Eight virtual CPU devices for all tests, and one cache of what is compiled.

Workers of a session, and the processes of the runs that they start, inherit the
cache's place in the environment. It outlives the session: XLA compiles again
only what has changed since. `make clean` clears it.
"""

import gc
import os
import pathlib
import shutil

import jax
import pytest

from experiments.benchmarks import s3_server

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
_CACHE = "JAX_COMPILATION_CACHE_DIR"
_MOST_CACHED_BYTES = 2**28  # a session makes a tenth of that
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_configure(config):
  """Compiles quickly in this process, and as users do in those it starts."""
  if _CACHE not in os.environ and hasattr(config, "cache"):
    os.environ[_CACHE] = str(_cache(config))
  if config.getoption("numprocesses", None):
    return  # workers do the tests
  flags = os.environ["XLA_FLAGS"]
  # Emitters of old take two fifths of the time, but fuse products with sums
  # where there are instructions for it, which the formulas of tests do not.
  os.environ["XLA_FLAGS"] = (
    f"{flags} --xla_backend_optimization_level=0"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
  )
  # This process may have imported JAX before they were in the environment.
  jax.config.update("jax_compilation_cache_dir", os.environ.get(_CACHE))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  jax.devices()  # reads them, once and for all
  os.environ["XLA_FLAGS"] = flags


def _cache(config):
  """Where it is; emptied when it has grown too large."""
  folder = config.cache.mkdir("compiled")
  if sum(f.stat().st_size for f in folder.iterdir()) > _MOST_CACHED_BYTES:
    shutil.rmtree(folder)
    folder.mkdir()
  return folder


@pytest.fixture(scope="session")
def credentials():
  """What an S3 server is asked with; processes inherit it."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("AWS_ACCESS_KEY_ID", "someone")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    yield


@pytest.fixture(scope="session")
def s3(credentials):
  """A real S3 server."""
  with s3_server.serving() as server:
    yield server


@pytest.fixture(scope="session")
def far_s3(credentials):
  """A real S3 server as far away as one is, for whole runs.

  One that answers at once is asked so often that it takes half a core. With
  this delay timeouts are still those of a store on the disk.
  """
  with s3_server.serving(delay_secs=0.02) as server:
    yield server


# Three workers take whole files, in this order: whole runs first, which wait
# for some of their time, the longest before others; and between them what keeps
# a core busy meanwhile.
_FIRST = (
  "integration/test_ray.py",
  "verification/test_protocol_campaign.py",
  "engines/",
  "cookbook/",
  "verification/test_planted_bugs.py",
  "colab/",
  "test_cli.py",
  "integration/test_moved_run.py",
  "virtual/",
  "integration/test_chaos.py",
  "islands/test_recovery.py",
  "controller/test_ray_cluster.py",
  "report/test_growth.py",
  "integration/test_replay.py",
  "islands/test_island.py",
  "integration/test_struck_runs.py",
  "planning/test_planner_command.py",
  "integration/test_real_runs.py",
  "islands/test_packing.py",
  "integration/test_two_controllers.py",
  "snapshots/test_restore.py",
  "inline/test_inline_engine.py",
  "tape/",
  "integration/test_all_killed.py",
  "tasks/",
  "integration/",
  "inline/",
  "islands/",
  "verification/",
  "workbench/",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
  root = pathlib.Path(__file__).parent

  def rank(item):
    where = item.path.relative_to(root).as_posix()
    found = [i for i, start in enumerate(_FIRST) if where.startswith(start)]
    return found[0] if found else len(_FIRST)

  items.sort(key=rank)


def pytest_collection_finish():
  """What was imported by now stays: nobody need look at it for what is lost.

  Each full collection did, which took a tenth of what small tests do.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(20_000, 10, 10)
