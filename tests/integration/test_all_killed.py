"""All islands killed at once, then everything: training goes on from there."""

import os
import signal

from diloco.tape import reader


def _losses(run):
  """Held-out losses of the global parameters, in nats, as they were found."""
  if not run.dir.exists():
    return []
  found = [
    (event["wall_secs"], event["loss"])
    for event in reader.read(run.dir).events
    if event["event"] == "evaluated" and event["target"] == "global"
  ]
  return [loss for _, loss in sorted(found)]


def _islands(run):
  return [run.pid(f"island-{m}") for m in (0, 1)]


def test_held_out_loss_goes_on_where_everything_was_killed(make_run):
  run = make_run(
    total_tokens=44_000,
    programs={
      "window_steps": 4,
      "eval_every_tokens": 4_000,
      "eval_batches": 4,
      "final_eval_batches": 4,
      "checkpoint_every_steps": 20,
    },
  )
  run.start()
  run.wait_for(lambda: len(_losses(run)) >= 4)
  for pid in _islands(run):
    os.kill(pid, signal.SIGKILL)
  first = len(_losses(run))
  run.wait_for(lambda: len(_losses(run)) >= first + 3)
  run.kill_everything()
  run.finish()
  second = len(_losses(run))
  code, _, err = run.start().finish()
  assert code == 0, err
  losses = _losses(run)
  assert len(losses) >= second + 3
  start, gain = losses[0], losses[0] - losses[first - 1]
  assert gain > 0.5, losses
  for killed in (first, second):
    # Nothing of what was learnt is lost but noise; from the beginning it would
    # be all of it.
    assert losses[killed] < start - 0.8 * gain, losses
  assert losses[-1] < losses[first - 1], losses
  facts = run.summary()
  assert facts["status"] == "finished"
  assert facts["violations"] == []
  assert facts["tokens_unaccounted"] == 0
  assert all(i["restarts"] >= 1 for i in facts["islands"].values())
