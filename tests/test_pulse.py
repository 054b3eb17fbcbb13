"""Signs of life from a thread of their own."""

import queue

from diloco import pulse

_PATIENCE_SECS = 20.0


def test_pulse_goes_on_after_a_beat_that_failed(caplog):
  beats = queue.Queue()

  def beat():
    beats.put(None)
    if beats.qsize() == 1:
      raise RuntimeError("RESOURCE_EXHAUSTED")

  made = pulse.Pulse(beat, 0.001, "test")
  for _ in range(3):
    beats.get(timeout=_PATIENCE_SECS)
  made.close()
  assert "beat_failed name=test" in caplog.text


def test_nudge_beats_at_once_and_close_a_last_time():
  beats = queue.Queue()
  made = pulse.Pulse(lambda: beats.put(None), 1e6, "test")
  beats.get(timeout=_PATIENCE_SECS)  # the first
  made.nudge()
  beats.get(timeout=_PATIENCE_SECS)
  made.close()
  assert beats.qsize() == 1
