"""A run that goes on beside its user, in notebooks and scripts: `diloco.start`.

The controller is a process of its own, as `diloco train` is at a prompt, so an
interrupted or restarted kernel stops nothing.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from diloco import config as config_lib
from diloco import errors, process
from diloco.report import live, liveness
from diloco.workbench import opened

_POLL_SECS = 0.1
_DRAW_SECS = 0.5
_children: dict[pathlib.Path, subprocess.Popen[bytes]] = {}  # by directory
_CONFIG = """\
import json
import ml_collections


def get_config():
  return ml_collections.ConfigDict(json.loads({text!r}))
"""


def start(
  config: str | os.PathLike[str] | Mapping[str, Any],
  workdir: str | os.PathLike[str],
) -> "Session":
  """Starts a run, or goes on with the one in a directory, and returns.

  A run that is on already is taken as it is, so a cell may be run twice.

  Args:
    config: a configuration, such as a `ConfigDict`, or "FILE.py[:VARIANT]".
    workdir: directory of the run.

  Raises:
    UserError: the configuration, the machine or the directory will not do.
      Nothing has been started or written then.
  """
  run_dir = pathlib.Path(workdir).absolute()
  given: Any = config
  if isinstance(config, str | os.PathLike):
    from diloco import launch  # it loads JAX

    given = launch.load_config(config)
  values = config_lib.from_mapping(given).to_dict()
  if liveness.controller_alive(run_dir):
    return Session(run_dir)
  with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
    file = pathlib.Path(folder) / "config.py"
    file.write_text(_CONFIG.format(text=json.dumps(values)))
    log = pathlib.Path(folder) / "log"
    with log.open("wb") as output:
      child = subprocess.Popen(
        [
          *(sys.executable, "-m", "diloco.cli", "train", "--quiet"),
          *(f"--config={file}", f"--workdir={run_dir}"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=output,
        start_new_session=True,  # Ctrl-C is for whoever looks on
      )
    while child.poll() is None and not liveness.controller_alive(run_dir):
      time.sleep(_POLL_SECS)
    if child.returncode:
      lines = log.read_text(errors="replace").splitlines()
      raise errors.UserError(
        f"diloco.start(config, {str(workdir)!r})",
        lines[-1].removeprefix("error: ") if lines else "it said nothing",
        "correct that and start again",
      )
  _children[run_dir] = child
  return Session(run_dir)


class Session(opened.Run):
  """A run, and what can be done to it while it is on."""

  def watch(self, secs: float = float("inf")) -> None:
    """Shows it until it ends, for so long, or until an interrupt.

    In a notebook a table is drawn again in its place; elsewhere lines are
    printed.
    """
    deadline = time.monotonic() + secs
    with contextlib.suppress(KeyboardInterrupt), self._screen() as draw:
      while self._is_on() and time.monotonic() < deadline:
        draw()
        time.sleep(_DRAW_SECS)
      draw()

  @contextlib.contextmanager
  def _screen(self) -> Iterator[Any]:
    shell = sys.modules.get("IPython")
    if shell is not None and shell.get_ipython() is not None:
      handle = shell.display.display(self, display_id=True)
      yield lambda: handle.update(self)
      return
    view = live.LiveView(self.dir, sys.stdout)
    try:
      yield view.tick
    finally:
      view.close(liveness.controller_alive(self.dir))

  def wait(self, secs: float = float("inf")) -> str:
    """Waits until it ends, or for so long; returns `state`.

    Once it has ended, `summary.json` and `report.html` are written.
    """
    deadline = time.monotonic() + secs
    while self._is_on() and time.monotonic() < deadline:
      time.sleep(_POLL_SECS)
    return self.state

  def _is_on(self) -> bool:
    child = _children.get(self.dir)
    concluding = child is not None and child.poll() is None
    return concluding or liveness.controller_alive(self.dir)

  def stop(self) -> str:
    """Winds it down as a first Ctrl-C does, and waits; returns `state`.

    `start` on the same directory goes on with it.
    """
    os.kill(self._pid("controller"), signal.SIGINT)
    return self.wait()

  def kill(self, role: str) -> None:
    """Kills a role with SIGKILL, to see what becomes of it.

    Args:
      role: such as `island-1`, `syncer`, `standby` or `controller`.

    Raises:
      UserError: it has no such process.
    """
    os.kill(self._pid(role), signal.SIGKILL)

  def change(self, **settings: Any) -> dict[str, tuple[Any, Any]]:
    """Changes settings while the run is on.

    Args:
      **settings: fields of `config.LIVE`, with `__` for the dot:
        `change(sync__quorum=2, outer__learning_rate=0.5)`.

    Returns:
      What is changed: field -> before, after. Islands follow after the train
      windows they have queued.

    Raises:
      UserError: the run is not on, or a change cannot be.
    """
    from diloco.controller import change

    values = process.read_config(self.dir).to_dict()
    for name, value in settings.items():
      group, _, field = name.partition("__")
      if not isinstance(values.get(group), dict):
        raise errors.UserError(
          f"{name}={value!r}",
          "there is no such setting",
          "write config.sync.quorum as sync__quorum",
        )
      values[group][field] = value
    changed = change.request(self.dir, values)
    self.settings = process.read_config(self.dir)
    return changed

  def _pid(self, role: str) -> int:
    pid = controller = liveness.controller_pid(self.dir)
    if role != "controller" and controller is not None:
      pid = process.read_processes(self.dir).get(role, {}).get("pid")
    if pid is None:
      raise errors.UserError(
        f"{role} of {self.dir}",
        "there is no such process",
        "see 'diloco status' for the roles that are alive",
      )
    return pid
