"""What was compiled once is not compiled again, wherever the cache is."""

import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from diloco.islands import compilation

_OPTIONS = (
  "jax_compilation_cache_dir",
  "jax_persistent_cache_min_compile_time_secs",
  "jax_persistent_cache_enable_xla_caches",
)


@pytest.fixture
def start(monkeypatch):
  """Compiles a program as a new process would, and gives the cache's files."""
  before = {name: getattr(jax.config, name) for name in _OPTIONS}
  for name in _OPTIONS:
    monkeypatch.delenv(name.upper(), raising=False)

  def start(folder):
    compilation_cache.reset_cache()
    compilation.use_cache(folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.jit(lambda x: jnp.sin(x) * 3.0 + 0.125).lower(1.0).compile()
    return {path.name for path in folder.glob("*-cache")}

  yield start
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def test_cache_of_one_run_serves_another(start, tmp_path):
  made = start(tmp_path / "one")
  assert made
  shutil.copytree(tmp_path / "one", tmp_path / "other")
  assert start(tmp_path / "other") == made


def test_environment_may_name_a_shared_place(start, tmp_path, monkeypatch):
  shared = str(tmp_path / "shared")
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", shared)
  jax.config.update("jax_compilation_cache_dir", shared)
  assert not start(tmp_path / "own")
  assert list((tmp_path / "shared").glob("*-cache"))
