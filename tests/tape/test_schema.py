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


# Fields that readers look at, by who writes the line: each must be of a kind.
FIELDS = {
  "island-0": {
    events.STARTED: """step tokens_per_step kind topology devices cores present
      relative_speed paced_step_secs unsent_from_step base_versions
      base_digests answers software environ replicas initial_by""",
    events.SUBMITTED: "fragment first_step step",
    events.PUBLISHED: """fragment first_step step key base_version c_tokens
      bytes secs""",
    events.PUBLISH_DROPPED: "fragment first_step step",
    events.ADOPTED: """fragment version step answer lost_from_step lost_to_step
      muted_until""",
    events.RESYNCED: "step fragments",
    events.EVALUATED: "step target loss bits_per_token skipped tokens version",
    events.SAVING: "step serial",
    events.CHECKPOINTED: "step bytes secs",
    events.REBASED: "step fragment",
    events.POISONED: "step fragment",
    events.STOPPED: "step",
  },
  "syncer": {
    events.LEASE_ACQUIRED: "token",
    events.ROUND_OPENED: "fragment version island",
    events.MERGED: """fragment version contributions token absent quorum_secs
      grace_secs grace_spent_secs merge_secs outer_grad_norm opened_at closed_at
      grace_facts learning_rate cosine""",
    events.DISCARDED: """island island_incarnation fragment first_step step
      reason key c_tokens arrived_at""",
    events.QUARANTINED: "island island_incarnation suspended_secs",
    events.GLOBAL_DAMAGED: "fragment version reason",
    events.HEAD_HEALED: "fragment version",
    events.MEMBER_JOINED: "island",
    events.MEMBER_LOST: "island",
    events.STORE_REQUESTS: "reads writes lists over_secs",
  },
  "controller": {
    events.RUN_STARTED: "method islands total_tokens token",
    events.ISLAND_STARTED: "island island_incarnation",
    events.ISLAND_READY: "island island_incarnation",
    events.ISLAND_DIED: "island island_incarnation",
    events.ISLAND_RESTART: "island",
    events.SLICES_CHANGED: "island present",
    events.SYNCER_DIED: "led seat",
    events.REATTACHED: "peer",
    events.FAULT_INJECTED: "kind target at_tokens",
    events.CUT_REQUESTED: "cut",
    events.CUT_COMPLETED: "cut versions",
    events.CUT_ABANDONED: "cut",
    events.RESTORED: "version_from version_to cut epoch reinjected",
    events.NOT_RESTORED: "fragments reason",
    events.CONFIG_CHANGED: "changes",
    events.RUN_FINISHED: "status reason",
  },
}
_TEXTS = "kind topology key reason target method status seat peer"
_LISTS = """unsent_from_step base_versions base_digests answers cores present
  absent initial_by fragments contributions version_from version_to reinjected
  versions"""
GOOD = {
  **dict.fromkeys(_TEXTS.split(), "x"),
  **{name: [] for name in _LISTS.split()},
  **{"led": True, "answer": [8, []], "software": {}, "environ": {}},
  **{"changes": {"sync.every": [8, 4]}, "wall_secs": 1.5, "loss": 1.5},
  "grace_facts": {"step_secs": 1, "quorum_secs": 0.5, "sync_secs": 0.5},
}


@pytest.mark.parametrize(
  ("role", "event"),
  [(role, event) for role in FIELDS for event in FIELDS[role]],
)
def test_each_field_that_readers_look_at_is_of_its_kind(role, event):
  names = ["wall_secs", *FIELDS[role][event].split()]
  line = {"event": event} | {name: GOOD.get(name, 8) for name in names}
  assert schema.fault_of_event(dict(line), role, 1) == ""
  for name in names:
    for bad in ({"x": None}, ["7", {}], 10**400):
      # Lists of anything are told from what is none, and objects too.
      if type(bad) is type(GOOD.get(name)) and name in (
        *("software", "environ", "cores", "base_digests", "contributions"),
        *("fragments", "present"),
      ):
        continue
      found = schema.fault_of_event(line | {name: bad}, role, 1)
      assert f"{name!r} is" in found, (name, bad)


@pytest.mark.parametrize(
  "line",
  [
    *({"tokens": "8"}, {"loss": "x"}, {"step_secs": "1"}, {"gap_secs": []}),
    *({"grad_norm": "x"}, {"update_norm": {}}, {"learning_rate": "x"}),
    *({"wall_secs": "soon"}, {"task": []}, {"task": {"a": 10**400}}),
  ],
)
def test_each_field_of_metrics_is_of_its_kind(line):
  (name,) = line
  assert repr(name) in schema.fault_of_metric({"step": 3} | line)
  assert not schema.fault_of_metric({"step": 3, "task": {"a": "text"}})


@pytest.mark.parametrize(
  "answer", [[8], [8, [], 1], ["8", []], [8, [8]], [8, [["8"]]], 8, [None, []]]
)
def test_answer_is_a_step_and_holes(answer):
  line = {"event": events.ADOPTED, "fragment": 0, "answer": answer}
  assert "'answer' is" in schema.fault_of_event(line, "island-0", 1)


@pytest.mark.parametrize(
  "changes", [[], {"a": [1]}, {"a": [1, 2, 3]}, {"a": 8}]
)
def test_change_is_what_was_and_what_is(changes):
  line = {"event": events.CONFIG_CHANGED, "changes": changes}
  assert "'changes' is" in schema.fault_of_event(line, "controller", 1)
