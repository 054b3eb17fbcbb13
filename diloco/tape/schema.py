"""What a line of the record must be, so that whoever reads it can go on.

Listed is what readers look at, not all that is written: fields they take for
granted; fields that a tape of an older version may lack, and that are never
null; and fields they ask for with a default, which may be missing or null but
not of another kind. A line that breaks this is a broken line. So a reader
need not doubt the type of anything it finds.
"""

from collections.abc import Callable, Mapping
from typing import Any

from diloco.tape import events

Kind = Callable[[Any], bool]
Kinds = Mapping[str, Kind]

MAX_ISLANDS = 10_000
_MAX_LIVES = 1_000_000
_MAX_FRAGMENTS = 10_000
_MAX_COUNT = 1 << 53  # integers that a float holds exactly
_MAX_SECS = 1e11


def _is_number(value: Any) -> bool:
  """Any float, or an integer that fits into one."""
  if isinstance(value, float):
    return True
  return type(value) is int and abs(value) < _MAX_COUNT


def _is_secs(value: Any) -> bool:
  return _is_number(value) and abs(value) < _MAX_SECS


def _below(limit: int) -> Kind:
  return lambda value: type(value) is int and 0 <= value < limit


def _of(kind: type) -> Kind:
  return lambda value: isinstance(value, kind)


_is_text, _is_flag = _of(str), _of(bool)
_is_object, _is_list = _of(dict), _of(list)
_is_count = _below(_MAX_COUNT)
_is_island = _below(MAX_ISLANDS)
_is_life = _below(_MAX_LIVES)
_is_fragment = _below(_MAX_FRAGMENTS)


def _or_none(kind: Kind) -> Kind:
  return lambda value: value is None or kind(value)


def _list_of(kind: Kind) -> Kind:
  return lambda value: isinstance(value, list) and all(map(kind, value))


def _is_answer(value: Any) -> bool:
  """A merged step and holes; see `started`."""
  return (
    isinstance(value, list)
    and len(value) == 2
    and _is_count(value[0])
    and _list_of(_list_of(_is_count))(value[1])
  )


def _is_changes(value: Any) -> bool:
  """What settings were, and what they are."""
  return isinstance(value, dict) and all(
    isinstance(pair, list) and len(pair) == 2 for pair in value.values()
  )


def _are_steps(value: Any) -> bool:
  """Whether it names a step for each of some islands."""
  return isinstance(value, dict) and all(
    island.isdecimal() and _is_count(step) for island, step in value.items()
  )


def _are_scalars(value: Any) -> bool:
  """A task's own, by name; what is no number is nobody's."""
  return isinstance(value, dict) and all(
    type(one) is not int or _is_number(one) for one in value.values()
  )


def _are_grace_facts(value: Any) -> bool:
  return isinstance(value, dict) and not (value and _lacks(value, _GRACE))


_GRACE = dict.fromkeys(("step_secs", "quorum_secs", "sync_secs"), _is_number)
_STEPS = {"first_step": _is_count, "step": _is_count}
_SENT = {"fragment": _is_fragment, **_STEPS}
_CONTRIBUTION = {"island": _is_island, "incarnation": _is_life, **_STEPS}
_LIFE = {"island": _is_island, "island_incarnation": _is_life}
_VERSION = {"fragment": _is_fragment, "version": _is_count}

# Written by an island, whose number is in its role.
_OF_ISLANDS: Mapping[str, Kinds] = {
  events.STARTED: {"step": _is_count, "tokens_per_step": _is_count},
  events.SUBMITTED: _SENT,
  events.PUBLISHED: _SENT,
  events.PUBLISH_DROPPED: _SENT,
  events.ADOPTED: {"fragment": _is_fragment},
  events.RESYNCED: {"step": _is_count, "fragments": _is_list},
  events.EVALUATED: {
    "step": _is_count,
    "target": _is_text,
    "loss": _or_none(_is_number),
  },
  events.SAVING: {"step": _is_count, "serial": _is_count},
  events.CHECKPOINTED: {"step": _is_count},
  events.REBASED: {"step": _is_count, "fragment": _is_fragment},
  events.POISONED: {"step": _is_count, "fragment": _is_fragment},
  events.STOPPED: {"step": _is_count},
}
_OF_OTHERS: Mapping[str, Kinds] = {
  events.ISLAND_STARTED: _LIFE,
  events.ISLAND_READY: _LIFE,
  events.ISLAND_DIED: _LIFE,
  events.ISLAND_RESTART: {"island": _is_island},
  events.SLICES_CHANGED: {"island": _is_island, "present": _is_list},
  events.REATTACHED: {"peer": _is_text},
  events.FAULT_INJECTED: {"kind": _is_text, "target": _is_text},
  events.CONFIG_CHANGED: {"changes": _is_changes},
  events.CUT_REQUESTED: {"cut": _is_count},
  events.CUT_COMPLETED: {"cut": _is_count},
  events.CUT_ABANDONED: {"cut": _is_count},
  events.RESTORED: {
    "version_from": _list_of(_is_count),
    "version_to": _list_of(_is_count),
  },
  events.NOT_RESTORED: {
    "fragments": _list_of(_is_fragment),
    "reason": _is_text,
  },
  events.LEASE_ACQUIRED: {"token": _is_count},
  events.ROUND_OPENED: {**_VERSION, "island": _is_island},
  events.MERGED: {**_VERSION, "contributions": _is_list},
  events.DISCARDED: {**_LIFE, "reason": _is_text, **_SENT},
  events.QUARANTINED: _LIFE,
  events.GLOBAL_DAMAGED: {**_VERSION, "reason": _is_text},
  events.HEAD_HEALED: _VERSION,
  events.MEMBER_JOINED: {"island": _is_island},
  events.MEMBER_LOST: {"island": _is_island},
  events.STORE_REQUESTS: {
    **dict.fromkeys(("reads", "writes", "lists"), _is_count),
    "over_secs": _is_secs,
  },
}

# Of these, a field that is missing or null is no fault.
_ANYWHERE: Kinds = {
  "island": _is_island,
  "key": _is_text,
  "c_tokens": _is_count,
  "bytes": _is_count,
  "secs": _is_secs,
  "step": _is_count,
}
_GIVEN_UP: Kinds = {
  "answer": _is_answer,
  **dict.fromkeys(("lost_from_step", "lost_to_step", "muted_until"), _is_count),
}
_OPTIONAL: Mapping[str, Kinds] = {
  events.RUN_STARTED: {
    "method": _is_text,
    "islands": _is_island,
    "total_tokens": _is_count,
    "token": _is_count,
  },
  events.RUN_FINISHED: {"status": _is_text, "reason": _is_text},
  events.STORE_REQUESTS: {"deletes": _is_count},
  events.SYNCER_DIED: {"led": _is_flag, "seat": _is_text},
  events.FAULT_INJECTED: {"at_tokens": _is_count},
  events.CUT_COMPLETED: {"versions": _list_of(_is_count)},
  events.RESTORED: {
    "cut": _is_count,
    "epoch": _is_count,
    "reinjected": _list_of(_is_text),
    "torn": _is_flag,
    "steps": _are_steps,
  },
  events.STARTED: {
    "kind": _is_text,
    "topology": _is_text,
    "devices": _is_count,
    "relative_speed": _is_secs,
    "paced_step_secs": _is_secs,
    "unsent_from_step": _list_of(_is_count),
    "base_versions": _list_of(_is_count),
    "base_digests": _is_list,
    "answers": _list_of(_is_answer),
    "software": _is_object,
    "environ": _is_object,
    "cores": _is_list,
    "present": _list_of(_is_island),
    "replicas": _is_count,
    "scheduled": _is_count,
    "own_rate": _is_number,
    "initial_by": _list_of(
      _or_none(lambda life: _list_of(_is_life)(life) and len(life) == 2)
    ),
  },
  events.EVALUATED: {
    "bits_per_token": _is_number,
    **dict.fromkeys(("skipped", "tokens", "version"), _is_count),
  },
  events.ADOPTED: {"version": _is_count, **_GIVEN_UP},
  events.MERGED: {
    "grace_facts": _are_grace_facts,
    "learning_rate": _is_number,
    "cosine": _is_number,
  },
  events.QUARANTINED: {"suspended_secs": _is_secs},
}
# Of these, a field that is missing is no fault.
_NOT_NULL: Mapping[str, Kinds] = {
  events.PUBLISHED: {"key": _is_text, "base_version": _is_count},
  events.DISCARDED: {"key": _is_text, "arrived_at": _or_none(_is_number)},
  events.MERGED: {
    "token": _is_count,
    "absent": _list_of(_is_island),
    **dict.fromkeys(
      ("quorum_secs", "grace_secs", "grace_spent_secs", "merge_secs"),
      _is_number,
    ),
    "outer_grad_norm": _is_number,
    **dict.fromkeys(("opened_at", "closed_at"), _or_none(_is_number)),
  },
}
_MERGED_PART: Kinds = {
  "key": _is_text,
  **dict.fromkeys(("c_tokens", "staleness"), _is_count),
  **dict.fromkeys(("weight", "waited_secs"), _is_number),
  "arrived_at": _or_none(_is_number),
}
_ITEMS: Mapping[str, tuple[str, Kinds, Kinds, Kinds]] = {
  events.MERGED: ("contributions", _CONTRIBUTION, _MERGED_PART, {}),
  events.RESYNCED: ("fragments", {"fragment": _is_fragment}, {}, _GIVEN_UP),
}
_WALL: Kinds = {"wall_secs": _is_secs}
_METRIC: Kinds = {"step": _is_count, "incarnation": _is_life}
_METRIC_OPTIONAL: Kinds = {
  "loss": _is_number,
  "tokens": _is_count,
  "step_secs": _is_secs,
  "gap_secs": _is_secs,
}
METRICS = (*_METRIC, *_METRIC_OPTIONAL)  # what any line of metrics may have
_SCALARS: Kinds = {
  **dict.fromkeys(("grad_norm", "update_norm", "learning_rate"), _is_number),
  "task": _are_scalars,
}


def fault_of_event(line: dict[str, Any], role: str, incarnation: int) -> str:
  """Says what is wrong with a line of a tape; empty if nothing.

  The line, an object with an event, gets role and incarnation of the tape's
  writer if it has none.
  """
  event = line["event"]
  if not isinstance(event, str):
    return "its 'event' is no name"
  writer = (
    line.setdefault("role", role),
    line.setdefault("incarnation", incarnation),
  )
  if writer != (role, incarnation):
    return f"it was written by {writer[0]!r} in its life {writer[1]!r}"
  by_evaluator = (event, role) == (events.EVALUATED, "evaluator")
  if event in _OF_ISLANDS and not (by_evaluator or _is_island_role(role)):
    return f"only an island writes {event!r}"
  kinds: Kinds = _OF_ISLANDS.get(event) or _OF_OTHERS.get(event) or {}
  if why := (
    _wrong(line, _WALL)
    or _lacks(line, kinds)
    or _strange(line, _ANYWHERE)
    or _strange(line, _OPTIONAL.get(event, {}))
    or _wrong(line, _NOT_NULL.get(event, {}))
  ):
    return why
  name, *kinds_of_item = _ITEMS.get(event, ("", {}, {}, {}))
  for item in line[name] if name else ():
    if why := _fault_of_item(item, *kinds_of_item):
      return f"in {name!r}: {why}"
  if event == events.RESTORED:
    spans = line["version_from"], line["version_to"]
    if len({len(versions) for versions in spans}) > 1:
      return "its versions do not pair"
    if any(first >= last for first, last in zip(*spans, strict=True)):
      return "its versions do not rise"
  return ""


def fault_of_metric(line: dict[str, Any]) -> str:
  """Says what is wrong with a line of metrics; empty if nothing."""
  line.setdefault("incarnation", 1)
  return (
    _wrong(line, _WALL)
    or _lacks(line, _METRIC)
    or _strange(line, _METRIC_OPTIONAL)
    or _strange(line, _SCALARS)
  )


def _fault_of_item(
  item: Any, needed: Kinds, not_null: Kinds, optional: Kinds
) -> str:
  if not isinstance(item, dict):
    return "it is no object"
  return (
    _lacks(item, needed) or _wrong(item, not_null) or _strange(item, optional)
  )


def _is_island_role(role: str) -> bool:
  name, _, number = role.partition("-")
  return name == "island" and number.isdecimal() and len(number) < 5


def _lacks(line: Mapping[str, Any], kinds: Kinds) -> str:
  for name, kind in kinds.items():
    if name not in line:
      return f"its {name!r} is missing"
    if not kind(line[name]):
      return f"its {name!r} is {_shown(line[name])}"
  return ""


def _wrong(line: Mapping[str, Any], kinds: Kinds) -> str:
  for name, kind in kinds.items():
    if name in line and not kind(line[name]):
      return f"its {name!r} is {_shown(line[name])}"
  return ""


def _strange(line: Mapping[str, Any], kinds: Kinds) -> str:
  for name, kind in kinds.items():
    value = line.get(name)
    if value is not None and not kind(value):
      return f"its {name!r} is {_shown(value)}"
  return ""


def _shown(value: object) -> str:
  text = ascii(value)
  return text if len(text) <= 40 else text[:37] + "..."
