"""Timeouts: one chosen figure, one measured, and what contradicts them."""

import dataclasses
import json
import re

import pytest

from diloco import config as config_lib
from diloco import errors, timing
from diloco.snapshots import records, store


def _chosen(**values):
  return config_lib.ControllerConfig(**values)


@pytest.fixture
def snapshots(tmp_path):
  return store.SnapshotStore(tmp_path.as_uri())


def test_defaults_derive_from_the_chosen_figure():
  made = timing.derive(_chosen(), 0.001, num_fragments=24)
  assert made.takeover_secs == 1.35 and made.round_trip_secs == 0.001
  assert made.heartbeat_secs == pytest.approx(0.225)
  assert made.lease_ttl_secs == pytest.approx(0.9)
  assert made.member_ttl_secs == pytest.approx(1.8)
  assert made.standby_poll_secs == pytest.approx(0.045)
  assert (made.hang_secs, made.start_secs) == (60.0, 180.0)
  assert (made.orphan_secs, made.drain_secs) == (60.0, 60.0)


@pytest.mark.parametrize("takeover_secs", [0.1, 0.7, 1.5, 4.0, 60.0])
def test_what_is_derived_never_contradicts_itself(takeover_secs):
  made = timing.derive(_chosen(takeover_secs=takeover_secs), 0.0)
  assert made.lease_ttl_secs >= 2 * made.heartbeat_secs
  assert made.member_ttl_secs >= made.lease_ttl_secs
  assert made.hang_secs >= made.member_ttl_secs
  assert made.orphan_secs >= made.lease_ttl_secs
  worst_secs = made.lease_ttl_secs + 2 * made.standby_poll_secs
  assert worst_secs < takeover_secs


def test_all_that_judges_signs_of_life_scales_with_the_chosen_figure():
  small, large = (
    timing.derive(_chosen(takeover_secs=secs), 0.0) for secs in (1.0, 10.0)
  )
  for name in (
    "heartbeat_secs",
    "lease_ttl_secs",
    "member_ttl_secs",
    "standby_poll_secs",
  ):
    assert getattr(large, name) == pytest.approx(10 * getattr(small, name))


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("heartbeat_secs", 0.3),
    ("hang_secs", 7.0),
    ("start_secs", 9.0),
    ("orphan_secs", 3.0),
    ("drain_secs", 4.0),
  ],
)
def test_a_field_that_is_set_overrides_what_is_derived(name, value):
  made = timing.derive(_chosen(**{name: value}), 0.001)
  assert getattr(made, name) == value


# What is chosen, the round trip, and what the refusal names: value, rule,
# remedy.
REFUSED = {
  "store too slow for a takeover": (
    {"takeover_secs": 1.5},
    0.02,
    ("takeover_secs = 1.5", "round trip of the store takes 0.02 s", "raise it"),
  ),
  "small figure on a fair store": (
    {"takeover_secs": 0.1},
    0.001,
    ("takeover_secs = 0.1", "0.001 s", "faster store"),
  ),
  "heartbeat of less than several round trips": (
    {"heartbeat_secs": 0.05, "takeover_secs": 30.0},
    0.02,
    ("heartbeat_secs = 0.05", "4 of them", "raise it"),
  ),
  "lease shorter than two heartbeats": (
    {"heartbeat_secs": 0.6},
    0.001,
    ("heartbeat_secs = 0.6", "takeover_secs = 1.35", "lower heartbeat_secs"),
  ),
  "hang before an island counts as gone": (
    {"hang_secs": 1.0},
    0.001,
    ("hang_secs = 1", "gone after 1.8 s", "raise hang_secs to 1.8"),
  ),
  "orphan before a lease expires": (
    {"orphan_secs": 1.0, "takeover_secs": 2.0},
    0.001,
    ("orphan_secs = 1", "a lease lasts 1.33 s", "raise orphan_secs"),
  ),
  "start before a takeover": (
    {"start_secs": 1.0},
    0.001,
    ("start_secs = 1", "replaced after 1.35 s", "raise start_secs"),
  ),
  "drain before a lease expires": (
    {"drain_secs": 1.0, "takeover_secs": 2.0},
    0.001,
    ("drain_secs = 1", "a lease lasts 1.33 s", "raise drain_secs"),
  ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_in_one_line(case):
  values, round_trip_secs, parts = REFUSED[case]
  with pytest.raises(errors.UserError) as caught:
    timing.derive(_chosen(**values), round_trip_secs, num_fragments=24)
  text = str(caught.value)
  assert "\n" not in text
  assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize("round_trip_secs", [0.007, 0.02, 0.11, 3.0])
def test_advice_for_a_slow_store_holds(round_trip_secs):
  with pytest.raises(errors.UserError) as caught:
    timing.derive(_chosen(takeover_secs=1.5), round_trip_secs, num_fragments=24)
  advised = float(re.search(r"raise it to (\S+)", str(caught.value))[1])
  chosen = _chosen(takeover_secs=advised)
  timing.derive(chosen, round_trip_secs, num_fragments=24)
  halved = dataclasses.replace(chosen, takeover_secs=advised / 2)
  with pytest.raises(errors.UserError):
    timing.derive(halved, round_trip_secs, num_fragments=24)


@pytest.mark.parametrize("width", [1, 24])
@pytest.mark.parametrize("round_trip_secs", [0.0, 0.007, 0.02, 0.15, 3.0])
def test_default_allows_any_store_what_it_needs(round_trip_secs, width):
  made = timing.derive(_chosen(), round_trip_secs, 24, width)
  chosen = _chosen(takeover_secs=made.takeover_secs)
  assert timing.derive(chosen, round_trip_secs, 24, width) == made
  assert made.takeover_secs >= config_lib.TAKEOVER_SECS
  assert made.heartbeat_secs >= 4 * round_trip_secs
  if made.takeover_secs > config_lib.TAKEOVER_SECS:
    tighter = _chosen(
      takeover_secs=made.takeover_secs / 2,
      heartbeat_secs=max(0.05, made.takeover_secs / 12),
    )
    with pytest.raises(errors.UserError):
      timing.derive(tighter, round_trip_secs, 24, width)


def test_probes_leave_nothing_in_the_store(snapshots):
  assert timing.measure(snapshots) > 0
  assert snapshots.names("") == []


def test_roles_read_what_the_controller_settled(snapshots):
  config = config_lib.from_mapping({"controller": {"takeover_secs": 3.0}})
  settled = timing.settle(snapshots, config, anew=True)
  # A role's own configuration is not asked where the session's timing is.
  assert timing.read(snapshots, _chosen()) == settled
  assert settled.heartbeat_secs == pytest.approx(0.5)


def test_timing_that_living_roles_know_is_kept_while_it_fits(snapshots):
  config = config_lib.from_mapping({"controller": {"takeover_secs": 3.0}})
  first = timing.settle(snapshots, config, anew=True)
  marked = dataclasses.replace(first, round_trip_secs=0.0012345)
  snapshots.write(timing.KEY, marked)
  assert timing.settle(snapshots, config, anew=False) == marked
  assert timing.settle(snapshots, config, anew=True) != marked
  other = config_lib.from_mapping({"controller": {"takeover_secs": 6.0}})
  kept = timing.settle(snapshots, other, anew=False)
  assert kept.takeover_secs == 6.0
  assert timing.read(snapshots, _chosen()) == kept


def test_timing_of_a_version_with_more_figures_is_one(snapshots, caplog):
  written = timing.derive(_chosen(), 0.002)
  fields = written.to_fields() | {"foreign_secs": 10.0}
  envelope = {"crc32": records.checksum(fields), "record": fields}
  snapshots.put(timing.KEY, json.dumps(envelope).encode())
  assert timing.read(snapshots, _chosen()) == written
  assert not caplog.messages


def test_damaged_timing_is_derived_again(snapshots, caplog):
  snapshots.write(timing.KEY, records.Lease("not a timing", 1, 1))
  assert timing.read(snapshots, _chosen()) == timing.derive(_chosen(), 0.0)
  assert "timing_unreadable" in caplog.text
