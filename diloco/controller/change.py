"""Settings changed while a run is on: `diloco change`.

Who wants a change leaves it as a file; the controller takes it up between two
turns, writes the configuration, tells the tape and then every role. A role that
starts meanwhile has read one configuration or the other, and is told again.
"""

import json
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from diloco import config as config_lib
from diloco import config_changes, errors, process
from diloco.controller import orders
from diloco.report import liveness

logger = logging.getLogger(__name__)

_POLL_SECS = 0.05


def wish_path(run_dir: pathlib.Path) -> pathlib.Path:
  """A file here holds the configuration that is wanted."""
  return run_dir / "control" / "change_wish"


def request(
  run_dir: pathlib.Path, values: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
  """Changes settings of a run that is on, and waits until they hold.

  Islands take a change over after the train windows they have queued.

  `values` are a whole configuration, of which fields in `config_changes.LIVE`
  may differ from the run's. Gives what is changed.

  Raises:
    UserError: the run is not on, or the change cannot be. Nothing is changed.
  """
  old = process.read_config(run_dir)
  new = config_lib.from_mapping(values)
  config_changes.check_live(old, new)
  changes = config_changes.changes(old, new)
  wish = wish_path(run_dir)
  text = json.dumps(new.to_dict())
  temporary = wish.with_suffix(".tmp")
  written = False
  while changes and process.read_config(run_dir) != new:
    if not liveness.controller_alive(run_dir):
      wish.unlink(missing_ok=True)
      raise errors.UserError(
        f"diloco change {run_dir}",
        "no controller of this run is alive, so nothing is going on in it",
        "give the change to 'diloco resume'",
      )
    if not written:
      temporary.write_text(text)
      temporary.rename(wish)
      written = True
    elif not wish.exists() and process.read_config(run_dir) != new:
      raise errors.UserError(
        f"diloco change {run_dir}",
        "another change came in between",
        "look at 'diloco status', then give it again",
      )
    time.sleep(_POLL_SECS)
  return changes


def take_up(
  run_dir: pathlib.Path,
  live: Mapping[str, Any],
  changed: Callable[[config_lib.RunConfig, orders.Changes], None],
) -> None:
  """The controller's side: takes up a change that is wanted.

  `live` is what holds now, as `config_changes.live`: an earlier try may have
  written the configuration and told nobody. `changed` makes a change hold.

  Raises:
    OSError: it cannot be read or written, and is tried again.
  """
  wish = wish_path(run_dir)
  if not wish.exists():
    return
  try:
    kept = process.read_config(run_dir, or_copy=True)
    old = config_changes.with_live(kept, live)
    new = config_lib.from_mapping(json.loads(wish.read_text()))
    config_changes.check_live(old, new)
  except (ValueError, RecursionError) as error:
    logger.warning("change_refused error=%s", errors.one_line(error))
  else:
    process.write_config(new, run_dir)  # over what an earlier try has left
    if changes := config_changes.changes(old, new):
      changed(new, changes)
  wish.unlink(missing_ok=True)
