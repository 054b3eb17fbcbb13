"""A run's own files in its store, so that it is open to whoever reaches that.

The controller keeps them there while the run is on. Elsewhere they are brought
into a directory of this machine's cache, which then is the run's for every
command that only reads. Below the store's root:

    log/seen                     when the controller lived, by its own clock,
                                 and which life it is
    log/whole/<file>             configuration, summary
    log/lines/<file>/<offset>    a piece of a tape or a metric log: whole lines
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import pathlib
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterator
from concurrent import futures

from diloco import errors, process, relay, workers
from diloco.snapshots import keys, locations, store
from diloco.tape import recorder

PUSH_SECS = 10.0
_COLLECT_SECS = 3.0  # while roles relay what they record
_PIECE_BYTES = 128 << 10  # then the next one begins
_WHOLE = ("config.json", "summary.json")
_ROOT = "log"

logger = logging.getLogger(__name__)


class Keeper:
  """Keeps a run's files in its store, until it is closed.

  Once it has begun, what the store does to it is waited out: the run goes on
  without it, and what was missed is there with the next turn.
  """

  def __init__(
    self,
    run_dir: pathlib.Path,
    snapshots: store.SnapshotStore,
    check: Callable[[], None] = lambda: None,
    *,
    relayed: bool = False,
    life: int = 0,
  ):
    """Goes on where an earlier one ended; to enter it starts its thread.

    `check` is asked before each write; it raises `FencedError` once another
    controller has the run, and nothing is written from then on. Where roles may
    have folders of their own, what they relay is taken into the run directory
    first. `life` is the controller's.
    """
    self._life = life
    self._check = check
    self._relayed = relayed
    self._collected: set[str] = set()  # and not deleted yet
    self._more = False  # whether the last look found any
    self._pushing = threading.Lock()
    self._run_dir = run_dir
    self._store = snapshots
    self._known = False  # what is in the store already
    self._pieces: dict[str, int] = {}  # where a file's last one begins
    self._ends: dict[str, int] = {}
    self._whole: dict[str, tuple[int, int]] = {}
    self._closing = threading.Event()
    self._worker: workers.Worker | None = None

  def __enter__(self) -> Keeper:
    """Starts its thread; whoever looks knows of this life before it acts.

    Raises:
      OSError: the store fails.
      FencedError: another controller has the run.
    """
    self._tell()
    self._worker = workers.Worker("logbook", self._work)
    return self

  def __exit__(self, *_: object) -> None:
    """Ends the thread, and brings what is there by now."""
    self._closing.set()
    if self._worker is not None:
      self._worker.join()
    try:
      self.push()
      self._store.delete(keys.SEEN)
    except (OSError, errors.PlainError) as error:
      logger.warning("logbook_behind error=%s", errors.one_line(error))

  def bring(self) -> None:
    """Takes what roles have relayed, now that they have ended."""
    if not self._relayed:
      return
    try:
      self.push()
      self.push()  # which forgets what the first one took
    except (OSError, errors.PlainError) as error:
      logger.warning("logbook_behind error=%s", errors.one_line(error))

  def _work(self) -> None:
    pauses_secs = PUSH_SECS, 8 * PUSH_SECS
    retry = workers.Retry(pauses_secs, (Exception,))
    secs = 0.0
    while not self._closing.wait(secs):
      try:
        self.push()
        self._tell()
        retry = workers.Retry(pauses_secs, (Exception,))
        secs = _COLLECT_SECS if self._more else PUSH_SECS
      except errors.FencedError:
        return  # its controller finds out as well
      except Exception as error:  # whatever it is, nobody else keeps the tapes
        logger.warning("logbook_waits error=%s", errors.one_line(error))
        secs = retry.failed(error)

  def _tell(self) -> None:
    told = {"wall_secs": time.time(), "life": self._life}
    self._put(keys.SEEN, json.dumps(told).encode())

  def push(self) -> None:
    """Writes what is new.

    Of what is in the store of tapes nothing lacks what it follows from, however
    this ends. What syncers tell, as far as it is told now, goes after what
    islands do, and what the controller tells after that: so with the line of a
    complete cut all that came before the cut is there.

    Raises:
      OSError: the store, or the directory, fails; what is written stays.
      FencedError: another controller has the run.
    """
    with self._pushing:
      self._push()

  def _push(self) -> None:
    self._check()
    # What controllers and syncers tell follows from what islands have told by
    # now, and have relayed; what is told from now on comes with the next turn.
    tapes = self._run_dir / recorder.TAPE_DIR
    ends = {
      path: _size(path)
      for path in sorted(tapes.glob("*.jsonl"), key=_order)
      if not path.name.startswith("island-")
    }
    kept = sorted(self._collected)
    if self._relayed:
      new = relay.collect(self._run_dir, self._store, self._collected)
      self._collected.update(new)
      self._more = bool(new)
    if not self._known:
      for _, name, offset in relay.pieces(self._store.keys(_ROOT)):
        self._pieces[name] = offset  # the last one of each counts
      self._known = True
    metrics = sorted((self._run_dir / recorder.METRICS_DIR).glob("*.jsonl"))
    islands = sorted(tapes.glob("island-*.jsonl"))
    for path in (*metrics, *islands):
      self._push_lines(path, _size(path))
    for path, size in ends.items():
      self._push_lines(path, size)
    for name in _WHOLE:
      self._push_whole(name)
    if kept:  # before this turn; so all they hold has its place now
      self._check()
      with futures.ThreadPoolExecutor(self._store.width) as pool:
        list(pool.map(self._store.delete, kept))
      self._collected.difference_update(kept)

  def _put(self, key: str, data: bytes) -> None:
    self._check()
    self._store.put(key, data)

  def _push_lines(self, path: pathlib.Path, size: int) -> None:
    """Writes a file's new lines, up to those that end at `size` bytes."""
    name = path.relative_to(self._run_dir).as_posix()
    start = self._pieces.get(name, 0)
    if size <= self._ends.get(name, start):
      return
    with path.open("rb") as file:
      file.seek(start)
      while lines := file.readlines(_PIECE_BYTES):
        end = start + sum(map(len, lines))
        while lines and (end > size or not lines[-1].endswith(b"\n")):
          end -= len(lines.pop())  # new; or being written, or its writer died
        data = b"".join(lines)
        if start + len(data) > self._ends.get(name, start):
          self._put(f"{_ROOT}/lines/{name}/{start:016d}", data)
        self._pieces[name], self._ends[name] = start, start + len(data)
        if len(data) < _PIECE_BYTES:
          return
        start += len(data)

  def _push_whole(self, name: str) -> None:
    try:
      facts = (self._run_dir / name).stat()
      data = (self._run_dir / name).read_bytes()
    except FileNotFoundError:
      return
    is_now = facts.st_mtime_ns, facts.st_size
    if self._whole.get(name) != is_now:
      self._put(f"{_ROOT}/whole/{name}", data)
      self._whole[name] = is_now


def local(place: str | os.PathLike[str]) -> pathlib.Path:
  """The directory that a user names, by its path or by its store's URL.

  Raises:
    UserError: as `fetch`, or no directory can have this name.
  """
  if isinstance(place, str) and "://" in place:
    return fetch(place)
  return errors.directory("the run's directory", place)


def fetch(url: str) -> pathlib.Path:
  """Brings a run's files from its store; what is there already stays.

  Returns:
    A directory of this machine's cache, to be read as the run's own.

  Raises:
    UserError: there is no run, or the store cannot be read.
  """
  locations.check(url, "the run's URL")
  try:
    snapshots = store.SnapshotStore(url)
    found = snapshots.keys(_ROOT)
  except OSError as error:
    why = errors.of_store(error)
    raise errors.UserError(
      f"the run at {url}",
      f"its store cannot be read ({why})",
      "check the URL, and that endpoint, bucket and credentials are right",
    ) from error
  if f"whole/{_WHOLE[0]}" not in found:
    raise errors.UserError(
      f"the run at {url}",
      "no run has kept its files in this store",
      "name a run's config.store, or the directory of one without",
    )
  folder = _cache() / _folder_name(url)
  with process.private_files(), _alone(folder):
    _bring(snapshots, found, folder)
  return folder


def seen(snapshots: store.SnapshotStore) -> tuple[float, int]:
  """When by its clock a run's controller told that it lives, and in which life.

  Zeros if none lived, or all have left in order. The tape of one that has not
  may have no line here yet.

  Raises:
    OSError: the store cannot be read.
  """
  try:
    told = json.loads(snapshots.get(keys.SEEN) or b"")
    return float(told["wall_secs"]), int(told.get("life", 0))
  except (ValueError, KeyError, TypeError):
    return 0.0, 0


def refresher(
  run_dir: str | os.PathLike[str],
) -> Callable[[], object] | None:
  """What brings news into a copy that `fetch` made; None for a run's own."""
  origin = process.origin(run_dir)
  return functools.partial(fetch, origin["url"]) if origin else None


def _bring(
  snapshots: store.SnapshotStore, listed: Collection[str], folder: pathlib.Path
) -> None:
  whole = [name for name in _WHOLE if f"whole/{name}" in listed]
  read = {name: snapshots.get(f"{_ROOT}/whole/{name}") for name in whole}
  config = folder / _WHOLE[0]
  if config.exists() and _birth(config.read_bytes()) != _birth(read[_WHOLE[0]]):
    for path in folder.glob("*/*.jsonl"):  # of another run at this place
      path.unlink()
  pieces = sorted((name, start) for _, name, start in relay.pieces(listed))
  last = dict(pieces)
  wanted = [
    (name, start)
    for i, (name, start) in enumerate(pieces)
    if start == last[name] or pieces[i + 1][1] > _size(folder / name)
  ]
  with futures.ThreadPoolExecutor(snapshots.width) as pool:
    found = pool.map(
      lambda piece: snapshots.get(f"{_ROOT}/lines/{piece[0]}/{piece[1]:016d}"),
      wanted,
    )
    for (name, start), data in zip(wanted, found, strict=True):
      _append(folder / name, data or b"", start)
  for name, text in read.items():
    if text is not None:
      _replace(folder / name, text)
  origin = {"url": snapshots.url, "seen_secs": seen(snapshots)[0]}
  _replace(folder / process.ORIGIN, json.dumps(origin).encode())


def _birth(config: bytes | None) -> object:
  """What tells the runs apart that were at one place one after another."""
  try:
    content = json.loads(config or b"")
    return content.get("run") or content["directory"]  # an earlier version's
  except (ValueError, KeyError, TypeError, AttributeError):
    return None


def _order(tape: pathlib.Path) -> tuple[bool, str]:
  """Controllers' tapes come last."""
  return tape.name.startswith("controller-"), tape.name


def _size(path: pathlib.Path) -> int:
  return path.stat().st_size if path.exists() else 0


def _append(path: pathlib.Path, data: bytes, start: int) -> None:
  """Adds what a file does not have of a piece; readers see it grow."""
  path.parent.mkdir(parents=True, exist_ok=True)
  size = _size(path)
  if start <= size < start + len(data):
    with path.open("ab") as file:
      file.write(data[size - start :])


def _replace(path: pathlib.Path, data: bytes) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_suffix(".fetched")
  temporary.write_bytes(data)
  temporary.replace(path)


def _cache() -> pathlib.Path:
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return pathlib.Path(base).expanduser() / "diloco" / "runs"


def _folder_name(url: str) -> str:
  path = urllib.parse.urlsplit(url).path.strip("/")
  name = path.rpartition("/")[2] or "run"
  return f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
  """Lets one process of this machine at a time write into a folder."""
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / "lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield
