"""From a run's tape to a plan of its replay: pure, no arrays, no processes.

Only what some version depends on is planned: a life is followed up to its last
publication that was merged, or its last state that another life took over.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from diloco import errors
from diloco.replay import order, script
from diloco.snapshots import keys
from diloco.tape import events, reader

_REMEDY = (
  "replay with the version of diloco that ran it; earlier versions wrote less"
)


def make(
  record: reader.Record,
  heads: Iterable[Mapping[str, Any]] = (),
  until_version: int | None = None,
) -> order.Plan:
  """Plans the replay of all versions.

  Args:
    record: all tapes of a run, unbroken.
    heads: the newest versions, and what the store's heads say of their
      merges; a syncer that was killed may not have told the tape of the last
      one.
    until_version: leave out later versions that no earlier one depends on.

  Raises:
    UserError: the tape lacks what a replay needs.
  """
  if until_version is not None and until_version < 1:
    raise errors.UserError(
      f"--until_version={until_version}",
      "no merge made a version below 1",
      "name a version from 1 on",
    )
  lives = _lives(record)
  makings: dict[script.VersionId, script.Making] = {}
  for initial in _initials(record):
    makings.setdefault(initial.id, initial)
  heads, told = list(heads), dict[script.VersionId, script.Merge]()
  merges = [e for e in record.events if e["event"] == events.MERGED]
  for line in [*merges, *(h for h in heads if "contributions" in h)]:
    merge = _merge(line)
    known = told.setdefault(merge.id, merge)
    if known.digest != merge.digest:
      raise errors.UserError(
        f"the tape's lines of {merge.id}",
        f"they have two digests, {known.digest} and {merge.digest}",
        "the tape contradicts itself; restore it",
      )
  makings |= told
  for back in _returns(record):
    makings[back.id] = back
  newest = (script.VersionId(h["fragment"], h["version"]) for h in heads)
  wanted = [
    v
    for v in dict.fromkeys([*makings, *newest])
    if until_version is None or v.version <= until_version
  ]
  if not any(v.version for v in wanted):
    raise errors.UserError(
      "replay",
      "the tape tells of no merge, so there is nothing to compare",
      "name the directory of a run that has merged something",
    )
  return order.plan(lives, makings, wanted)


def _lives(record: reader.Record) -> dict[script.LifeId, script.Life]:
  """All lives that began, with everything they did."""
  lines: dict[script.LifeId, list[reader.Line]] = collections.defaultdict(list)
  for line in record.events:
    role, _, number = line["role"].rpartition("-")
    if role == "island":
      lines[script.LifeId(int(number), line["incarnation"])].append(line)
  lives = {}
  for life, own in lines.items():
    started = next((e for e in own if e["event"] == events.STARTED), None)
    if started is not None:
      lives[life] = _life(life, started, own)
  _add_states(lives)
  return lives


def _life(
  life: script.LifeId, started: reader.Line, own: list[reader.Line]
) -> script.Life:
  with _whole(f"the tape of {life}"):
    settings = script.Settings(
      topology=started["topology"],
      cores=tuple(started["cores"]),
      environ=dict(started["environ"]),
      software=dict(started["software"]),
      total_tokens=started["total_tokens"],
      present=tuple(started.get("present") or ()),
      own_rate=started.get("own_rate"),
    )
    beginning = script.Beginning(
      step=started["step"],
      versions=tuple(started["base_versions"]),
      first_steps=tuple(started["unsent_from_step"]),
      saved=_state(life, started["checkpoint"]),
      lent=_state(life, started["peer"]),
      answers=tuple(started["answers"]),
      scheduled=started["scheduled" if "present" in started else "step"],
    )
    told = beginning.versions, beginning.first_steps, beginning.answers
    list(zip(*told, strict=True))  # or they are not of the same fragments
    operations = tuple(o for line in own for o in _operations(life, line))
  return script.Life(life, settings, beginning, operations)


@contextlib.contextmanager
def _whole(tape: str) -> Iterator[None]:
  """Refuses lines that do not say all."""
  try:
    yield
  except (KeyError, TypeError) as error:
    raise errors.UserError(
      tape, f"a line lacks the field {error}", _REMEDY
    ) from error
  except ValueError as error:
    raise errors.UserError(
      tape, f"a line is not whole: {error}", _REMEDY
    ) from error


def _state(
  life: script.LifeId, told: Mapping[str, int] | None
) -> script.StateId | None:
  if told is None:
    return None
  island = told.get("island", life.island)
  serial = told.get("serial", 0)
  return script.StateId(island, told["incarnation"], told["step"], serial)


def _operations(
  life: script.LifeId, line: reader.Line
) -> Iterator[script.Operation]:
  """What a line says the island's main thread did."""
  match line["event"]:
    case events.SUBMITTED:
      key = keys.contribution_name(line["fragment"], *life, line["step"])
      yield script.Publish(
        line["step"],
        line["fragment"],
        line["base_version"],
        line["first_step"],
        key,
      )
    case events.ADOPTED:
      yield script.Adopt(
        line["step"],
        line["fragment"],
        line["version"],
        line["kept_from_step"],
        line.get("muted_until") or 0,
        bool(line.get("resync")),
        *(line.get("answer") or ()),
      )
    case events.REBASED:
      yield script.Rebase(line["step"], line["fragment"])
    case events.RESYNCED:
      for one in line["fragments"]:
        yield script.Adopt(
          line["step"],
          one["fragment"],
          one["version"],
          line["step"],  # nothing is kept
          one.get("muted_until") or 0,
          True,
          *(one.get("answer") or ()),
        )
      yield script.Mend(line["step"], _state(life, line["checkpoint"]))
    case events.POISONED:
      yield script.Poison(line["step"], line["fragment"])
    case events.SAVING:
      state = script.StateId(*life, line["step"], line["serial"])
      yield script.Save(line["step"], state)


def _add_states(lives: dict[script.LifeId, script.Life]) -> None:
  """Keeps of the saved states those that were taken over, and lends."""
  taken = {life.beginning.saved for life in lives.values()}
  for life in lives.values():
    taken |= {o.source for o in life.operations if isinstance(o, script.Mend)}
  lent = [s for life in lives.values() if (s := life.beginning.lent)]
  for life_id, life in lives.items():
    operations = [
      o
      for o in life.operations
      if not isinstance(o, script.Save) or o.state in taken
    ]
    for state in sorted(s for s in set(lent) if s[:2] == life_id):
      # Nothing between two steps but `Mend` touches an optimizer's state.
      later = (i for i, o in enumerate(operations) if o.step > state.step)
      where = next(later, len(operations))
      operations.insert(where, script.Lend(state.step, state))
    lives[life_id] = dataclasses.replace(life, operations=tuple(operations))


def _initials(record: reader.Record) -> Iterator[script.Initial]:
  """Who made version 0 of each fragment, as those say who started from it."""
  for line in record.events:
    if line["event"] != events.STARTED:
      continue
    with _whole(f"the tape of {line['role']}"):
      told = list(zip(line["initial_by"], line["base_digests"], strict=True))
    for fragment, (life, digest) in enumerate(told):
      if life is not None:
        version = script.VersionId(fragment, 0)
        yield script.Initial(version, script.LifeId(*life), digest)


def _merge(line: Mapping[str, Any]) -> script.Merge:
  version = script.VersionId(line["fragment"], line["version"])
  with _whole(f"the tape's line of {version}"):
    shares = tuple(
      script.Share(**{name: c[name] for name in script.Share._fields})
      for c in line["contributions"]
    )
    return script.Merge(version, shares, line["digest"], line["learning_rate"])


def _returns(record: reader.Record) -> Iterator[script.Return]:
  for line in record.events:
    if line["event"] == events.RESTORED:
      with _whole(f"the tape of {line['role']}"):
        told = line["version_from"], line["version_to"]
        pairs = list(zip(*told, strict=True))
      for fragment, (old, new) in enumerate(pairs):
        yield script.Return(
          script.VersionId(fragment, new), script.VersionId(fragment, old)
        )
