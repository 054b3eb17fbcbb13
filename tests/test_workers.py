"""Background threads whose end does not go unseen."""

import threading

import pytest

from diloco import errors, workers


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
