"""Failures from a file.

A comma-separated file with a header; the columns are

    secs          since the start; may not go back
    target        a slice's number, island-<m>, syncer or store
    repair_secs   until it is back; empty or absent: drawn

A slice that fails alone fails as a drawn chip does; what fails at one moment is
a group, for whose repair a rigid job waits whatever fails meanwhile.
"""

import csv
import math
import os
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from diloco import errors

_COLUMNS = ("secs", "target", "repair_secs")
_ISLAND = re.compile(r"island-([0-9]{1,9})")
_SLICE = re.compile(r"[0-9]{1,9}")


class Entry(NamedTuple):
  """One failure of a trace; one of slice, island and service is set."""

  secs: float
  slice: int | None = None
  island: int | None = None
  service: str = ""  # "syncer", "store"
  repair_secs: float | None = None


def read(path: str | os.PathLike[str]) -> tuple[Entry, ...]:
  """Reads a trace; refuses what will not do, by its line."""
  place = f"trace {os.fspath(path)}"
  try:
    text = pathlib.Path(path).read_text()
  except (OSError, UnicodeDecodeError) as error:
    why = getattr(error, "strerror", None) or "it is no text"
    raise errors.UserError(place, why, "check the path") from error
  rows = csv.DictReader(text.splitlines())
  names = rows.fieldnames or []
  if not {"secs", "target"} <= set(names) or set(names) - set(_COLUMNS):
    raise errors.UserError(
      place,
      f"its header is {','.join(map(str, names)) or 'missing'}",
      f"the columns are {','.join(_COLUMNS)}",
    )
  entries: list[Entry] = []
  for row in rows:
    where = f"{place} line {rows.line_num}"
    errors.require(
      None not in row,
      where,
      f"it has more values than the header's {len(names)}",
      "correct the line",
    )
    entry = _entry(row, where)
    if entries and entry.secs < entries[-1].secs:
      raise errors.UserError(
        f"{where}: secs = {entry.secs:g}",
        f"the line before has {entries[-1].secs:g}, and time does not go back",
        "sort the trace",
      )
    entries.append(entry)
  return tuple(entries)


def write(path: str | os.PathLike[str], entries: Iterable[Entry]) -> None:
  """Writes a trace, which `read` gives back."""
  lines = [",".join(_COLUMNS)]
  for secs, number, island, service, repair_secs in entries:
    target = service or (number if island is None else f"island-{island}")
    lines.append(
      f"{secs!r},{target},{'' if repair_secs is None else repr(repair_secs)}"
    )
  with errors.writing(f"trace {os.fspath(path)}"):
    pathlib.Path(path).write_text("\n".join(lines) + "\n")


def _entry(row: dict[str, str], where: str) -> Entry:
  secs = _number(row.get("secs"), f"{where}: secs")
  repair = row.get("repair_secs")
  repair_secs = _number(repair, f"{where}: repair_secs") if repair else None
  target = (row.get("target") or "").strip()
  if target in ("syncer", "store"):
    return Entry(secs, service=target, repair_secs=repair_secs)
  if match := _ISLAND.fullmatch(target):
    return Entry(secs, island=int(match[1]), repair_secs=repair_secs)
  if _SLICE.fullmatch(target):
    return Entry(secs, slice=int(target), repair_secs=repair_secs)
  raise errors.UserError(
    f"{where}: target = {target!r}",
    "it is a slice's number, island-<m>, syncer or store",
    "correct the line",
  )


def _number(text: str | None, what: str) -> float:
  try:
    value = float(text or "")
  except ValueError:
    value = math.nan
  if not (math.isfinite(value) and value >= 0):
    raise errors.UserError(
      f"{what} = {text!r}",
      "it is a number of seconds, at least 0",
      "correct it",
    )
  return value
