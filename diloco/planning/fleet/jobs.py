"""Jobs under failures: when one trains, on how many slices, and what it loses.

A *job* is a synchronous set of slices: a whole rigid or elastic run, or one
island. Its allocated time is useful, or lost by cause:

downscale   going on without slices that failed
upscale     taking slices in again, or extra capacity in or out
recovery    a rigid job waits for the repair
outage      too few slices are left to train on
repair      slices out of service while the job trains without them
rejoin      repaired slices that wait to be taken in
lost_work   steps since the last saved state, trained in vain
checkpoint  stops for saving state

What comes together is paid together. A failure during a downscale joins it,
since membership is settled at its end; repaired slices wait for the next
reconfiguration, for a bounded time, and all that wait are taken in at once;
failures of a slice that is out already cost nothing. A rigid job's recovery is
voided by a further failure: a new attempt, with a delay of its own, replaces
all that has failed.

Reference: Decoupled DiLoCo, arXiv 2604.21428.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diloco.planning.fleet import defaults, failures

LOSSES = (
  *("downscale", "upscale", "recovery", "outage"),
  *("repair", "rejoin", "lost_work", "checkpoint"),
)
DOWNSCALE, UPSCALE, RECOVERY, OUTAGE = range(4)
_REPAIR, _REJOIN, _LOST, _SAVING = range(4, 8)


_ACTIVE, _DOWN, _READY, _ABSENT = range(4)


class Block(NamedTuple):
  """Extra slices [first, last) of a job, there for part of the time."""

  first: int
  last: int
  start_secs: float
  end_secs: float


@dataclasses.dataclass(frozen=True)
class Shape:
  """What a job runs on."""

  slices: int  # of its own; numbered from 0
  extras: tuple[Block, ...] = ()  # further ones, numbered after them
  start_secs: float = 0.0  # when the job begins
  end_secs: float = math.inf  # when it ends
  min_share: float = 0.5  # of its own slices that it cannot train without


@dataclasses.dataclass
class History:
  """What became of a job.

  Attributes:
    useful: slice-seconds of training that counts.
    allocated: slice-seconds.
    losses: [len(LOSSES)] slice-seconds; with `useful` they add up to
      `allocated`.
    pauses: (start, end, cause) of stretches without training, in order.
    sizes: (seconds, active slices), one for each pause that ended.
    start_secs: when the job began.
    end_secs: when it ended.
    interruptions: failures that stopped it.
    coalesced: failures that joined a pause or met a slice that was out.
  """

  useful: float
  allocated: float
  losses: np.ndarray
  pauses: list[tuple[float, float, int]]
  sizes: list[tuple[float, int]]
  start_secs: float
  end_secs: float
  interruptions: int
  coalesced: int

  @property
  def goodput(self) -> float:
    """Useful share of the allocated time."""
    return self.useful / self.allocated


class _Account:
  """Divides the time of a job, whatever the rules of pausing."""

  def __init__(
    self,
    times: defaults.Times,
    slices: int,
    start_secs: float,
    end_secs: float,
  ):
    """Starts with all slices active, at `start_secs`."""
    self._times = times
    self._start = self._now = start_secs
    self._end = end_secs
    self._present = self._active = slices
    self._idle = 0  # repaired, not taken in
    self._losses = [0.0] * len(LOSSES)
    self._useful = self._allocated = 0.0
    self._pauses: list[tuple[float, float, int]] = []
    self._sizes: list[tuple[float, int]] = []
    self._paused_at: float | None = None
    self._cause = 0
    self._trained_from = self._now  # since the last pause
    self._interruptions = self._coalesced = 0
    self._unsaved = 0.0  # slice-seconds that survivors of a stop hold

  def _advance(self, now: float) -> None:
    span, self._now = now - self._now, now
    self._allocated += span * self._present
    if self._paused_at is not None:
      self._losses[self._cause] += span * self._present
      return
    self._useful += span * self._active
    self._losses[_REJOIN] += span * self._idle
    self._losses[_REPAIR] += span * (self._present - self._active - self._idle)

  def _stop(self, cause: int, unit_secs: float) -> None:
    """Pauses training; what is not saved each `unit_secs` is lost, 0: none."""
    assert self._paused_at is None
    rest = self._charge_saves()
    if not unit_secs:
      lost = 0.0
    elif unit_secs < self._save_every_secs:
      lost = rest % unit_secs
    else:
      lost = rest
    self._lose_work(lost * self._active)
    self._unsaved = (rest - lost) * self._active
    self._paused_at, self._cause = self._now, cause

  def _lose_work(self, amount: float) -> None:
    self._useful -= amount
    self._losses[_LOST] += amount

  @property
  def _save_every_secs(self) -> float:
    return self._times.checkpoint_every_secs or self._times.step_secs

  def _charge_saves(self) -> float:
    """Counts saves since the last pause; returns the seconds since the last."""
    trained = self._now - self._trained_from
    saving = self._times.checkpoint_secs
    saves, rest = divmod(trained, self._save_every_secs + saving)
    self._useful -= saves * saving * self._active
    self._losses[_SAVING] += saves * saving * self._active
    return rest

  def _change_cause(self, cause: int) -> None:
    assert self._paused_at is not None
    if cause != self._cause:
      self._pauses.append((self._paused_at, self._now, self._cause))
      self._paused_at, self._cause = self._now, cause

  def _resume(self) -> None:
    assert self._paused_at is not None
    self._pauses.append((self._paused_at, self._now, self._cause))
    self._sizes.append((self._now, self._active))
    self._paused_at, self._trained_from = None, self._now

  def _history(self) -> History:
    if self._paused_at is not None:
      self._pauses.append((self._paused_at, self._now, self._cause))
      self._paused_at = None
    else:
      self._charge_saves()
    return History(
      self._useful,
      self._allocated,
      np.array(self._losses),
      self._pauses,
      self._sizes,
      self._start,
      self._end,
      self._interruptions,
      self._coalesced,
    )


class _Rigid(_Account):
  """All slices or none."""

  def __init__(self, shape: Shape, times: defaults.Times, horizon_secs: float):
    end = min(horizon_secs, shape.end_secs)
    super().__init__(times, shape.slices, shape.start_secs, end)
    self._shape = shape

  def run(self, events: failures.Failures) -> History:
    unit = self._save_every_secs
    ready_at = floor = -math.inf
    restore = self._times.restore_secs
    for secs, first, last, repair_secs, cause in _moments(
      events, self._shape.extras
    ):
      if not self._start <= secs < self._end:
        continue
      if self._paused_at is not None and ready_at <= secs:
        self._advance(ready_at)
        self._resume()
      self._advance(secs)
      if cause < 0:
        self._present += last - first if cause == _COMES else first - last
        self._active = self._present
        repair_secs = self._times.upscale_secs
      elif not self._there(first, secs):
        continue
      failed = cause >= 0
      if self._paused_at is None:
        self._stop(RECOVERY, unit)
        self._interruptions += failed
      else:
        self._coalesced += failed
      ready_at = secs + repair_secs + restore
      if cause != failures.CHIP:
        floor = max(floor, ready_at)  # a group's repair is not retried
      ready_at = max(ready_at, floor)
    if self._paused_at is not None and ready_at <= self._end:
      self._advance(ready_at)
      self._resume()
    self._advance(self._end)
    return self._history()

  def _there(self, index: int, secs: float) -> bool:
    return index < self._shape.slices or any(
      b.first <= index < b.last and b.start_secs <= secs < b.end_secs
      for b in self._shape.extras
    )


_COMES, _GOES = -1, -2
_Event = tuple[float, int, int, float, int]


def _moments(
  events: failures.Failures, extras: Sequence[Block]
) -> list[_Event]:
  """Failures, and extra slices that come and go, in the order of time."""
  columns = (column.tolist() for column in events)
  found: list[_Event] = list(zip(*columns, strict=True))
  for block in extras:
    found.append((block.start_secs, block.first, block.last, 0.0, _COMES))
    found.append((block.end_secs, block.first, block.last, 0.0, _GOES))
  return sorted(found, key=lambda event: event[0])


class _Elastic(_Account):
  """Shrinks by the slices that failed and grows when they are back."""

  def __init__(self, shape: Shape, times: defaults.Times, horizon_secs: float):
    end = min(horizon_secs, shape.end_secs)
    super().__init__(times, shape.slices, shape.start_secs, end)
    self._shape = shape
    total = max([shape.slices, *(b.last for b in shape.extras)])
    self._state = bytearray([_ACTIVE]) * shape.slices
    self._state += bytearray([_ABSENT]) * (total - shape.slices)
    self._ready: list[int] = []
    self._returns: list[tuple[float, int]] = []
    self._timer = math.inf  # end of the pause, or of the wait to be taken in
    self._least = max(1, math.ceil(shape.min_share * shape.slices))

  def run(self, events: failures.Failures) -> History:
    last = (math.inf, 0, 0, 0.0, 0)
    iterator = iter(_moments(events, self._shape.extras))
    event = next(iterator, last)
    while event[0] < self._now:
      event = next(iterator, last)
    returns, end = self._returns, self._end
    while True:
      back = returns[0][0] if returns else math.inf
      now = min(event[0], back, self._timer)
      if now >= end:
        break
      self._advance(now)
      if now == event[0]:
        self._happens(event)
        event = next(iterator, last)
      elif now == back:
        self._returned(heapq.heappop(returns)[1])
      elif self._paused_at is None:
        self._grow()
      else:
        self._reconfigured()
    self._advance(end)
    return self._history()

  def _grow(self) -> None:
    """The wait to be taken in is over, if who waited has not failed again."""
    self._timer = math.inf
    if self._ready:
      self._stop(UPSCALE, 0.0)
      self._timer = self._now + self._times.upscale_secs

  def _happens(self, event: _Event) -> None:
    _, first, last, repair_secs, cause = event
    if cause == _COMES:
      self._come(first, last)
    elif cause == _GOES:
      self._fail(first, last, math.inf, gone=True)
    else:
      self._fail(first, last, repair_secs)

  def _fail(
    self, first: int, last: int, repair_secs: float, *, gone: bool = False
  ) -> None:
    state, now = self._state, self._now
    hit = 0
    for index in range(first, last):
      before = state[index]
      if before == _ABSENT:
        continue
      if before == _READY:
        self._ready.remove(index)
        self._idle -= 1
      if before == _ACTIVE:
        hit += 1
      if gone:
        state[index] = _ABSENT
        self._present -= 1
        continue
      if before == _DOWN:
        self._coalesced += 1
        continue
      state[index] = _DOWN
      heapq.heappush(self._returns, (now + repair_secs, index))
    if hit:
      self._lose(hit, gone=gone)

  def _lose(self, slices: int, *, gone: bool) -> None:
    """Goes on without active slices; those that left, left in order."""
    if self._paused_at is None:
      self._interruptions += not gone
      cause = UPSCALE if gone else DOWNSCALE
      # The survivors hold the state; only the step in flight is lost.
      self._stop(cause, 0.0 if gone else self._times.step_secs)
    elif self._cause == DOWNSCALE:
      self._coalesced += not gone
      self._shrink(slices)
      return
    else:
      # A growing job that loses a slice starts over, without it.
      self._interruptions += not gone
      self._change_cause(DOWNSCALE)
    self._shrink(slices)
    self._timer = self._now + self._times.downscale_secs

  def _shrink(self, slices: int) -> None:
    """Takes active slices out; with the last one, what is not saved."""
    self._active -= slices
    if not self._active:
      self._lose_work(self._unsaved)
      self._unsaved = 0.0

  def _come(self, first: int, last: int) -> None:
    self._state[first:last] = bytearray([_READY]) * (last - first)
    self._ready.extend(range(first, last))
    self._idle += last - first
    self._present += last - first
    if self._paused_at is None:
      self._timer = min(self._timer, self._now)

  def _returned(self, index: int) -> None:
    if self._state[index] != _DOWN:
      return  # taken away meanwhile
    self._state[index] = _READY
    self._idle += 1
    self._ready.append(index)
    if self._paused_at is None:
      wait = self._now + self._times.upscale_wait_secs
      self._timer = min(self._timer, wait)
    elif (
      self._cause == OUTAGE
      and self._timer == math.inf
      and self._active + self._idle >= self._least
    ):
      secs = self._times.upscale_secs + self._times.restore_secs
      self._timer = self._now + secs

  def _reconfigured(self) -> None:
    """The pause is over: everything that is there takes part."""
    if self._active + self._idle < self._least:
      self._change_cause(OUTAGE)
      self._timer = math.inf
      return
    for index in self._ready:
      self._state[index] = _ACTIVE
    self._active += self._idle
    self._idle = 0
    self._ready.clear()
    self._timer = math.inf
    self._resume()


def run(
  shape: Shape,
  times: defaults.Times,
  events: failures.Failures,
  horizon_secs: float,
  *,
  elastic: bool,
) -> History:
  """Follows one job through its failures, numbered from 0 as in `shape`.

  An elastic one goes on without failed slices.
  """
  kind = _Elastic if elastic else _Rigid
  return kind(shape, times, horizon_secs).run(events)
