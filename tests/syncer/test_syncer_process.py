"""The process of a syncer: what its controller hears of it, and when."""

import dataclasses
import os
import queue
import threading
import time
import types

import cut_builder
import pytest

from diloco import (
  channel,
  config,
  config_changes,
  errors,
  process,
  timing,
)
from diloco.snapshots import keys, records, store
from diloco.syncer import main, syncer

_PATIENCE_SECS = 20.0


class Seat:
  """A syncer's process as a thread, and the controller it talks to."""

  def __init__(self, run_dir):
    chosen = config.from_mapping(
      {"controller": {"takeover_secs": 0.6}, "sync": {"num_fragments": 2}}
    )
    process.write_config(chosen, run_dir)
    self.server = channel.Server(0)
    self.server.announce(run_dir, {})
    self.token = 0  # it leads under
    self.result = queue.Queue()
    self.store = store.SnapshotStore(process.store_url(run_dir))
    self._dir = run_dir
    self._thread = threading.Thread(target=self._live, daemon=True)
    self._thread.start()

  def _live(self):
    try:
      self.result.put(main.live(self._dir, "standby", 1))
    except errors.FencedError as error:
      self.result.put(error)

  def member(self):
    """What it has signed in with, once it has."""
    deadline = time.monotonic() + _PATIENCE_SECS
    while (
      found := self.store.read(keys.member_key("standby"), records.Member)
    ) is None:
      assert time.monotonic() < deadline
      time.sleep(0.01)
    return found

  def hear(self, kind, count=1):
    """Waits for messages of a kind; gives the last one."""
    while count:
      peer, message = self.server.inbox.get(timeout=_PATIENCE_SECS)
      assert peer == "standby"
      kinds = {message["type"], "ready" if message.get("ready") else ""}
      count -= kind in kinds
      self.token = message.get("token", self.token)
    return message

  def end(self):
    stop = {"type": "program", "name": "stop", "seq": 1, "args": {}}
    self.server.send("standby", stop)
    assert self.result.get(timeout=_PATIENCE_SECS) is None
    self._thread.join()
    self.server.close()


def _refuse(*args):
  raise OSError("the store is out of reach")


class Blocked:
  """A store operation that hangs until it is let go."""

  def __init__(self):
    self.go_on = threading.Event()

  def __call__(self, *args):
    assert self.go_on.wait(_PATIENCE_SECS)
    _refuse()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_syncer_born_in_an_outage_is_ready_tells_that_it_lives_and_waits(
  how, tmp_path, monkeypatch
):
  outage = _refuse if how == "fails" else Blocked()
  for name in ("read_for_update", "read_plan", "names", "compare_and_set"):
    monkeypatch.setattr(store.SnapshotStore, name, outage)
  seat = Seat(tmp_path)
  seat.hear("ready")
  seat.hear("status", 3)
  if how == "hangs":
    outage.go_on.set()
  drain = {"type": "program", "name": "drain", "seq": 7, "args": {}}
  seat.server.send("standby", drain)
  answer = seat.hear("done")
  assert (answer["seq"], answer["result"]) == (7, {"leads": False})
  seat.end()


def test_syncer_born_in_an_outage_goes_by_the_timing_of_its_run(
  tmp_path, monkeypatch
):
  # As of a store that is far: its own guess would be a tenth of it.
  settled = timing.derive(config.ControllerConfig(takeover_secs=6.0), 0.05)
  far = cut_builder.CutRun(tmp_path, process.store_url(tmp_path)).store
  far.write(timing.KEY, settled)
  out, made, read = threading.Event(), [], store.SnapshotStore.read_for_update

  def fails(self, key, kind):
    if not out.is_set():
      _refuse()
    return read(self, key, kind)

  class Kept(syncer.Syncer):
    def __init__(self, *given):
      super().__init__(*given)
      made.append(self)

  monkeypatch.setattr(store.SnapshotStore, "read_for_update", fails)
  monkeypatch.setattr(syncer, "Syncer", Kept)
  seat = Seat(tmp_path)
  seat.hear("status", 3)
  live = config_changes.live(
    config.from_mapping({"outer": {"learning_rate": 0.125}})
  )
  configure = {"type": "program", "name": "configure", "seq": 7}
  seat.server.send("standby", configure | {"args": {"settings": live}})
  seat.hear("done")
  out.set()
  while not seat.token:
    seat.hear("ready")
  assert made[0].times == settled
  assert made[0]._config.outer.learning_rate == 0.125
  seat.end()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_leader_whose_store_is_out_of_reach_tells_that_it_lives(
  how, tmp_path, monkeypatch
):
  cut_builder.CutRun(tmp_path, process.store_url(tmp_path))
  seat = Seat(tmp_path)
  while not seat.token:
    seat.hear("ready")
  outage = _refuse if how == "fails" else Blocked()
  with monkeypatch.context() as patch:
    patch.setattr(store.SnapshotStore, "execute", outage)
    seat.hear("status", 20)  # several times to live of its lease
  if how == "hangs":
    outage.go_on.set()
  seat.end()


def test_syncer_signs_in_and_says_that_it_leaves(tmp_path):
  seat = Seat(tmp_path)
  seat.hear("ready")
  found = seat.member()
  assert (found.incarnation, found.pid) == (1, os.getpid())
  assert found.run == process.run_name(tmp_path) and found.host
  assert found.since_secs <= found.told_secs and not found.left
  seat.end()
  assert seat.member().left


def test_syncer_that_waits_is_not_wanted_once_it_is_alone_for_too_long():
  alone_secs = iter([0.0, 2.0, 2.5])
  client = types.SimpleNamespace(
    inbox=queue.Queue(), alone_secs=lambda: next(alone_secs)
  )
  waiting = main.Waiting(client, 2.0)
  assert [waiting.wanted() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("leads", [True, False])
def test_syncer_leaves_once_a_later_life_has_its_place(leads, tmp_path):
  if leads:
    cut_builder.CutRun(tmp_path, process.store_url(tmp_path))
  seat = Seat(tmp_path)
  while leads and not seat.token:
    seat.hear("ready")
  later = dataclasses.replace(
    seat.member(), incarnation=2, nonce="of another process"
  )
  seat.store.write(keys.member_key("standby"), later)
  assert "this one is life 1" in str(seat.result.get(timeout=_PATIENCE_SECS))
  assert seat.member() == later
  seat.server.close()
