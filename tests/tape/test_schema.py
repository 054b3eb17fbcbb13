"""Lines that are JSON and yet not what a tape has."""

import math

import pytest

from diloco.tape import events, schema

SENT = {"fragment": 0, "first_step": 0, "step": 8}
PART = {"island": 0, "incarnation": 1, "first_step": 0, "step": 8}
MERGED = {
  "event": events.MERGED,
  "fragment": 0,
  "version": 1,
  "contributions": [PART],
}

# Line, whose tape -> what is wrong.
LINES = {
  "whole": (MERGED, "syncer", ""),
  "unknown event": ({"event": "of_tomorrow"}, "syncer", ""),
  "event of a number": ({"event": 7}, "syncer", "no name"),
  "field missing": (
    {k: v for k, v in MERGED.items() if k != "version"},
    "syncer",
    "'version' is missing",
  ),
  "count below zero": (
    MERGED | {"version": -1},
    "syncer",
    "'version' is -1",
  ),
  "field of a wrong type": (
    MERGED | {"version": "1"},
    "syncer",
    "'version' is '1'",
  ),
  "item that is none": (
    MERGED | {"contributions": [7]},
    "syncer",
    "in 'contributions'",
  ),
  "item without a field": (
    MERGED | {"contributions": [{"island": 0}]},
    "syncer",
    "in 'contributions': its 'incarnation' is missing",
  ),
  "another's line": (MERGED | {"role": "standby"}, "syncer", "'standby'"),
  "another life's": (MERGED | {"incarnation": 2}, "syncer", "life 2"),
  "island's line": ({"event": events.PUBLISHED, **SENT}, "island-0", ""),
  "island's line of a syncer": (
    {"event": events.PUBLISHED, **SENT},
    "syncer",
    "only an island",
  ),
  "islands that are none": (MERGED | {"absent": ["1"]}, "syncer", "'absent'"),
  "number beyond every float": (
    MERGED | {"contributions": [PART | {"weight": 9**999}]},
    "syncer",
    "in 'contributions': its 'weight' is",
  ),
  "time that is no number": (
    MERGED | {"wall_secs": math.nan},
    "syncer",
    "'wall_secs' is nan",
  ),
  "steps given up that are none": (
    {
      "event": events.RESYNCED,
      "step": 8,
      "fragments": [{"fragment": 0, "lost_from_step": "0"}],
    },
    "island-0",
    "in 'fragments': its 'lost_from_step' is '0'",
  ),
  "versions that do not pair": (
    {"event": events.RESTORED, "version_from": [1], "version_to": []},
    "controller",
    "do not pair",
  ),
  "versions that rise": (
    {"event": events.RESTORED, "version_from": [1, 2], "version_to": [2, 9]},
    "controller",
    "",
  ),
  "version that stays": (
    {"event": events.RESTORED, "version_from": [1, 2], "version_to": [2, 2]},
    "controller",
    "do not rise",
  ),
  "evaluation by the evaluator": (
    {"event": events.EVALUATED, "step": 8, "target": "global", "loss": 1.5},
    "evaluator",
    "",
  ),
  "evaluation by a syncer": (
    {"event": events.EVALUATED, "step": 8, "target": "global", "loss": 1.5},
    "syncer",
    "only an island",
  ),
}


@pytest.mark.parametrize("name", LINES)
def test_line_is_whole_or_its_fault_is_named(name):
  line, role, why = LINES[name]
  found = schema.fault_of_event(dict(line), role, 1)
  assert (why in found) if why else not found


@pytest.mark.parametrize(
  ("role", "is_island"),
  [
    *(("island-0", True), ("island-9999", True), ("island-10000", False)),
    *(("island-", False), ("island-x", False), ("island", False)),
    *(("standby-1", False), ("evaluator", False)),
  ],
)
def test_islands_write_what_islands_write(role, is_island):
  line = {"event": events.SAVING, "step": 8, "serial": 1}
  assert (not schema.fault_of_event(line, role, 1)) == is_island


def test_line_without_a_writer_is_of_the_tapes_own():
  line = dict(MERGED)
  assert not schema.fault_of_event(line, "syncer", 3)
  assert (line["role"], line["incarnation"]) == ("syncer", 3)


@pytest.mark.parametrize(
  ("line", "why"),
  [
    ({"step": 3}, ""),
    ({"step": 3, "incarnation": 2, "tokens": 8}, ""),
    ({"step": None}, "'step' is None"),
    ({"step": 3, "incarnation": "x"}, "'incarnation' is 'x'"),
  ],
)
def test_metrics_have_a_step_and_a_life(line, why):
  found = schema.fault_of_metric(dict(line))
  assert (why in found) if why else not found
