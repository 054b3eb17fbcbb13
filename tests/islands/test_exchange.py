"""What happens between two steps, with stand-ins for the threads around it."""

import threading
import types

import pytest

from diloco import workers
from diloco.islands import core, exchange, heartbeat, peers, saver
from diloco.snapshots import records


class Thread:
  """A background thread of an island, or what is left of it."""

  def __init__(self, failure=None):
    self.failure = failure

  def check(self):
    if self.failure:
      raise workers.WorkerError(self.failure)


@pytest.mark.parametrize("dead", ["_publisher", "_saver", "_adopter"])
def test_no_step_follows_the_end_of_a_thread(dead):
  island = types.SimpleNamespace(
    _publisher=Thread(), _saver=Thread(), _adopter=Thread()
  )
  setattr(island, dead, Thread("the thread has ended: KeyError: 'w'"))
  with pytest.raises(workers.WorkerError, match="KeyError"):
    exchange.Exchange.between_steps(island)


class Saves:
  """An exchange that saves, and a saver that is told how it ends."""

  def __init__(self):
    self._core = types.SimpleNamespace(positions=(core.Position(0, 0, 0),))
    self._trainer = types.SimpleNamespace(step=4)
    self._saver = self
    self._saves, self._last_save = 0, None
    self.failed = set()

  def may_count(self, serial):
    return serial not in self.failed

  def _save(self, positions, *, part):
    self._saves += 1
    self._last_save = self._trainer.step, positions


def test_state_is_saved_again_only_if_its_save_failed():
  saves = Saves()
  assert exchange.Exchange.save(saves) == 1
  assert exchange.Exchange.save(saves) == 1
  saves.failed.add(1)
  assert exchange.Exchange.save(saves) == 2
  assert exchange.Exchange.save(saves) == 2
  saves._trainer.step = 5
  assert exchange.Exchange.save(saves) == 3


def test_peer_is_answered_on_a_thread_of_its_own(monkeypatch):
  writing, go_on, threads = threading.Event(), threading.Event(), []

  def answer(snapshots, request, offer):
    threads.append(threading.current_thread().name)
    writing.set()
    assert go_on.wait(20)
    raise RuntimeError("RESOURCE_EXHAUSTED")  # costs only the answer

  monkeypatch.setattr(peers, "answer", answer)
  island = types.SimpleNamespace(
    _life=types.SimpleNamespace(
      identity=types.SimpleNamespace(island=0, incarnation=1), snapshots=None
    ),
    _core=types.SimpleNamespace(
      positions=(core.Position(3, 8, 8),), resyncing=False
    ),
    _trainer=types.SimpleNamespace(step=9, opt_state_copy=dict),
    _answerer=None,
  )
  request = records.PeerRequest(1, 2, [3])
  exchange.Exchange._answer(island, request)
  assert writing.wait(20)
  exchange.Exchange._answer(island, request)  # still at the first one
  go_on.set()
  island._answerer.join()
  assert threads == ["answerer"]
  exchange.Exchange._answer(island, request)
  island._answerer.join()
  assert len(threads) == 2


class Writing:
  """A saver that writes nothing, and fails or waits as it is told."""

  def __init__(self, monkeypatch, tmp_path):
    self.may_end, self.begun = threading.Event(), threading.Event()
    self.failures = []

    def save(_, job):
      self.begun.set()
      assert self.may_end.wait(20)
      if job.serial in self.failures:
        raise OSError("no space left on device")
      return 1

    monkeypatch.setattr(saver.Saver, "_save", save)
    tape = types.SimpleNamespace(record=lambda *_, **__: None)
    published = types.SimpleNamespace(
      identity=types.SimpleNamespace(island=0, incarnation=1)
    )
    self.saver = saver.Saver(tmp_path, None, None, published, tape)

  def job(self, serial):
    state = types.SimpleNamespace(step=4)
    return saver.Job(serial, state, (), 0, None)


def test_saver_knows_which_saves_may_still_count(monkeypatch, tmp_path):
  writing = Writing(monkeypatch, tmp_path)
  writing.failures = [1]
  for serial in (1, 2, 3):
    writing.saver.save(writing.job(serial))
    assert writing.begun.wait(20)
  assert [writing.saver.may_count(n) for n in (1, 2, 3, 4)] == [
    *(True, False, True),  # the second was pushed out by the third
    False,
  ]
  writing.may_end.set()
  assert writing.saver.wait(3, 20)
  assert [writing.saver.may_count(n) for n in (1, 2, 3)] == [False, False, True]
  writing.saver.close()


def test_checkpoint_read_to_mend_an_optimizer_may_take_as_long_as_a_start():
  progress, seen = heartbeat.Progress(), []

  def saved_optimizer():
    seen.append(progress.standing)
    return None, None

  island = types.SimpleNamespace(
    _life=types.SimpleNamespace(
      progress=progress, times=types.SimpleNamespace(start_secs=60.0)
    ),
    _trainer=types.SimpleNamespace(
      optimizer_is_finite=lambda: False, mend_optimizer=lambda healthy: 3
    ),
    _tape=types.SimpleNamespace(record=lambda *_, **__: None),
    _core=types.SimpleNamespace(step=9),
    _offences=1,
    _saved_optimizer=saved_optimizer,
  )
  exchange.Exchange._mend(island, [])
  ((count, extra_secs),) = seen
  assert (count, extra_secs) == (1, 60.0)
  assert progress.standing == (2, 0.0)
