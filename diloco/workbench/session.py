"""A run that goes on beside its user, in notebooks and scripts: `diloco.start`.

The controller is a process of its own, as `diloco train` is at a prompt, so an
interrupted or restarted kernel stops nothing. With `config.engine` "inline" the
whole run is threads of this process: it begins sooner, and an interrupt does
not stop it either. It ends with the process; to start it again goes on with it.
"""

import atexit
import contextlib
import functools
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from diloco import config as config_lib
from diloco import errors, process
from diloco.report import live, liveness, status, totals
from diloco.tape import events, reader
from diloco.workbench import opened

_POLL_SECS = 0.1
_DRAW_SECS = 0.5
_END_SECS = 15.0  # of threads, where their process ends
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
  run_dir = errors.directory("workdir", workdir).absolute()
  given: Any = config
  if isinstance(config, str | os.PathLike):
    from diloco import launch  # it loads JAX

    given = launch.load_config(config)
  values = config_lib.from_mapping(given).to_dict()
  before = _children.get(run_dir)
  if before is not None:
    _wait(run_dir, before)  # one that ended a moment ago writes its report
  if liveness.controller_alive(run_dir):
    return Session(run_dir)
  if values["engine"] == "inline":
    from diloco import run as run_lib  # it loads JAX

    _end_with_process()
    _children[run_dir] = mine = _Thread(run_lib.conduct, values, run_dir)
    _wait(run_dir, mine)
    if not mine.begun and mine.error is not None:
      raise mine.error
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
    try:
      _wait(run_dir, child)
    except BaseException:
      child.kill()  # interrupted before it was on; it reads what goes now
      child.wait()
      raise
    if child.returncode:
      lines = log.read_text(errors="replace").splitlines()
      raise errors.UserError(
        f"diloco.start(config, {str(workdir)!r})",
        lines[-1].removeprefix("error: ") if lines else "it said nothing",
        "correct that and start again",
      )
  _children[run_dir] = child
  return Session(run_dir)


def _wait(run_dir: pathlib.Path, child: "_Child") -> None:
  """Waits until a run is on, or over."""
  while child.poll() is None and not liveness.controller_alive(run_dir):
    time.sleep(_POLL_SECS)


class _Thread:
  """A run in a thread of this process.

  Attributes:
    error: what ended it, if not in order.
  """

  def __init__(
    self, conduct: Callable[..., Any], values: Any, run_dir: pathlib.Path
  ):
    """Starts it; `conduct` is `run.conduct`."""
    self.error: BaseException | None = None
    self._conduct = functools.partial(
      conduct, values, run_dir, quiet=True, begun=self._begin
    )
    self._controller: Any = None
    self._thread = threading.Thread(
      target=self._run, name="diloco", daemon=True
    )
    self._thread.start()

  def _begin(self, controller: Any) -> None:
    self._controller = controller

  def _run(self) -> None:
    try:
      self._conduct()
    except BaseException as error:
      self.error = error

  @property
  def begun(self) -> bool:
    """Whether it was not refused."""
    return self._controller is not None

  def poll(self) -> int | None:
    """None while it goes on, as of a process."""
    return None if self._thread.is_alive() else 0

  def interrupt(self) -> None:
    """Winds it down."""
    self._controller.interrupt()

  def kill(self, role: str) -> bool:
    """Kills a role, a syncer by what it does; says whether there was one."""
    return bool(self._controller.strike(role))

  def end(self) -> None:
    """Kills all of it, if it goes on."""
    if self.begun and self._thread.is_alive():
      self.interrupt()
      self.interrupt()
      self._thread.join(_END_SECS)


_Child = subprocess.Popen[bytes] | _Thread
_children: dict[pathlib.Path, _Child] = {}  # by directory


@functools.cache
def _end_with_process() -> None:
  """Sees to it that runs of this process end before what they work with."""

  def end() -> None:
    for child in _children.values():
      if isinstance(child, _Thread):
        child.end()

  # What `atexit` calls comes after the end of all pools of threads, and a save
  # or merge that is under way would complain. What is registered first, as
  # pools are by their import, is called last.
  import concurrent.futures.thread  # noqa: F401

  getattr(threading, "_register_atexit", atexit.register)(end)


def _merges(run_dir: pathlib.Path) -> Iterator[int]:
  """How many versions were merged since it was asked last."""
  tape = reader.Follower(run_dir)
  while True:
    yield sum(e["event"] == events.MERGED for e in tape.news().events)


class Session(opened.Run):
  """A run, and what can be done to it while it is on."""

  def watch(
    self, secs: float = float("inf"), merges: float = float("inf")
  ) -> None:
    """Shows it until it ends, or until an interrupt.

    In a notebook a table is drawn again in its place; elsewhere lines are
    printed.

    Args:
      secs: for so long at most.
      merges: until so many more versions of fragments were merged at most.
    """
    deadline = time.monotonic() + secs
    counted = (
      _merges(self.dir) if merges < float("inf") else itertools.repeat(0)
    )
    next(counted)  # those before
    with contextlib.suppress(KeyboardInterrupt), self._screen() as draw:
      while self._is_on() and time.monotonic() < deadline and merges > 0:
        draw()
        time.sleep(_DRAW_SECS)
        merges -= next(counted)
      draw()
    self._raise_error()

  @contextlib.contextmanager
  def _screen(self) -> Iterator[Any]:
    shell = sys.modules.get("IPython")
    if shell is not None and shell.get_ipython() is not None:
      reading = totals.begin(self.dir)

      def look() -> opened.Shown:
        return self._shown(status.status(self.dir, reading))

      handle = shell.display.display(look(), display_id=True)
      yield lambda: handle.update(look())
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
    self._raise_error()
    return self.state

  def _raise_error(self) -> None:
    """Raises what ended a run of this process, once."""
    mine = self._mine()
    if mine is not None and (error := mine.error) is not None:
      mine.error = None
      raise error

  def _mine(self) -> _Thread | None:
    """The thread that it goes on in, if it is one of this process.

    Raises:
      UserError: it is within another process.
    """
    child = _children.get(self.dir)
    if isinstance(child, _Thread):
      return child
    pid = liveness.controller_pid(self.dir)
    if self.settings.engine == "inline" and pid is not None:
      raise errors.UserError(
        f"the run in {self.dir}",
        f"its roles are threads of process {pid}, which no other can reach",
        "stop it or kill its roles there, or use 'diloco change' and 'cut'",
      )
    return None

  def _is_on(self) -> bool:
    child = _children.get(self.dir)
    concluding = child is not None and child.poll() is None
    return concluding or liveness.controller_alive(self.dir)

  def stop(self) -> str:
    """Winds it down as a first Ctrl-C does, and waits; returns `state`.

    `start` on the same directory goes on with it.
    """
    pid, mine = self._pid("controller"), self._mine()
    if mine is not None:
      mine.interrupt()
    else:
      os.kill(pid, signal.SIGINT)
    return self.wait()

  def kill(self, role: str) -> None:
    """Kills a role with SIGKILL, to see what becomes of it.

    Args:
      role: `island-1`, `syncer`, `standby`, `evaluator`, `controller`; with
        `config.engine` "inline" there is no process of the last, and `syncer`
        is who leads, `standby` who waits.

    Raises:
      UserError: it has no such process.
    """
    mine = self._mine()
    if mine is None:
      os.kill(self._pid(role), signal.SIGKILL)
    elif not mine.kill(role):
      raise self._no_process(role)

  def change(self, **settings: Any) -> dict[str, tuple[Any, Any]]:
    """Changes settings while the run is on.

    Args:
      **settings: fields of `config_changes.LIVE`, with `__` for the dot:
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
      life = liveness.living_roles(self.dir).get(role)
      pid = None if life is None else life.pid
    if pid is None:
      raise self._no_process(role)
    return pid

  def _no_process(self, role: str) -> errors.UserError:
    return errors.UserError(
      f"{role} of {self.dir}",
      "there is no such process",
      "see 'diloco status' for the roles that are alive",
    )
