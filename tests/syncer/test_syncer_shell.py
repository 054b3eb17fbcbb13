"""The syncer's loop while a fragment stands still."""

import dataclasses
import threading
import time

from cut_builder import ISLANDS, CutRun

from diloco import config as config_lib
from diloco.snapshots import cuts, keys, records
from diloco.syncer import syncer as syncer_lib
from diloco.tape import reader, recorder

_PATIENCE_SECS = 60.0


def test_merge_that_fails_every_time_keeps_no_cut_waiting(tmp_path):
  config = config_lib.RunConfig()
  config = dataclasses.replace(
    config,
    sync=dataclasses.replace(config.sync, num_fragments=2, quorum=1),
  )
  run = CutRun(tmp_path)
  run.store.delete_tree(run.head(0).payload)
  run.publish(0, 0, 0, 0, 8)
  run.store.write(
    keys.member_key(0), records.Member(0, 1, 0, 8, 0.1, present=True)
  )
  tape = recorder.Recorder(tmp_path, "syncer", 1)
  syncer = syncer_lib.Syncer(run.store, config, tape, "test")
  assert syncer.take_over()
  loop = threading.Thread(target=syncer.run)
  loop.start()
  try:
    deadline = time.monotonic() + _PATIENCE_SECS

    def wait_for(arrived):
      while not arrived():
        assert time.monotonic() < deadline
        time.sleep(0.05)

    def tries():
      tape.flush()
      found = reader.read(tmp_path).events
      return [e for e in found if e["event"] == "global_damaged"]

    wait_for(tries)
    asked = run.perform(cuts.request(ISLANDS, 2))
    heads = keys.cut_heads_key(asked.cut)
    wait_for(lambda: run.store.read(heads, records.CutHeads))
  finally:
    syncer.close()
    loop.join()
    tape.close()
  assert [h.version for h in run.heads()] == [0, 0]
