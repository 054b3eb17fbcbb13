"""Background threads whose end does not go unseen."""

import queue
import threading
import weakref

import pytest

from diloco import errors, workers
from diloco.snapshots import operations


def test_end_by_an_exception_is_raised_where_it_is_asked_for():
  def work():
    raise KeyError("layer_3")

  worker = workers.Worker("publisher", work)
  worker.join()
  with pytest.raises(workers.WorkerError) as caught:
    worker.check()
  assert str(caught.value) == (
    "the publisher thread has ended: KeyError: 'layer_3'"
  )


def test_worker_that_goes_on_or_returns_is_fine():
  go_on = threading.Event()
  worker = workers.Worker("saver", go_on.wait)
  worker.check()
  go_on.set()
  worker.join()
  worker.check()


def test_worker_that_is_done_keeps_nothing_of_its_work():
  go_on = threading.Event()

  class Tensors:
    def write(self):
      go_on.wait()

  held = Tensors()
  alive = weakref.ref(held)
  worker = workers.Worker("answerer", held.write)
  del held
  assert alive() is not None
  go_on.set()
  worker.join()
  assert alive() is None
  worker.check()


def test_what_is_expected_is_tried_again_for_ever_after_longer_pauses():
  retry = workers.Retry((0.1, 1.0))
  pauses = [retry.failed(OSError(), now=50.0) for _ in range(2000)]
  assert pauses[:5] == [0.1, 0.2, 0.4, 0.8, 1.0]
  assert pauses[-1] == 1.0 and retry.due == 51.0


def test_what_nobody_expected_is_tried_again_a_few_times_in_a_row():
  retry = workers.Retry((0.1, 1.0), expected=(OSError,))
  error = errors.CorruptSnapshotError("damaged")
  for _ in range(3):
    retry.failed(error)
    retry.failed(OSError())
  with pytest.raises(errors.CorruptSnapshotError):
    retry.failed(error)


READ = operations.Delete("key")
SECS = 20.0


class Looped:
  """A loop, its script's diary, and a store that may be slow."""

  def __init__(self, script, *, held=False, **options):
    self.diary = []
    self.reached, self.may_go_on = threading.Event(), threading.Event()
    if not held:
      self.may_go_on.set()
    self.loop = workers.Loop(
      "publisher", script(self.diary), self._execute, **options
    )
    self.loop.start()

  def _execute(self, operation):
    self.reached.set()
    assert self.may_go_on.wait(SECS)
    return operation.key

  def close(self):
    closing = threading.Thread(target=self.loop.close, daemon=True)
    closing.start()
    closing.join(SECS)
    assert not closing.is_alive()

  def wait_for(self, *diary):
    with self.loop.changed:
      assert self.loop.changed.wait_for(
        lambda: self.diary == list(diary), SECS
      ), self.diary


def test_script_is_performed_and_its_pauses_are_waited_for():
  def script(diary):
    diary.append((yield READ))
    yield 0.01
    diary.append((yield operations.Compute(lambda: 6 * 7)))
    yield operations.Nap(0.01)
    diary.append("end")

  looped = Looped(script)
  looped.wait_for("key", 42, "end")
  looped.loop.join()
  looped.loop.check()


def test_whoever_is_woken_while_at_work_does_not_sleep_after_it():
  def script(diary):
    for turn in range(3):
      yield READ
      diary.append(turn)
      yield None if turn else operations.Nap(1e6)

  looped = Looped(script, held=True)
  assert looped.reached.wait(SECS)
  looped.loop.wake()
  looped.may_go_on.set()
  looped.wait_for(0, 1)
  looped.loop.wake()
  looped.wait_for(0, 1, 2)
  looped.close()


def test_number_is_waited_for_though_somebody_wakes():
  def script(diary):
    yield READ
    yield 1e6
    diary.append("too early")

  looped = Looped(script)
  assert looped.reached.wait(SECS)
  looped.loop.wake()
  looped.close()  # at once
  assert looped.diary == []


def test_who_waits_for_what_a_script_does_hears_of_it():
  def script(diary):
    diary.append((yield READ))
    yield None

  looped = Looped(script)
  assert looped.loop.wait_for(lambda: looped.diary == ["key"], SECS)
  assert not looped.loop.wait_for(lambda: False, 0.0)
  looped.close()


def test_owner_takes_the_lock_while_the_script_waits_for_an_operation():
  def script(diary):
    yield READ
    diary.append("done")

  looped = Looped(script, held=True)
  assert looped.reached.wait(SECS)
  assert looped.loop.changed.acquire(timeout=SECS)
  looped.loop.changed.release()
  looped.may_go_on.set()
  looped.wait_for("done")


@pytest.mark.parametrize("at_once", [False, True])
def test_script_ends_at_a_pause_or_at_the_next_operation(at_once):
  def script(diary):
    try:
      yield READ
      diary.append("payload")
      yield READ
      diary.append("record")
      yield 0.0
      diary.append("after the pause")
    except Exception:
      diary.append("seen")  # to be ended is no failure of an operation

  looped = Looped(script, held=True, at_once=at_once)
  assert looped.reached.wait(SECS)
  closing = threading.Thread(target=looped.loop.close)
  closing.start()
  with looped.loop.changed:
    assert looped.loop.changed.wait_for(lambda: looped.loop._closing, SECS)
  looped.may_go_on.set()
  closing.join()
  looped.loop.check()
  assert looped.diary == (["payload"] if at_once else ["payload", "record"])


def test_what_an_operation_raises_is_raised_in_the_script():
  def script(diary):
    try:
      yield operations.Compute(lambda: 1 // 0)
    except ZeroDivisionError:
      diary.append("heard")
    yield operations.Compute(lambda: {}["layer_3"])

  looped = Looped(script)
  waiting = threading.Thread(
    target=looped.loop.wait_for, args=(lambda: False, 1000.0), daemon=True
  )
  waiting.start()
  waiting.join(SECS)
  assert not waiting.is_alive()
  looped.loop.join()
  assert looped.diary == ["heard"]
  with pytest.raises(workers.WorkerError, match=r"publisher.*layer_3"):
    looped.loop.check()


_PATIENCE_SECS = 20.0


def test_pulse_goes_on_after_a_beat_that_failed(caplog):
  beats = queue.Queue()

  def beat():
    beats.put(None)
    if beats.qsize() == 1:
      raise RuntimeError("RESOURCE_EXHAUSTED")

  made = workers.Pulse(beat, 0.001, "test")
  for _ in range(3):
    beats.get(timeout=_PATIENCE_SECS)
  made.close()
  assert "beat_failed name=test" in caplog.text


def test_nudge_beats_at_once_and_close_a_last_time():
  beats = queue.Queue()
  made = workers.Pulse(lambda: beats.put(None), 1e6, "test")
  beats.get(timeout=_PATIENCE_SECS)  # the first
  made.nudge()
  beats.get(timeout=_PATIENCE_SECS)
  made.close()
  assert beats.qsize() == 1
