"""Process of the syncer: `python -m diloco.syncer.main`. It never loads JAX."""

import argparse
import logging
import os
import pathlib
import sys

from diloco import channel as channel_lib
from diloco import errors, process
from diloco.snapshots import store
from diloco.syncer import syncer as syncer_lib
from diloco.tape import recorder

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
  """Takes the lease, leads, gives it up. Returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--run_dir", type=pathlib.Path, required=True)
  parser.add_argument("--incarnation", type=int, required=True)
  args = parser.parse_args(argv)
  process.setup_role(cores=())
  try:
    return _run(args.run_dir, args.incarnation)
  except errors.UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return process.EXIT_USER_ERROR
  except errors.FencedError as error:
    logger.warning("fenced error=%s", error)
    return process.EXIT_FAILED


def _run(run_dir: pathlib.Path, incarnation: int) -> int:
  config = process.read_config(run_dir)
  tape = recorder.Recorder(run_dir, "syncer", incarnation)
  snapshots = store.SnapshotStore(process.store_url(run_dir))
  channel = channel_lib.Client(
    run_dir, "syncer", {"incarnation": incarnation, "ready": False}
  )
  syncer = syncer_lib.Syncer(
    snapshots,
    config,
    tape,
    owner=f"{os.uname().nodename}.{os.getpid()}",
    after_beat=lambda: channel.send({"type": "status"}),
  )
  reason = "no controller"
  limit_secs = config.controller.orphan_secs
  if syncer.take_over(lambda: channel.alone_secs() <= limit_secs):
    channel.set_hello(ready=True)
    channel.send({"type": "ready"})
    reason = syncer.run(channel)
  logger.info("leaving reason=%s", reason)
  syncer.close()
  channel.close()
  tape.close()
  return 0


if __name__ == "__main__":
  sys.exit(main())
