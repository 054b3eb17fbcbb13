"""All timeouts of a run, from one chosen figure and one measured one.

Chosen is `config.controller.takeover_secs`: how soon a dead leader is replaced.
Measured is the store's *round trip*: one compare-and-set, read back. With T the
first and R the second,

    heartbeat   h = T / 6            sign of life of every role
    lease       4 h                  a leader that is silent so long is deposed
    deposed     6 h                  a replaced leader so long silent is killed
    membership  8 h                  an island that is silent so long is gone
    standby     h / 5                between two looks at the lease
    control     15 s                 a controller that is silent so long is
                                     deposed; 2 T if that is longer, 10 T if
                                     it is shorter
    the rest of T                    for fencing P heads: (2 P + 16) R, or in a
                                     bucket, where W are fenced side by side,
                                     (2 P / W + 16) R

T is 1.35 s if nobody chooses it, or what R needs.

What waits for work and not for a sign of life (starting, compiling, draining)
has a floor of its own: a machine compiles no faster for a small T. The
configuration may override single figures; those that contradict are refused.
The controller stores the result once a session and every role reads it at
birth, so that all of them judge by the same figures, each by its own clock.
"""

import dataclasses
import logging
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Self

from diloco import config as config_lib
from diloco import errors
from diloco.snapshots import records, store

logger = logging.getLogger(__name__)

KEY = "timing"

_PROBES = 21
_RETRY_SECS = 0.25
_BEATS_A_TAKEOVER = 6
_LEASE_BEATS = 4
_MEMBER_BEATS = 8
_LOOKS_A_BEAT = 5
# Of a takeover, what watching leaves for the work.
_SHARE_OF_WORK = 1 - (_LEASE_BEATS + 2 / _LOOKS_A_BEAT) / _BEATS_A_TAKEOVER
_LEAST_LEASE_BEATS = 2  # one renewal may come late
_TRIPS_A_BEAT = 4  # or a slow moment of the store would look like a death
_TRIPS_A_HEAD = 2  # to fence it
_TRIPS_A_TAKEOVER = 16  # lease, listings, board, first look
_CONTROL_SECS = 15.0  # a controller is waited for: training goes on
_CONTROL_TAKEOVERS = 2, 10  # at least, at most


@dataclasses.dataclass(frozen=True)
class Timing(records.Record):
  """Timeouts of a run, in seconds; see the module's docstring."""

  takeover_secs: float  # chosen: from a leader's death to its successor's work
  round_trip_secs: float  # measured
  heartbeat_secs: float  # between two signs of life of any role
  lease_ttl_secs: float  # a lease that stands still so long is free
  member_ttl_secs: float  # an island that stands still so long is gone
  standby_poll_secs: float  # between two looks at a lease
  retry_secs: float  # pause after a failure of the store
  hang_secs: float  # without a sign of life, or without progress
  start_secs: float  # to import, compile and report ready
  orphan_secs: float  # a role lives so long without controller
  drain_secs: float  # for each of draining, saving and stopping

  @classmethod
  def from_fields(cls, fields: Any) -> Self:
    """See `Record`; other versions have figures that this one needs not."""
    if isinstance(fields, dict):
      known = {field.name for field in dataclasses.fields(cls)}
      fields = {name: fields[name] for name in fields.keys() & known}
    return super().from_fields(fields)

  @property
  def deposed_secs(self) -> float:
    """A deposed leader says that it is fenced, and ends, before so long.

    It is one that has not renewed its lease for the time to live. Two beats
    more are for another attempt, which tells it that it is fenced.
    """
    return self.lease_ttl_secs + 2 * self.heartbeat_secs

  @property
  def control_ttl_secs(self) -> float:
    """A controller's lease that stands still so long is free."""
    least, most = (n * self.takeover_secs for n in _CONTROL_TAKEOVERS)
    return min(max(_CONTROL_SECS, least), most)


def derive(
  chosen: config_lib.ControllerConfig,
  round_trip_secs: float,
  num_fragments: int = 1,
  width: int = 1,
) -> Timing:
  """Computes all timeouts of a run.

  Args:
    chosen: what the user says; a field that is 0 is derived.
    round_trip_secs: of the store, as measured.
    num_fragments: P, heads a successor has to fence.
    width: W, of them side by side.

  Raises:
    UserError: the store is too slow for what was chosen, or two figures
      contradict each other.
  """
  work_trips = _TRIPS_A_HEAD * math.ceil(num_fragments / width)
  work_secs = (work_trips + _TRIPS_A_TAKEOVER) * round_trip_secs
  if not chosen.takeover_secs:
    secs = max(
      config_lib.TAKEOVER_SECS,
      float(_up(work_secs / _SHARE_OF_WORK)),
      float(_up(_TRIPS_A_BEAT * _BEATS_A_TAKEOVER * round_trip_secs)),
    )
    chosen = dataclasses.replace(chosen, takeover_secs=secs)
  takeover = chosen.takeover_secs
  heartbeat = chosen.heartbeat_secs or takeover / _BEATS_A_TAKEOVER
  beat = takeover / _BEATS_A_TAKEOVER
  lease_ttl = _LEASE_BEATS * beat
  timing = Timing(
    takeover_secs=takeover,
    round_trip_secs=round_trip_secs,
    heartbeat_secs=heartbeat,
    lease_ttl_secs=lease_ttl,
    member_ttl_secs=_MEMBER_BEATS * heartbeat,
    standby_poll_secs=beat / _LOOKS_A_BEAT,
    retry_secs=heartbeat,
    hang_secs=chosen.hang_limit_secs,
    start_secs=chosen.start_secs or 3 * chosen.patience_secs,
    orphan_secs=chosen.orphan_secs or chosen.patience_secs,
    drain_secs=chosen.drain_secs or chosen.patience_secs,
  )
  _check_store(timing, chosen, work_secs)
  _check_overrides(timing)
  return timing


def _check_store(
  timing: Timing, chosen: config_lib.ControllerConfig, work: float
) -> None:
  """Refuses a store that is too slow for the chosen figures."""
  trip = timing.round_trip_secs
  measured = f"a round trip of the store takes {trip:.2g} s"
  least = _TRIPS_A_BEAT * trip
  if timing.heartbeat_secs < least and chosen.heartbeat_secs:
    raise errors.UserError(
      f"config.controller.heartbeat_secs = {timing.heartbeat_secs:g}",
      f"{measured}, and a heartbeat lasts {_TRIPS_A_BEAT} of them or more",
      f"raise it to {_up(least)} or more, or use a faster store",
    )
  watching = timing.lease_ttl_secs + 2 * timing.standby_poll_secs
  left = timing.takeover_secs - watching
  if work > left:
    # All but the work grows with the chosen figure.
    needed = work * timing.takeover_secs / left
    raise errors.UserError(
      f"config.controller.takeover_secs = {timing.takeover_secs:g}",
      f"{measured}, so a successor is at work after"
      f" {watching + work:.2g} s, not {timing.takeover_secs:g} s",
      f"raise it to {_up(needed)} or more, or use a faster store",
    )


def _check_overrides(timing: Timing) -> None:
  """Refuses figures that contradict each other."""
  heartbeat, takeover = timing.heartbeat_secs, timing.takeover_secs
  if timing.lease_ttl_secs < _LEAST_LEASE_BEATS * heartbeat:
    raise errors.UserError(
      f"config.controller.heartbeat_secs = {heartbeat:g}",
      f"a lease lasts {timing.lease_ttl_secs:.3g} s with"
      f" config.controller.takeover_secs = {takeover:g}, and must outlast"
      f" {_LEAST_LEASE_BEATS} heartbeats",
      "lower heartbeat_secs to"
      f" {timing.lease_ttl_secs / _LEAST_LEASE_BEATS:.3g} or less, or raise"
      " takeover_secs",
    )
  for name, least, rule in (
    ("hang_secs", timing.member_ttl_secs, "an island counts as gone after"),
    ("start_secs", takeover, "a leader is replaced after"),
    ("orphan_secs", timing.lease_ttl_secs, "a lease lasts"),
    ("drain_secs", timing.lease_ttl_secs, "a lease lasts"),
  ):
    value = getattr(timing, name)
    if value < least:
      raise errors.UserError(
        f"config.controller.{name} = {value:g}",
        f"{rule} {least:.3g} s (config.controller.heartbeat_secs ="
        f" {heartbeat:.3g}, takeover_secs = {takeover:g}), and {name} must not"
        " be less",
        f"raise {name} to {least:.3g} or more, or set it to 0 to derive it",
      )


def _up(secs: float) -> str:
  """Two digits, rounded up, so that the advice holds when it is taken."""
  text = f"{secs * 1.05:.1e}"
  return f"{float(text):g}"


def measure(snapshots: store.SnapshotStore) -> float:
  """Returns the median time of a compare-and-set on a store, in seconds."""
  key = f"probe.{os.getpid()}"
  times = []
  try:
    for beat in range(_PROBES):
      started = time.monotonic()
      _, generation = snapshots.read_for_update(key, records.Lease)
      probe = records.Lease("probe", 0, beat)
      snapshots.compare_and_set(key, probe, generation)
      times.append(time.monotonic() - started)
  finally:
    snapshots.delete(key)
  return statistics.median(times)


def settle(
  snapshots: store.SnapshotStore, config: config_lib.RunConfig, *, anew: bool
) -> Timing:
  """Measures the store and writes the session's timing into it.

  Not if one is there that fits the configuration, unless it is to be `anew`:
  roles that live on know only that one.

  Raises:
    UserError: the store is too slow, or the configuration contradicts itself.
  """
  known = None if anew else _stored(snapshots)
  trip = known.round_trip_secs if known else measure(snapshots)
  timing = derive(
    config.controller, trip, config.sync.num_fragments, snapshots.width
  )
  if timing != known:
    snapshots.write(KEY, timing)
  return timing


def read(
  snapshots: store.SnapshotStore,
  chosen: config_lib.ControllerConfig,
  wanted: Callable[[], bool] = lambda: False,
) -> Timing:
  """Returns the run's timing; derived anew where there is none to read.

  A role must not live by that, if the store is only out of reach as it is born:
  it is asked again while it is `wanted`.
  """
  while True:
    try:
      return _stored(snapshots) or derive(chosen, 0.0)
    except OSError as error:
      logger.warning("timing_unreachable error=%s", error)
    if not wanted():
      return derive(chosen, 0.0)
    time.sleep(_RETRY_SECS)


def _stored(snapshots: store.SnapshotStore) -> Timing | None:
  try:
    return snapshots.read(KEY, Timing)
  except errors.CorruptSnapshotError as error:
    logger.warning("timing_unreadable error=%s", error)
    return None
