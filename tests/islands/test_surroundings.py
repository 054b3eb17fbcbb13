"""What a process runs under, told and taken up again."""

import os
import subprocess
import sys

import jax
import pytest

from diloco.islands import compilation, devices, surroundings


def test_description_has_what_can_change_bits(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--some_flag")
  monkeypatch.setenv("HOME_GROWN", "1")
  told = surroundings.describe()
  assert told["cores"] == sorted(os.sched_getaffinity(0))
  assert told["environ"]["XLA_FLAGS"] == "--some_flag"
  assert "HOME_GROWN" not in told["environ"]
  assert told["software"]["jax"].count(".") >= 2


def test_one_thread_is_told_of_and_is_this_process_s_alone():
  code = (
    "import os, jax; from diloco.islands import compilation, surroundings\n"
    "compilation.in_one_thread(); told = surroundings.describe()\n"
    "assert told['cores'] == [0] and told['environ']['NPROC'] == '1'\n"
    "assert os.environ['NPROC'] == '7'\n"
  )
  environ = os.environ | {"NPROC": "7"}
  subprocess.run([sys.executable, "-c", code], env=environ, check=True)
  jax.devices()
  compilation.in_one_thread()  # too late, so nothing is said
  assert "NPROC" not in surroundings.describe()["environ"]


def test_environment_is_as_told_and_nothing_more(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_of_today")
  monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
  monkeypatch.setenv("HOME_GROWN", "1")
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
  told = {"XLA_FLAGS": "--xla_of_then=2", "JAX_ENABLE_X64": "1"}
  environ = surroundings.environ(told)
  assert environ.items() >= told.items()
  assert environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
  assert surroundings.left_out(told) == []
  assert environ["HOME_GROWN"] == "1"
  assert "MALLOC_ARENA_MAX" not in environ


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("LD_PRELOAD", "evil.so"),
    ("PYTHONPATH", "evil"),
    ("PATH", "evil"),
    ("JAX_COMPILATION_CACHE_DIR", "evil"),
    ("JAX_PLUGINS", "evil"),
    ("OMP_TOOL_LIBRARIES", "evil.so"),
    ("JAX_PLATFORMS", "/evil"),
  ],
)
def test_tape_sets_nothing_that_loads_or_writes(monkeypatch, name, value):
  monkeypatch.setenv(name, "own")
  assert surroundings.environ({name: value}).get(name) != value
  assert surroundings.left_out({name: value}) == [name]


@pytest.mark.parametrize(
  "flag",
  [
    "--xla_dump_to=/tmp/evil",
    "--xla_gpu_cuda_data_dir=evil",
    "--xla_gpu_kernel_cache_file=evil",
    "--xla_cpu_anything=/evil",
    "--flagfile=evil",
  ],
)
def test_flag_that_names_a_file_is_left_out(flag):
  told = {"XLA_FLAGS": f"--xla_cpu_enable_fast_math=false {flag}"}
  assert surroundings.environ(told)["XLA_FLAGS"] == (
    "--xla_cpu_enable_fast_math=false"
  )
  assert surroundings.left_out(told) == [flag]


def test_other_software_is_named():
  told = surroundings.describe()["software"]
  assert surroundings.changes(told) == []
  (change,) = surroundings.changes(told | {"jax": "0.0.1"})
  assert change == f"jax 0.0.1, now {told['jax']}"


@pytest.mark.parametrize(
  ("told", "available", "chosen"),
  [
    ([1], [0, 1], (1,)),
    ([5, 6], [0, 1, 2], (0, 1)),
    ([0, 1], [1], None),
  ],
)
def test_same_cores_or_as_many_others_are_chosen(told, available, chosen):
  assert surroundings.choose_cores(told, available) == chosen


def test_kernels_that_norms_are_made_with_are_as_told(monkeypatch):
  """Another one rounds otherwise, and a replay differs by the last bits."""
  monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
  told = {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "512"}
  assert told.items() <= surroundings.environ(told).items()
  assert surroundings.left_out(told) == []


def test_devices_of_a_slice_are_as_told(monkeypatch):
  for name in devices.VISIBLE:
    monkeypatch.delenv(name, raising=False)
  told = devices.environ((2, 3), {})
  assert surroundings.environ(told)["JAX_CUDA_VISIBLE_DEVICES"] == "2,3"
  assert surroundings.left_out(told) == []
