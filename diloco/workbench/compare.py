"""Runs against each other: what differs in them, and what came out.

Runs that differ in the seed alone are one *group*. Its figures are means with
95 % intervals by Student's t over its seeds; one seed has none. Differences
between groups are taken seed by seed, so what a seed does to both cancels.
"""

import dataclasses
import itertools
import json
import math
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from diloco import errors, process, typed
from diloco.planning.fleet import flags
from diloco.report import figures, listing
from diloco.workbench import frozen, opened, worker

SIMULATION = "simulation"  # in place of a task
_LEVEL = 0.95
_SLICES = "config.fleet.slices["
_ISLANDS = "config.fleet.num_islands"


# Of a summary or a simulation, dearest first: what to call it, how to show it.
SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {
  "final_eval_bits_per_token": (
    "held-out bits per token",
    lambda value: figures.number(value, 4),
  ),
  "goodput.mean": ("goodput", figures.percent),
  "uptime.mean": ("uptime", figures.percent),
  "contributors_per_merge.mean": ("islands a merge", figures.number),
  "tokens_per_sec": ("tokens a second", figures.count),
  "wall_secs": ("time", figures.secs),
  "goodput": ("goodput", figures.percent),
  "merges.contributors_mean": ("islands a merge", figures.number),
  "merges.staleness_mean": ("staleness", figures.number),
  "bytes_published": ("published", figures.num_bytes),
}


def shown(found: Sequence[Mapping[str, float]]) -> list[str]:
  """The figures worth showing that any of them has."""
  return [key for key in SHOWN if any(key in one for one in found)]


def headline(result: Mapping[str, float]) -> str:
  """The dearest figure in words."""
  for key in shown([result])[:1]:
    return f"{SHOWN[key][0]} {SHOWN[key][1](result[key])}"
  return ""


@dataclasses.dataclass(frozen=True)
class Entry:
  """A run, or a point of a simulator.

  Attributes:
    place: its directory.
    task: what it trains, or "simulation".
    fields: its configuration but name and seed, by dotted names.
    seed: its seed.
    status: how it ended.
    results: its figures, by names of `SHOWN` and more.
  """

  place: pathlib.Path
  task: str
  fields: Mapping[str, Any]
  seed: int
  status: str
  results: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Interval:
  """A mean of `n` values, and where it lies with 95 %; None from one value."""

  mean: float
  low: float | None
  high: float | None
  n: int


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs that differ in the seed alone."""

  label: str  # the fields that tell it from other groups, on one line
  # The same, by dotted names; those that differ between groups.
  fields: Mapping[str, Any]
  entries: tuple[Entry, ...]  # its runs
  results: Mapping[str, Interval]  # its figures by name


@dataclasses.dataclass(frozen=True)
class Comparison:
  """All groups."""

  fields: tuple[str, ...]  # that differ between groups, by dotted names
  shown: tuple[str, ...]  # figures worth showing, dearest first
  groups: tuple[Group, ...]  # in the order of the directories
  notes: tuple[str, ...]  # what is to be said besides

  def has_shares(self, key: str) -> bool:
    """Whether `differences` of a figure can be relative, for every group."""
    return all(_by_seed(self.groups[0].entries, key).values())

  def differences(
    self, key: str, *, relative: bool = False
  ) -> list[Interval | None]:
    """Each group's figure minus that of the first, seed by seed.

    With `relative`, as a share of that of the first. One for each group but the
    first; None where no seed is in both.
    """
    first = _by_seed(self.groups[0].entries, key)
    found = []
    for group in self.groups[1:]:
      own = _by_seed(group.entries, key)
      pairs = [
        (own[seed] - first[seed]) / (first[seed] if relative else 1.0)
        for seed in own
        if seed in first
      ]
      found.append(interval(pairs) if pairs else None)
    return found

  def to_json(self) -> dict[str, Any]:
    """Returns plain JSON values."""
    groups = [
      {
        "fields": dict(group.fields),
        "runs": [
          {"dir": str(e.place), "seed": e.seed, "status": e.status}
          for e in group.entries
        ],
        "results": {k: dataclasses.asdict(r) for k, r in group.results.items()},
      }
      for group in self.groups
    ]
    differences = {
      key: [d and dataclasses.asdict(d) for d in self.differences(key)]
      for key in self.shown
    }
    return typed.finite(
      {
        "differing_fields": list(self.fields),
        "level": _LEVEL,
        "groups": groups,
        "differences_to_first_group": differences,
        "notes": list(self.notes),
      }
    )


def interval(values: Sequence[float]) -> Interval:
  """Returns the mean of n values and its interval by Student's t.

  mean ± t(n - 1) s / sqrt(n); one value has none
  """
  n, mean = len(values), float(np.mean(values))
  if n == 1:
    return Interval(mean, None, None, n)
  quantile = float(special.stdtrit(n - 1, (1 + _LEVEL) / 2))
  half = quantile * float(np.std(values, ddof=1)) / math.sqrt(n)
  return Interval(mean, mean - half, mean + half, n)


def compare(places: Iterable[pathlib.Path]) -> Comparison:
  """Compares runs, by their directories, those of sweeps or any above them.

  Raises:
    UserError: one is neither, is of another version, or trains another task.
  """
  entries, notes = _load(places)
  groups: dict[str, list[Entry]] = {}
  for entry in entries:
    groups.setdefault(json.dumps(entry.fields, sort_keys=True), []).append(
      entry
    )
  if any(len(members) == 1 for members in groups.values()):
    notes.append("A single run has no interval: give more seeds.")
  if len({frozenset(e.seed for e in found) for found in groups.values()}) > 1:
    notes.append(
      "Groups are not of the same seeds: differences are of those in common,"
      " means are not."
    )
  if any(map(_share_draws, groups.values())):
    notes.append(
      "Simulations of one group have seeds in common, since each takes as many"
      " as --seeds from its own on: their intervals are too narrow."
    )
  kinds = [members[0].fields for members in groups.values()]
  fields = frozen.differing(kinds)
  labels = frozen.names(kinds, "all runs")
  keys = shown([entry.results for entry in entries])
  for label, members in zip(labels, groups.values(), strict=True):
    # One that diverged has no loss: its group looks better without it.
    ended = [one for one in members if one.status != "running"]
    lacking = sum(keys[0] not in one.results for one in ended) if keys else 0
    if lacking:
      notes.append(
        f"{label}: {lacking} of {len(ended)} runs came to no"
        f" {SHOWN[keys[0]][0]}, as one that diverges or does not get so far,"
        " and are in no mean or difference of it."
      )
  return Comparison(
    tuple(fields),
    tuple(keys),
    tuple(
      Group(
        label,
        {field: members[0].fields.get(field) for field in fields},
        tuple(members),
        _results(members),
      )
      for label, members in zip(labels, groups.values(), strict=True)
    ),
    tuple(notes),
  )


def _share_draws(members: Sequence[Entry]) -> bool:
  """Whether simulations of a group were made from some of the same seeds."""
  if members[0].task != SIMULATION:
    return False
  given = members[0].fields.get("seeds")
  count = int(given or flags.parser().get_default("seeds"))
  firsts = sorted(one.seed for one in members)
  return any(b - a < count for a, b in itertools.pairwise(firsts))


def _runs(places: Iterable[pathlib.Path], notes: list[str]) -> list[Entry]:
  """Reads runs; notes those that cannot be."""
  entries = []
  for place in places:
    try:
      entries.append(_run(place))
    except errors.UserError as error:
      notes.append(f"Left out: {error}")
  return entries


def _load(places: Iterable[pathlib.Path]) -> tuple[list[Entry], list[str]]:
  """Reads entries and notes of what is to be compared, each directory once."""
  found: dict[pathlib.Path, Entry] = {}
  notes: list[str] = []
  for place in places:
    if (place / frozen.FILE).exists():
      sweep = frozen.read(place)
      points = [place / point.name for point in sweep.points]
      if sweep.kind == "simulate":
        entries = _simulations(place, sweep)
      else:
        entries = _runs(filter(process.holds_run, points), notes)
      if missing := len(points) - len(entries):
        notes.append(
          f"{place}: {missing} of {len(points)} points have nothing to show and"
          " are left out."
        )
    else:
      runs = [] if process.holds_run(place) else [*listing.below(place)]
      entries = _runs(runs, notes) if runs else [_run(place)]
    found |= {entry.place.resolve(): entry for entry in entries}
  if not found:
    raise errors.UserError(
      "this comparison", "no point has a result yet", "sweep first"
    )
  first, *others = found.values()
  for other in others:
    if other.task != first.task:
      raise errors.UserError(
        f"{first.place} and {other.place}",
        f"they are of different tasks, {first.task!r} and {other.task!r}, whose"
        " results cannot be compared",
        "compare runs of one task",
      )
  return _with_fleets(_with_islands(list(found.values()))), notes


def _with_islands(entries: list[Entry]) -> list[Entry]:
  """The same; where some leave islands to their slices, these are counted."""
  if len({entry.fields.get(_ISLANDS) for entry in entries}) == 1:
    return entries
  found = []
  for entry in entries:
    slices = {
      f.partition("]")[0] for f in entry.fields if f.startswith(_SLICES)
    }
    fields = dict(entry.fields)
    fields[_ISLANDS] = fields.get(_ISLANDS) or len(slices)
    found.append(dataclasses.replace(entry, fields=fields))
  return found


def _with_fleets(entries: list[Entry]) -> list[Entry]:
  """The same; fleets of different sizes are one field each, in words."""
  fleets = [
    [f for f in entry.fields if f.startswith(_SLICES)] for entry in entries
  ]
  if len({len(fleet) for fleet in fleets}) == 1:
    return entries
  found = []
  for entry, fleet in zip(entries, fleets, strict=True):
    rest = {f: v for f, v in entry.fields.items() if f not in fleet}
    words = _fleet({f: entry.fields[f] for f in fleet})
    fields = {"config.fleet.slices": words} | rest
    found.append(dataclasses.replace(entry, fields=fields))
  return found


def _fleet(fields: Mapping[str, Any]) -> str:
  """Slices in words: "2 x cpu, 1 x v5p 2x4 at 0.6"."""
  slices: dict[str, dict[str, Any]] = {}
  for field, value in fields.items():
    number, _, name = field.removeprefix(_SLICES).partition("].")
    slices.setdefault(number, {})[name] = value
  words = []
  for one in slices.values():
    shape, speed = str(one["topology"]), one["relative_speed"]
    parts = [str(one["kind"]), *([shape] if shape != "1" else [])]
    words.append(" ".join([*parts, *([f"at {speed:g}"] if speed != 1 else [])]))
  return ", ".join(f"{n} x {word}" for word, n in Counter(words).items())


def _run(place: pathlib.Path) -> Entry:
  run = opened.Run(place)
  facts = run.summary
  fields = dict(process.flat(run.settings.to_dict()))
  for name in ("config.name", "config.seed"):
    del fields[name]
  return Entry(
    place,
    run.settings.task.name,
    fields,
    run.settings.seed,
    str(facts["status"]),
    worker.flat(facts),
  )


def _simulations(place: pathlib.Path, sweep: frozen.Sweep) -> list[Entry]:
  found = []
  for point in sweep.points:
    if facts := frozen.outcome(place, point.name):
      fields = dict(point.config)
      seed = fields.pop("seed", 0)
      fields.pop("name", None)
      found.append(
        Entry(
          place / point.name,
          SIMULATION,
          fields,
          seed,
          facts["status"],
          facts["result"],
        )
      )
  return found


def _results(entries: Sequence[Entry]) -> dict[str, Interval]:
  found, entries = {}, _settled(entries)
  for key in dict.fromkeys(key for e in entries for key in e.results):
    found[key] = interval(list(_by_seed(entries, key).values()))
  return found


def _settled(entries: Sequence[Entry]) -> Sequence[Entry]:
  """Those that train no more, whose figures are whole; all if none does."""
  return [one for one in entries if one.status != "running"] or entries


def _by_seed(entries: Sequence[Entry], key: str) -> dict[int, float]:
  """A figure by seed; runs of one seed count as one, by their mean."""
  found: dict[int, list[float]] = {}
  for entry in _settled(entries):
    if key in entry.results:
      found.setdefault(entry.seed, []).append(entry.results[key])
  return {seed: float(np.mean(values)) for seed, values in found.items()}
