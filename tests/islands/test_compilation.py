"""What was compiled once is not compiled again, wherever the cache is."""

import os
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from diloco.chaos import campaign
from diloco.islands import compilation, inner_step, placement, surroundings
from diloco.tasks import registry

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


_COMPILES = """
import sys
import time
import jax
from jax._src import compiler
from diloco.chaos import campaign
from diloco.islands import compilation, inner_step, placement, surroundings
from diloco.tasks import registry

def takes_long(*args, real=compiler.backend_compile_and_load, **kwargs):
  time.sleep(2)  # or one could be done before the other begins
  return real(*args, **kwargs)

compiler.backend_compile_and_load = takes_long
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
compilation.use_cache(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
compilation.compiled(jax.jit(lambda x: x * 3 + 1), 1.0)
print(sum(name == "/jax/compilation_cache/cache_hits" for name in hits))
"""


def test_of_processes_that_begin_alike_one_compiles(tmp_path):
  env = {
    **{k: v for k, v in os.environ.items() if k.lower() not in _OPTIONS},
    # However fast it is.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", _COMPILES, str(tmp_path / "cache")],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=env,
    )
    for _ in range(2)
  ]
  for process in processes:
    assert process.stdout.readline() == "ready\n"
  for process in processes:
    process.stdin.write("\n")
    process.stdin.flush()
  found = [process.communicate()[0] for process in processes]
  assert sorted(map(int, found)) == [0, 1]
  assert not list((tmp_path / "cache").glob("*.turn"))


@pytest.fixture
def folder(start, tmp_path):
  compilation.use_cache(tmp_path)
  return tmp_path


def test_who_wants_the_same_program_waits_and_others_do_not(
  folder, monkeypatch
):
  waits, done, order = threading.Event(), threading.Event(), []
  monkeypatch.setattr(compilation.time, "sleep", lambda _: waits.set())

  def second():
    with compilation._in_turn("same"):
      order.append("second")
    done.set()

  with compilation._in_turn("same"):
    with compilation._in_turn("another"):
      order.append("another")
    thread = threading.Thread(target=second)
    thread.start()
    assert waits.wait(30)
    order.append("first")
  assert done.wait(30)
  thread.join()
  assert order == ["another", "first", "second"]


def test_who_is_killed_lets_the_next_one_in(folder, monkeypatch):
  holder = subprocess.Popen(
    [
      sys.executable,
      "-c",
      "import fcntl, sys, time; f = open(sys.argv[1], 'a');"
      "fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); time.sleep(600)",
      str(folder / "mine.turn"),
    ],
    stdout=subprocess.PIPE,
  )
  assert holder.stdout.readline()

  def kill(_):
    holder.kill()
    holder.communicate()

  monkeypatch.setattr(compilation.time, "sleep", kill)
  with compilation._in_turn("mine"):
    assert holder.returncode is not None


@pytest.mark.parametrize("what", ["hangs", "no folder", "bucket", "no cache"])
def test_nobody_waits_in_vain(folder, monkeypatch, what):
  monkeypatch.setattr(compilation, "_LONGEST_WAIT_SECS", 0.0)
  if what == "no folder":
    (folder / "file").touch()
    jax.config.update("jax_compilation_cache_dir", str(folder / "file"))
  elif what != "hangs":
    url = "gs://bucket/cache" if what == "bucket" else None
    jax.config.update("jax_compilation_cache_dir", url)
  with compilation._in_turn("same"), compilation._in_turn("same"):
    pass


def _step(peak, schedule_steps, decay=0.1):
  """A step with AdamW and a schedule, and its arguments."""
  rate = optax.warmup_cosine_decay_schedule(
    peak / 4, peak, schedule_steps // 8, schedule_steps, peak / 20
  )
  optimizer = optax.adamw(rate, weight_decay=decay)

  def step(params, state):
    loss, grads = jax.value_and_grad(lambda x: jnp.mean(x**2) / 3)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = jnp.linspace(-1.0, 2.0, 24).reshape(4, 6)
  return step, (params, optimizer.init(params))


def test_schedules_of_any_height_and_length_are_one_program():
  texts = []
  for setting in ((0.1, 400), (0.03, 77), (0.1, 400, 0.2)):
    step, args = _step(*setting)
    numbers, general = compilation.numbers_apart(step, *args)
    texts.append(jax.jit(general).lower(numbers, *args).as_text())
    found = args
    for _ in range(50):
      *args, loss = jax.jit(step)(*args)
      *found, same_loss = jax.jit(general)(numbers, *found)
    np.testing.assert_allclose(found[0], args[0], rtol=1e-5)
    assert float(same_loss) == pytest.approx(float(loss), rel=1e-5)
  # A number that meets arrays stays in the program.
  assert texts[0] == texts[1] != texts[2]


def test_seeds_share_the_program_of_their_first_parameters(monkeypatch):
  texts, of_jax = [], compilation.compiled

  def noted(jitted, *args):
    texts.append(jitted.lower(*args).as_text())
    return of_jax(jitted, *args)

  monkeypatch.setattr(compilation, "compiled", noted)
  task = registry.make_task("language_model", campaign.MODEL)
  where = placement.Placement((1, 2), jax.devices()[2:4])
  for seed in (3, 2**33 + 3):
    tree = inner_step.ParamTree(task, seed)
    expected = tree.named(jax.tree.leaves(task.init(jax.random.key(seed))))
    for name, value in tree.init(where).items():
      np.testing.assert_allclose(value, expected[name], rtol=1e-6, err_msg=name)
  assert texts[0] == texts[1]


def test_numbers_of_loops_stay_where_they_are():
  def looped(x):
    return jax.lax.fori_loop(0, 9, lambda _, y: y * 2, x) + 5

  numbers, general = compilation.numbers_apart(looped, 1.0)
  assert {k: list(v) for k, v in numbers.items()} == {"float32": [5.0]}
  assert float(jax.jit(general)(numbers, 1.0)) == 2**9 + 5


@pytest.mark.parametrize("users", [None, "6"])
@pytest.mark.parametrize("begun", [True, False])
def test_one_thread_is_for_a_process_that_has_not_computed_and_for_it_alone(
  monkeypatch, users, begun
):
  name, seen = surroundings.THREADS, []
  if users is None:
    monkeypatch.delenv(name, raising=False)
  else:
    monkeypatch.setenv(name, users)
  monkeypatch.setattr(surroundings, "forced", {})
  monkeypatch.setattr(
    compilation.xla_bridge, "backends_are_initialized", lambda: begun
  )
  monkeypatch.setattr(
    compilation.jax, "devices", lambda: seen.append(os.environ[name])
  )
  compilation.in_one_thread()
  assert seen == ([] if begun else ["1"])
  assert surroundings.forced == ({} if begun else {name: "1"})
  assert os.environ.get(name) == users  # what it starts has its cores
