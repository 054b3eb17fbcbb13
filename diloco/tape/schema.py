"""What a line of the record must have, so that whoever reads it can go on.

Listed is what readers take for granted, not all that is written; what they ask
for with a default is not. A line without it is a broken line.
"""

from collections.abc import Mapping
from typing import Any

from diloco.tape import events

_NUMBER = (int, float)
_STEPS = {"first_step": int, "step": int}
_SENT = {"fragment": int, **_STEPS}
_CONTRIBUTION = {"island": int, "incarnation": int, **_STEPS}

Kinds = Mapping[str, type | tuple[type, ...]]

# Written by an island, whose number is in its role.
_OF_ISLANDS: Mapping[str, Kinds] = {
  events.STARTED: {"step": int, "tokens_per_step": int},
  events.SUBMITTED: _SENT,
  events.PUBLISHED: _SENT,
  events.PUBLISH_DROPPED: _SENT,
  events.ADOPTED: {"fragment": int},
  events.RESYNCED: {"step": int, "fragments": list},
  events.EVALUATED: {
    "step": int,
    "target": str,
    "loss": (*_NUMBER, type(None)),
  },
  events.SAVING: {"step": int, "serial": int},
  events.CHECKPOINTED: {"step": int},
  events.REBASED: {"step": int, "fragment": int},
  events.POISONED: {"step": int, "fragment": int},
  events.STOPPED: {"step": int},
}
_OF_OTHERS: Mapping[str, Kinds] = {
  events.ISLAND_STARTED: {"island": int, "island_incarnation": int},
  events.ISLAND_DIED: {"island": int, "island_incarnation": int},
  events.ISLAND_RESTART: {"island": int},
  events.REATTACHED: {"peer": str},
  events.FAULT_INJECTED: {"kind": str, "target": str},
  events.CUT_COMPLETED: {"cut": int},
  events.RESTORED: {"version_from": list, "version_to": list},
  events.LEASE_ACQUIRED: {"token": int},
  events.ROUND_OPENED: {"fragment": int, "version": int, "island": int},
  events.MERGED: {"fragment": int, "version": int, "contributions": list},
  events.DISCARDED: {
    "island": int,
    "island_incarnation": int,
    "reason": str,
    **_SENT,
  },
  events.QUARANTINED: {"island": int, "island_incarnation": int},
  events.GLOBAL_DAMAGED: {"fragment": int, "version": int, "reason": str},
}
_ITEMS: Mapping[str, tuple[str, Kinds]] = {
  events.MERGED: ("contributions", _CONTRIBUTION),
  events.RESYNCED: ("fragments", {"fragment": int}),
}
_METRIC: Kinds = {"step": int, "incarnation": int}


def fault_of_event(line: dict[str, Any], role: str, incarnation: int) -> str:
  """Says what is wrong with a line of a tape; empty if nothing.

  Args:
    line: an object with an event; gets the writer's name if it has none.
    role: whose tape it is.
    incarnation: which life's.
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
  if event in _OF_ISLANDS and not role.startswith("island-"):
    return f"only an island writes {event!r}"
  kinds: Kinds = _OF_ISLANDS.get(event) or _OF_OTHERS.get(event) or {}
  if why := _lacks(line, kinds):
    return why
  name, of_item = _ITEMS.get(event, ("", {}))
  for item in line[name] if name else ():
    why = _lacks(item, of_item) if isinstance(item, dict) else "it is no object"
    if why:
      return f"in {name!r}: {why}"
  if event == events.RESTORED:
    spans = line["version_from"], line["version_to"]
    if len({len(versions) for versions in spans}) > 1:
      return "its versions do not pair"
  return ""


def fault_of_metric(line: dict[str, Any]) -> str:
  """Says what is wrong with a line of metrics; empty if nothing."""
  line.setdefault("incarnation", 1)
  return _lacks(line, _METRIC)


def _lacks(line: Mapping[str, Any], kinds: Kinds) -> str:
  for name, kind in kinds.items():
    if not isinstance(line.get(name, _MISSING), kind):
      found = f"{line[name]!r}" if name in line else "missing"
      return f"its {name!r} is {found}"
  return ""


_MISSING = object()
