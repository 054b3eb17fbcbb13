"""What every process of a run does at birth: logging, signals, configuration.

Roles run in sessions of their own. A Ctrl-C in the terminal reaches only the
controller, which then winds the run down in order.
"""

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import pathlib
import secrets
import signal
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from diloco import config as config_lib
from diloco import crash, errors

FORMAT = "diloco-run-3"  # of a run directory
STORE = "snapshots"  # the store, in a run directory
_PRIVATE = 0o077  # file mode bits that are not given: those of other users
ORIGIN = "control/origin.json"  # of a copy, brought from the run's store
UNFINISHED = "config.tmp"  # what a run killed in its very first write leaves
# What to read and parse a file of JSON may raise that anybody has written.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_MISTAKE = 3  # of a role: in code of the user's
EXIT_NO_DATA = 4  # of a role: its data are over


# In the environment of a role's process: whose it is, for a later controller.
ROLE = "DILOCO_ROLE"

# XLA on a CPU takes temporaries from malloc and frees them in every step, as
# a syncer does with the tensors that it merges. By default glibc gives such
# blocks back to the system each time, as it does, whatever it is told, with
# those that the 64 MB of a thread's own arena have no room for. The page faults
# cost a third of the step; so roles have one arena, and keep what they take.
# Read at start-up only, hence an environment; one that is already set wins.
MALLOC_ENV = {
  "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
  "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
  "MALLOC_TOP_PAD_": str(1 << 26),
  "MALLOC_ARENA_MAX": "1",
}


# Parameters of mallopt(3), by the variables that stand for them.
_MALLOPT = {
  -1: "MALLOC_TRIM_THRESHOLD_",
  -2: "MALLOC_TOP_PAD_",
  -3: "MALLOC_MMAP_THRESHOLD_",
  -8: "MALLOC_ARENA_MAX",
}
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_LARGEST_INT = (1 << 31) - 1


def keep_memory() -> None:
  """Has the C library keep what XLA takes and frees in every step.

  For a process that was not born with `MALLOC_ENV`, before JAX has devices:
  threads that have taken memory keep their arenas.
  """
  with contextlib.suppress(OSError, AttributeError):
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, name in _MALLOPT.items():
      mallopt(parameter, min(int(MALLOC_ENV[name]), _LARGEST_INT))


def directory_id(run_dir: str | os.PathLike[str]) -> str:
  """What tells a run directory from a copy of it: where it is, and its inode.

  Raises:
    OSError: there is no such directory.
  """
  path = pathlib.Path(run_dir).resolve()
  facts = path.stat()
  return f"{facts.st_dev}:{facts.st_ino}:{path}"


def draw_run_id() -> str:
  """What a run's store calls the directory that goes on with the run."""
  return secrets.token_hex(8)


def run_id(run_dir: str | os.PathLike[str]) -> str:
  """What `draw_run_id` drew for a directory; a copy of it has the same."""
  return _said(run_dir, "id")


def run_name(run_dir: str | os.PathLike[str]) -> str:
  """What the run's members go by: the id of the directory it was begun in."""
  return _said(run_dir, "run") or run_id(run_dir)


def _said(run_dir: str | os.PathLike[str], name: str) -> str:
  for path in _config_paths(run_dir):
    with contextlib.suppress(*UNREADABLE):
      return str(json.loads(path.read_text())[name])
  return ""


def write_config(
  config: config_lib.RunConfig,
  run_dir: pathlib.Path,
  drawn: str = "",
  run: str = "",
) -> None:
  """Writes a run's config.json and its copy, each whole or not at all.

  `drawn` is the directory's id; empty keeps the one it has, or draws one. `run`
  is what the run is known by, if it was begun elsewhere.
  """
  run_dir.mkdir(parents=True, exist_ok=True)
  fields = config.to_dict()
  drawn = drawn or run_id(run_dir) or draw_run_id()
  content = {
    "format": FORMAT,
    "directory": directory_id(run_dir),
    "id": drawn,
    "run": run or run_name(run_dir) or drawn,
    "crc32": _checksum(fields),
    "config": fields,
  }
  text = json.dumps(content, indent=2) + "\n"
  for path in _config_paths(run_dir):
    _write_whole(path, text)


def _config_paths(
  run_dir: str | os.PathLike[str],
) -> tuple[pathlib.Path, pathlib.Path]:
  """Where a run's configuration is, and where a copy of it."""
  folder = pathlib.Path(run_dir)
  return folder / "config.json", folder / STORE / "config"


def _write_whole(path: pathlib.Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(UNFINISHED)
  temporary.write_text(text)
  temporary.rename(path)


def _checksum(fields: dict[str, Any]) -> str:
  return f"{zlib.crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


def holds_run(run_dir: str | os.PathLike[str]) -> bool:
  """Whether a directory has the configuration of a run, sound or not."""
  return any(path.exists() for path in _config_paths(run_dir))


def keep_config(run_dir: str | os.PathLike[str]) -> None:
  """Puts the configuration back if it or its copy was deleted.

  Raises:
    OSError: it cannot be written.
  """
  path, copy = _config_paths(run_dir)
  for lost, other in ((path, copy), (copy, path)):
    if not lost.exists() and _intact(other) is not None:
      _write_whole(lost, other.read_text())


def read_config(
  run_dir: str | os.PathLike[str], *, or_copy: bool = False
) -> config_lib.RunConfig:
  """Reads the configuration a run was started with.

  One that was deleted is read from its copy in the run's store; with `or_copy`
  one that is damaged or was changed by hand as well. That is for roles: a run
  that is on goes on as it began.

  Raises:
    UserError: there is none, it cannot be read, it was changed by hand, or
      another version wrote it.
  """
  path, copy = _config_paths(run_dir)
  held = _intact(copy)
  try:
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
      raise errors.UserError(
        f"the run directory {run_dir}",
        f"its run has format {content['format']!r}, this version reads"
        f" {FORMAT!r}",
        "use the version of diloco that wrote it, or another directory",
      )
    if content["crc32"] != _checksum(content["config"]):
      raise _changed(run_dir, content["config"], held)
    return config_lib.of_run(content["config"])
  except UNREADABLE as error:
    if held is not None and (or_copy or isinstance(error, FileNotFoundError)):
      return config_lib.of_run(held)
    if isinstance(error, errors.UserError):
      raise
    remedy = "name the directory of a run, or start one with 'diloco train'"
    if held is not None:
      remedy = "delete it, and the copy in the run's store is used"
    raise errors.UserError(
      f"the run directory {run_dir}",
      f"its config.json cannot be read ({error})",
      remedy,
    ) from error


def _intact(path: pathlib.Path) -> dict[str, Any] | None:
  """The fields of a configuration file; None if it is not what was written."""
  try:
    content = json.loads(path.read_text())
    fields: dict[str, Any] = content["config"]
    sound = content["crc32"] == _checksum(fields)
    return fields if sound and content["format"] == FORMAT else None
  except UNREADABLE:
    return None


def _changed(
  run_dir: str | os.PathLike[str], found: Any, held: dict[str, Any] | None
) -> errors.UserError:
  """Says what of config.json was changed by hand, if the copy can tell."""
  before = {} if held is None else dict(flat(held))
  after = dict(flat(found))
  names = [
    f"{name} from {before.get(name)!r} to {after.get(name)!r}"
    for name in sorted({*before, *after})
    if before.get(name) != after.get(name)
  ]
  what = (
    ", ".join(names) if held is not None and names else "what, is not known"
  )
  return errors.UserError(
    f"the run directory {run_dir}",
    f"its config.json was changed by hand or damaged ({what})",
    "undo that, or delete the file if the run's store is there, which has a"
    " copy; to change a setting give it to 'diloco train' with this --workdir",
  )


def flat(value: Any, name: str = "config") -> Iterator[tuple[str, Any]]:
  """Leaves of a JSON value by their names, as the command line has them."""
  if isinstance(value, dict) and value:
    for key, inner in value.items():
      yield from flat(inner, f"{name}.{key}")
  elif isinstance(value, list) and value:
    for i, inner in enumerate(value):
      yield from flat(inner, f"{name}[{i}]")
  else:
    yield name, value


def check_task(
  config: config_lib.RunConfig,
  run_dir: str | os.PathLike[str],
  named: str | None,
) -> None:
  """Executes no code just because a directory from elsewhere names it.

  `named` is the task that the user says it has, if any, and after a comma its
  loop.

  Raises:
    UserError: its task is a module of somebody's, the run was not started in
      this directory, and the user has not named the task; or named another.
  """
  code = [name for name in (config.task.name, config.loop) if ":" in name]
  name = ",".join(code) or config.task.name
  if named is not None and named != name:
    raise errors.UserError(
      f"--task={named}",
      f"the run in {run_dir} has task {name!r}",
      "name that one if you trust it, or leave --task out",
    )
  if named is None and code and not was_begun_in(run_dir):
    raise errors.UserError(
      f"the run in {run_dir}",
      f"its task {name!r} is code, and the run was not started in this"
      " directory but copied or moved here",
      f"if you trust that module add --task={name}",
    )


def was_begun_in(run_dir: str | os.PathLike[str]) -> bool:
  """Whether a run was last begun in this directory; not so in a copy of it."""
  said = _said(run_dir, "directory")
  return bool(said) and said == directory_id(run_dir)


def print_error(error: object, file: TextIO | None = None) -> None:
  """Tells the user what went wrong, on one line whatever the error holds."""
  line = " ".join(str(error).splitlines())
  print(f"error: {line}", file=file or sys.stderr)


def origin(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
  """Whence a copy is that `logbook.fetch` made; None of any other directory.

  Returns:
    `url` of the run's store, and `seen_secs`, wall time at which its controller
    lived; 0 if it has ended.
  """
  try:
    found = json.loads((pathlib.Path(run_dir) / ORIGIN).read_text())
    return {"url": str(found["url"]), "seen_secs": float(found["seen_secs"])}
  except UNREADABLE:
    return None


def end_with(error: Exception, log: TextIO) -> int:
  """Writes down why a role ends, its last line for people; gives its exit code.

  The controller tells a mistake of the configuration or the task by that line.
  """
  line = str(error)
  if isinstance(error, errors.OwnCodeError):
    traceback.print_exception(error.__cause__ or error, file=log)
  elif not isinstance(error, errors.UserError | errors.PlainError):
    traceback.print_exception(error, file=log)
    line = errors.with_place(error)
  print_error(line, log)
  match error:
    case errors.EndedStreamError():
      return EXIT_NO_DATA
    case errors.OwnCodeError() if errors.is_mistake(error.__cause__ or error):
      return EXIT_MISTAKE
    case errors.UserError():
      return EXIT_USER_ERROR
  return EXIT_FAILED


def leave(code: int) -> None:
  """Ends a process whose other threads may be at work still.

  To take things down under them aborts.
  """
  if code:
    sys.stderr.flush()
    os._exit(code)


def store_url(
  run_dir: str | os.PathLike[str], config: config_lib.RunConfig | None = None
) -> str:
  """URL of a run's snapshot store, by `config` or else by what is in `run_dir`.

  Of a copy from a store, that store counts.
  """
  if copied := origin(run_dir):
    return str(copied["url"])
  held = map(_intact, () if config else _config_paths(run_dir))
  fields = next(filter(None, held), {})
  url: str = config.store if config else fields.get("store", "")
  default = pathlib.Path(run_dir).absolute() / STORE
  return url or default.as_uri() + "/"


@contextlib.contextmanager
def private_files() -> Iterator[None]:
  """Files made meanwhile, by any thread, are readable by this user alone."""
  before = os.umask(_PRIVATE)
  try:
    yield
  finally:
    os.umask(before)


def end_with_keeper() -> int | None:
  """Binds this process to its keeper on a node of a Ray cluster, if it has one.

  Returns:
    The number of its life, of which what it starts knows nothing; None.
  """
  if not (keeper := os.environ.pop("DILOCO_KEEPER", "")):
    return None
  _die_with(int(keeper))
  return int(os.environ.pop("DILOCO_LIFE"))


def unwind_at_interrupts() -> None:
  """From here on something is held that an interrupt has to give back.

  Until then the command may end one at once, as it imports what it needs. The
  signal that ends a job is one from here on, too.
  """
  if getattr(signal.getsignal(signal.SIGINT), "ends_at_once", False):
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def hearing(stop: Callable[[int], object]) -> Iterator[None]:
  """Has `stop` called with each signal to stop, if the main thread does this.

  Others hear no signals.
  """
  before = {}
  if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      before[number] = signal.signal(number, lambda number, _: stop(number))
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


@contextlib.contextmanager
def sole(lock: pathlib.Path, busy: errors.UserError) -> Iterator[None]:
  """Keeps other processes out; raises `busy` if one is in.

  The lock goes with its process, however that ends; no child inherits it.
  """
  with lock.open("w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise busy from error
    yield


def _die_with(parent: int) -> None:
  """Has this process killed when its parent ends; ends it if it has."""
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  if os.getppid() != parent:
    os._exit(EXIT_FAILED)


def _hear_no_sigterm() -> None:
  """Leaves the end of a job to the controller, which has its roles drain first.

  Batch systems and service managers send it to all processes of a job. What
  this one starts or forks ends by it as ever, from its birth on.
  """
  this = {signal.SIGTERM}

  def end_by_it() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, this)

  # What is ignored stays so in what it starts; what is handled does not.
  signal.signal(signal.SIGTERM, lambda *_: None)
  os.register_at_fork(
    before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, this),
    after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, this),
    after_in_child=end_by_it,
  )


def setup_role(
  cores: Sequence[int], run_dir: str | os.PathLike[str], role: str
) -> None:
  """Prepares a role's process: its cores, its log, deaf to terminal and job.

  Must run before JAX is imported: its thread pools are sized then.
  """
  if keeper := os.environ.get("DILOCO_KEEPER"):
    _die_with(int(keeper))
  # What it starts in a session of its own would be taken for it; what /proc
  # tells of this process stays.
  os.environ.pop(ROLE, None)
  os.umask(_PRIVATE)
  if cores:
    os.sched_setaffinity(0, set(cores))
  crash.configure(run_dir, role)
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGHUP, signal.SIG_IGN)
  _hear_no_sigterm()
  logging.basicConfig(
    stream=sys.stderr,
    level=logging.INFO,
    format="%(asctime)s %(levelname)s %(name)s %(message)s",
  )
  for noisy in ("absl", "jax", "orbax"):
    logging.getLogger(noisy).setLevel(logging.WARNING)
