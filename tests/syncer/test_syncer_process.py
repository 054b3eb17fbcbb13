"""The process of a syncer: what its controller hears of it, and when."""

import queue
import threading

import cut_builder
import pytest

from diloco import channel, config, process
from diloco.snapshots import store
from diloco.syncer import main

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
    self._thread = threading.Thread(
      target=lambda: self.result.put(main.live(run_dir, "standby", 1)),
      daemon=True,
    )
    self._thread.start()

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
