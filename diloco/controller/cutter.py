"""Asks for cuts, at intervals and on demand, and sees them through.

Training goes on meanwhile: all this does is to write a request, to look now
and then which parts are there, and to write the last record. What is not
complete in time, or loses an island that was to take part, is given up.
See `diloco.snapshots.cuts`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

from diloco import config as config_lib
from diloco import errors
from diloco.snapshots import cut_parts, cuts, keys, records, store
from diloco.tape import events, reader, recorder

Script = Generator[Any, Any, None]

logger = logging.getLogger(__name__)

_LOOK_SECS = 0.2  # between two looks at an open cut
_IDLE_SECS = 1.0  # between two looks for wishes and forgotten cuts
_RETRY_SECS = 5.0
# A value, two moments of the inner optimizer and a reference, of 32 bits, on
# their way to a disk that still counts as working, and back for checksums.
_BYTES_A_PARAM = 2 * 4 * 4
_LEAST_BYTES_A_SEC = 16 << 20


def wish_path(run_dir: str | os.PathLike[str]) -> pathlib.Path:
  """A file here asks the controller for a cut; it deletes the file."""
  return pathlib.Path(run_dir) / "control" / "cut_wish"


def end_line(run_dir: str | os.PathLike[str], cut: int) -> reader.Line | None:
  """What the tapes tell of how a cut ended; None while they do not."""
  names = {events.CUT_REQUESTED, events.CUT_COMPLETED, events.CUT_ABANDONED}
  for line in reader.newest(run_dir, "controller", names):
    if line["event"] == events.CUT_REQUESTED:
      if line["cut"] <= cut:  # nobody has told of its end before that
        return None
    elif line.get("cut") == cut:
      return line
  return None


@dataclasses.dataclass(frozen=True)
class Settings:
  """When to take cuts.

  Attributes:
    every_secs: between two requests; 0 for never.
    limit_secs: an open cut is given up after this.
    patience_secs: a cut that is due waits so long until all islands are ready.
    islands: how many there are.
    num_fragments: P.
  """

  every_secs: float
  limit_secs: float
  patience_secs: float
  islands: int
  num_fragments: int


@dataclasses.dataclass
class _Open:
  asked: records.CutRequest
  since: float
  lives: Mapping[int, int]  # island -> incarnation that was asked


def of_run(
  config: config_lib.RunConfig,
  snapshots: store.SnapshotStore,
  run_dir: pathlib.Path,
  tape: recorder.Recorder,
  token: int = 0,
) -> Cutter:
  """The cutter of one session of a run, under its controller's token."""
  patience_secs = config.controller.patience_secs
  plan = snapshots.read_plan()
  settings = Settings(
    every_secs=config.programs.cut_every_secs,
    limit_secs=limit_secs(patience_secs, plan.num_params if plan else 0),
    patience_secs=patience_secs,
    islands=config.fleet.islands,
    num_fragments=config.sync.num_fragments,
  )
  return Cutter(
    settings,
    tape.record,
    wish_path(run_dir),
    lambda cut: end_line(run_dir, cut) is not None,
    token,
  )


def limit_secs(patience_secs: float, num_params: int) -> float:
  """How long a cut may take: each island's state has to be written."""
  return patience_secs + num_params * _BYTES_A_PARAM / _LEAST_BYTES_A_SEC


class Cutter:
  """Cuts of one session; its controller's loop performs `look`."""

  def __init__(
    self,
    settings: Settings,
    record: Callable[..., None],
    wish: pathlib.Path,
    is_told: Callable[[int], bool],
    token: int = 0,
  ):
    """Has not looked yet; `is_told` says whether a tape has a cut's end."""
    self._token = token
    self._settings = settings
    self._record = record
    self._wish = wish
    self._is_told = is_told
    self._open: _Open | None = None
    self._due: float | None = None  # of the next cut
    self._look_due = 0.0
    self._settled = False  # what earlier sessions left open
    self._wished = False  # taken up, and no request was written yet

  def look(self, now: float, lives: Mapping[int, int]) -> Script:
    """Does what is due; never raises because of the store.

    `lives` has the incarnation of each island that is ready.
    """
    if now < self._look_due:
      return
    try:
      yield from self._look(now, lives)
      self._look_due = now + (_LOOK_SECS if self._open else _IDLE_SECS)
    except (OSError, errors.CorruptSnapshotError) as error:
      logger.warning("cut_failed error=%s", error)
      self._look_due = now + _RETRY_SECS
      if self._open is not None and self._is_late(now):
        self._open = None  # without a last word it is never chosen

  def close(self) -> Script:
    """Gives an open cut up: its islands will not train on."""
    if self._open is not None:
      try:
        yield from self._abandon(self._open, "the session ended")
      except (OSError, errors.CorruptSnapshotError) as error:
        logger.warning("cut_failed error=%s", error)

  def completed(self, parts: cut_parts.Parts) -> None:
    """A cut is complete; what is done then besides."""

  def unfit(self, cut: int, why: str) -> None:
    """All parts of a cut are there, and do not fit each other."""

  def _look(self, now: float, lives: Mapping[int, int]) -> Script:
    if not self._settled:
      yield from self._take_up(now, lives)
    if self._open is not None:
      yield from self._go_on(self._open, now, lives)
    elif self._is_due(now, lives):
      yield from self._ask(now, lives)

  def _take_up(self, now: float, lives: Mapping[int, int]) -> Script:
    """Goes on with a cut that an earlier controller asked for, or ended.

    It may have died before it told that.
    """
    newest = max((yield from cuts.numbers()), default=0)
    if newest:
      # Nobody takes part in a cut whose request nobody can read.
      with contextlib.suppress(errors.CorruptSnapshotError):
        look = yield from cuts.look(newest)
        if look.request and (look.is_open or not self._is_told(newest)):
          self._open = _Open(look.request, now, dict(lives))
    self._settled = True

  def _is_due(self, now: float, lives: Mapping[int, int]) -> bool:
    if not lives:
      return False
    if self._wished or self._wish.exists():
      return True
    if not self._settings.every_secs:
      return False
    if self._due is None:
      self._due = now + self._settings.every_secs
    waited_enough = now >= self._due + self._settings.patience_secs
    ready = len(lives) == self._settings.islands or waited_enough
    return now >= self._due and ready

  def _ask(self, now: float, lives: Mapping[int, int]) -> Script:
    # Gone before the request is there: a wish that comes now gets its own cut.
    with contextlib.suppress(FileNotFoundError):
      self._wish.unlink()
      self._wished = True
    asked = yield from cuts.request(
      list(lives), self._settings.num_fragments, self._token
    )
    self._open, self._wished = _Open(asked, now, dict(lives)), False
    self._due = now + self._settings.every_secs
    self._record(events.CUT_REQUESTED, cut=asked.cut, islands=asked.islands)

  def _go_on(self, mine: _Open, now: float, lives: Mapping[int, int]) -> Script:
    look = yield from cuts.look(mine.asked.cut)
    if look.is_complete:
      # By an earlier controller, which then died.
      yield from self._complete(mine, now)
    elif keys.ABANDONED in look.names:
      self._given_up(mine, (yield from cuts.reason(mine.asked.cut)))
    elif not look.missing_islands and keys.CHANNEL in look.names:
      yield from self._complete(mine, now)
    elif gone := self._gone(mine, look, lives):
      yield from self._abandon(
        mine, f"island {gone[0]} died before it took its part"
      )
    elif self._is_late(now):
      waited = [f"island {m}" for m in look.missing_islands]
      waited += [] if keys.CHANNEL in look.names else ["the syncer"]
      yield from self._abandon(mine, f"no part of {', '.join(waited)} in time")

  def _gone(
    self, mine: _Open, look: cuts.Look, lives: Mapping[int, int]
  ) -> list[int]:
    return [
      m
      for m in look.missing_islands
      if m not in lives or lives[m] != mine.lives.get(m)
    ]

  def _is_late(self, now: float) -> bool:
    mine = self._open
    return mine is not None and now >= mine.since + self._settings.limit_secs

  def _complete(self, mine: _Open, now: float) -> Script:
    try:
      parts = yield from cuts.complete(mine.asked, self._token)
    except errors.CorruptSnapshotError as error:
      self.unfit(mine.asked.cut, str(error))
      yield from cuts.abandon(mine.asked.cut, str(error), self._token)
      self._given_up(mine, str(error))
      return
    if parts is None:
      self._given_up(mine, (yield from cuts.reason(mine.asked.cut)))
      return
    self.completed(parts)
    self._open = None
    self._record(
      events.CUT_COMPLETED,
      cut=mine.asked.cut,
      secs=now - mine.since,
      islands={str(m): part.step for m, part in parts.islands.items()},
      versions=[head.version for head in parts.heads],
    )

  def _abandon(self, mine: _Open, reason: str) -> Script:
    # If not, it is complete, which the next look tells.
    if (yield from cuts.abandon(mine.asked.cut, reason, self._token)):
      self._given_up(mine, reason)

  def _given_up(self, mine: _Open, reason: str) -> None:
    logger.warning("cut_abandoned cut=%d reason=%s", mine.asked.cut, reason)
    self._open = None
    self._record(events.CUT_ABANDONED, cut=mine.asked.cut, reason=reason)
