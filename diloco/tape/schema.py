"""What a line of the record must be, so that whoever reads it can go on.

Listed is what readers look at, not all that is written: fields they take for
granted; fields `_if_there`, that a tape of an older version may lack, and that
are never null; and fields `_at_most`, that they ask for with a default, which
may be missing or null but not of another kind. A line that breaks this is a
broken line. So a reader need not doubt the type of anything it finds.
"""

from collections.abc import Callable, Mapping
from typing import Any

from diloco.tape import events

Kind = Callable[[Any], bool]
Kinds = Mapping[str, Kind]

_MAX_ISLANDS = 10_000
_MAX_LIVES = 1_000_000
_MAX_FRAGMENTS = 10_000
_MAX_COUNT = 1 << 53  # integers that a float holds exactly
_MAX_SECS = 1e11
_MISSING = object()  # in place of a field's value


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
_is_island = _below(_MAX_ISLANDS)
_is_life = _below(_MAX_LIVES)
_is_fragment = _below(_MAX_FRAGMENTS)


def _or_none(kind: Kind) -> Kind:
  return lambda value: value is None or kind(value)


def _if_there(kind: Kind, *names: str) -> Kinds:
  return dict.fromkeys(names, lambda value: value is _MISSING or kind(value))


def _at_most(kind: Kind, *names: str) -> Kinds:
  return _if_there(_or_none(kind), *names)


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


def _is_maker(value: Any) -> bool:
  """An island, and in which of its lives."""
  return _list_of(_is_life)(value) and len(value) == 2


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
  return isinstance(value, dict) and not (value and _fault(value, _GRACE))


_GRACE = dict.fromkeys(("step_secs", "quorum_secs", "sync_secs"), _is_number)
_STEPS = dict.fromkeys(("first_step", "step"), _is_count)
_SENT = {"fragment": _is_fragment, **_STEPS}
_LIFE = {"island": _is_island, "island_incarnation": _is_life}
_VERSION = {"fragment": _is_fragment, "version": _is_count}
_GIVEN_UP = {
  **_at_most(_is_answer, "answer"),
  **_at_most(_is_count, "lost_from_step", "lost_to_step", "muted_until"),
}
_WALL = _if_there(_is_secs, "wall_secs")
_ANYWHERE = {
  **_WALL,
  **_at_most(_is_island, "island"),
  **_at_most(_is_text, "key"),
  **_at_most(_is_count, "c_tokens", "bytes", "step"),
  **_at_most(_is_secs, "secs"),
}

# Written by an island, whose number is in its role.
_OF_ISLANDS: Mapping[str, Kinds] = {
  events.STARTED: {
    "step": _is_count,
    "tokens_per_step": _is_count,
    **_at_most(_is_text, "kind", "topology"),
    **_at_most(_is_count, "devices", "replicas", "scheduled"),
    **_at_most(_is_secs, "relative_speed", "paced_step_secs"),
    **_at_most(_is_number, "own_rate"),
    **_at_most(_is_list, "base_digests", "cores"),
    **_at_most(_list_of(_is_count), "unsent_from_step", "base_versions"),
    **_at_most(_list_of(_is_answer), "answers"),
    **_at_most(_list_of(_is_island), "present"),
    **_at_most(_list_of(_or_none(_is_maker)), "initial_by"),
    **_at_most(_is_object, "software", "environ"),
  },
  events.SUBMITTED: _SENT,
  events.PUBLISHED: {
    **_SENT,
    **_if_there(_is_text, "key"),
    **_if_there(_is_count, "base_version"),
  },
  events.PUBLISH_DROPPED: _SENT,
  events.ADOPTED: {
    "fragment": _is_fragment,
    **_at_most(_is_count, "version"),
    **_GIVEN_UP,
  },
  events.RESYNCED: {"step": _is_count, "fragments": _is_list},
  events.EVALUATED: {
    "step": _is_count,
    "target": _is_text,
    "loss": _or_none(_is_number),
    **_at_most(_is_number, "bits_per_token"),
    **_at_most(_is_count, "skipped", "tokens", "version"),
  },
  events.SAVING: {"step": _is_count, "serial": _is_count},
  events.CHECKPOINTED: {"step": _is_count},
  events.REBASED: {"step": _is_count, "fragment": _is_fragment},
  events.POISONED: {"step": _is_count, "fragment": _is_fragment},
  events.STOPPED: {"step": _is_count},
}
_OF_OTHERS: Mapping[str, Kinds] = {
  events.RUN_STARTED: {
    **_at_most(_is_text, "method"),
    **_at_most(_is_island, "islands"),
    **_at_most(_is_count, "total_tokens", "token"),
  },
  events.RUN_FINISHED: _at_most(_is_text, "status", "reason"),
  events.ISLAND_STARTED: _LIFE,
  events.ISLAND_READY: _LIFE,
  events.ISLAND_DIED: _LIFE,
  events.ISLAND_RESTART: {"island": _is_island},
  events.SLICES_CHANGED: {"island": _is_island, "present": _is_list},
  events.SYNCER_DIED: {
    **_at_most(_is_flag, "led"),
    **_at_most(_is_text, "seat"),
  },
  events.REATTACHED: {"peer": _is_text},
  events.FAULT_INJECTED: {
    "kind": _is_text,
    "target": _is_text,
    **_at_most(_is_count, "at_tokens"),
  },
  events.CONFIG_CHANGED: {"changes": _is_changes},
  events.CUT_REQUESTED: {"cut": _is_count},
  events.CUT_COMPLETED: {
    "cut": _is_count,
    **_at_most(_list_of(_is_count), "versions"),
  },
  events.CUT_ABANDONED: {"cut": _is_count},
  events.RESTORED: {
    "version_from": _list_of(_is_count),
    "version_to": _list_of(_is_count),
    **_at_most(_is_count, "cut", "epoch"),
    **_at_most(_list_of(_is_text), "reinjected"),
    **_at_most(_is_flag, "torn"),
    **_at_most(_are_steps, "steps"),
  },
  events.NOT_RESTORED: {
    "fragments": _list_of(_is_fragment),
    "reason": _is_text,
  },
  events.LEASE_ACQUIRED: {"token": _is_count},
  events.ROUND_OPENED: {**_VERSION, "island": _is_island},
  events.MERGED: {
    **_VERSION,
    "contributions": _is_list,
    **_if_there(_is_count, "token"),
    **_if_there(_list_of(_is_island), "absent"),
    **_if_there(_is_number, "quorum_secs", "grace_secs", "grace_spent_secs"),
    **_if_there(_is_number, "merge_secs", "outer_grad_norm"),
    **_at_most(_is_number, "opened_at", "closed_at"),
    **_at_most(_is_number, "learning_rate", "cosine"),
    **_at_most(_are_grace_facts, "grace_facts"),
  },
  events.DISCARDED: {
    **_LIFE,
    "reason": _is_text,
    **_SENT,
    **_if_there(_is_text, "key"),
    **_at_most(_is_number, "arrived_at"),
  },
  events.QUARANTINED: {**_LIFE, **_at_most(_is_secs, "suspended_secs")},
  events.GLOBAL_DAMAGED: {**_VERSION, "reason": _is_text},
  events.HEAD_HEALED: _VERSION,
  events.MEMBER_JOINED: {"island": _is_island},
  events.MEMBER_LOST: {"island": _is_island},
  events.STORE_REQUESTS: {
    **dict.fromkeys(("reads", "writes", "lists"), _is_count),
    **_at_most(_is_count, "deletes"),
    "over_secs": _is_secs,
  },
}
_EVENTS: Mapping[str, Kinds] = {
  event: {**_ANYWHERE, **kinds}
  for event, kinds in {**_OF_ISLANDS, **_OF_OTHERS}.items()
}
# Of lines that list things: the list's name, and what each thing must be.
_ITEMS: Mapping[str, tuple[str, Kinds]] = {
  events.MERGED: (
    "contributions",
    {
      "island": _is_island,
      "incarnation": _is_life,
      **_STEPS,
      **_if_there(_is_text, "key"),
      **_if_there(_is_count, "c_tokens", "staleness"),
      **_if_there(_is_number, "weight", "waited_secs"),
      **_at_most(_is_number, "arrived_at"),
    },
  ),
  events.RESYNCED: ("fragments", {"fragment": _is_fragment, **_GIVEN_UP}),
}
_METRIC = {
  "step": _is_count,
  "incarnation": _is_life,
  **_at_most(_is_number, "loss"),
  **_at_most(_is_count, "tokens"),
  **_at_most(_is_secs, "step_secs", "gap_secs"),
}
METRICS = tuple(_METRIC)  # what any line of metrics may have
_ANY_METRIC = {
  **_METRIC,
  **_WALL,
  **_at_most(_is_number, "grad_norm", "update_norm", "learning_rate"),
  **_at_most(_are_scalars, "task"),
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
  if why := _fault(line, _EVENTS.get(event, _ANYWHERE)):
    return why
  name, kinds = _ITEMS.get(event, ("", {}))
  for item in line[name] if name else ():
    why = _fault(item, kinds) if isinstance(item, dict) else "it is no object"
    if why:
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
  return _fault(line, _ANY_METRIC)


def _is_island_role(role: str) -> bool:
  name, _, number = role.partition("-")
  return name == "island" and number.isdecimal() and len(number) < 5


def _fault(line: Mapping[str, Any], kinds: Kinds) -> str:
  for name, kind in kinds.items():
    value = line.get(name, _MISSING)
    if not kind(value):
      missing = value is _MISSING
      return f"its {name!r} is {'missing' if missing else _shown(value)}"
  return ""


def _shown(value: object) -> str:
  text = ascii(value)
  return text if len(text) <= 40 else text[:37] + "..."
