"""Islands and a syncer in one process, of a task that costs next to nothing."""

import contextlib
import threading

import jax

from diloco import config as config_lib
from diloco import process
from diloco.islands import island as island_lib
from diloco.islands import trainer as trainer_lib
from diloco.snapshots import store
from diloco.syncer import syncer as syncer_lib
from diloco.tape import recorder
from diloco.tasks import registry
from tests.integration import real_run


def make_config(tmp_path, slices=("1",), optimizer="", **sync):
  """Of a small task, or of a language model by the optimizer that is named."""
  task = _language_model(tmp_path, optimizer) if optimizer else _BOWL
  return config_lib.from_mapping(
    {
      # Of one schedule with any number of islands: one step to compile.
      "total_tokens": 1_000_000 * len(slices),
      "task": task,
      "fleet": {"slices": [{"kind": "cpu", "topology": t} for t in slices]},
      # Overwriting leaves no rounding of an island's own in what it adopts.
      "sync": {"num_fragments": 4, "every": 4, "adoption": "overwrite"} | sync,
      "outer": {"learning_rate": 1.0, "momentum": 0.0},
      "controller": {"heartbeat_secs": 0.05},
    }
  )


_BOWL = {"name": "tests.integration.bowl:make", "options": {}}


def _language_model(tmp_path, optimizer):
  task = real_run.language_model(tmp_path)
  return task | {"options": task["options"] | {"optimizer": optimizer}}


@contextlib.contextmanager
def running_syncer(config, run_dir, incarnation=1):
  """A syncer in a thread, leading once some island has made version 0."""
  snapshots = store.SnapshotStore(process.store_url(run_dir))
  tape = recorder.Recorder(run_dir, "syncer", incarnation)
  syncer = syncer_lib.Syncer(snapshots, config, tape, "test")
  failures = []

  def lead():
    try:
      if syncer.take_over(lambda: not stop.is_set()):
        syncer.run()
    except Exception as error:
      failures.append(error)

  stop = threading.Event()
  thread = threading.Thread(target=lead)
  thread.start()
  try:
    yield syncer
  finally:
    stop.set()
    syncer.stop()
    thread.join()
    syncer.close()
    tape.close()
  assert not failures, failures


_likes = {}  # trainers that make no step, by all that is compiled for


def _like(config, island, task, devices):
  """What a trainer shares with others of its shape in one process."""
  options = {k: v for k, v in config.task.options.items() if k != "data_glob"}
  topology = config.fleet.slices[island].shape
  kind = topology, config.sync, config.outer, config.seed
  key = repr((options, kind, len(config.fleet.slices), config.total_tokens))
  if key not in _likes:
    _likes[key] = trainer_lib.Trainer(config, task, island, topology, devices)
  return _likes[key]


def make_island(config, run_dir, island=0, incarnation=1, *, alone=False):
  """An island that has joined; `alone`, it compiles for itself."""
  hardware = config.fleet.slices[island]
  task = registry.make_task(config.task.name, config.task.options)
  devices = jax.devices()[: hardware.num_devices]
  made = island_lib.Island(
    island_lib.Spec(
      run_dir, process.store_url(run_dir), island, incarnation, hardware
    ),
    config,
    task,
    devices,
    like=None if alone else _like(config, island, task, devices),
  )
  made.perform(made.joining())
  return made
