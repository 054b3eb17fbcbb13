"""What must hold after a run, whatever was done to it: by tapes and ledger."""

import collections
import json
import pathlib
from typing import Any, NamedTuple

from diloco.tape import events, fates, ledger, reader

# Rows a successor or a restored island must read once more.
_READ_AGAIN = (fates.LOST_WITH_ISLAND, fates.ROLLED_BACK)


class Books(NamedTuple):
  """What the record of a run says.

  Attributes:
    broken: the rules that were broken, in words; none in a correct run.
    facts: tokens and rows by fate.
  """

  broken: list[str]
  facts: dict[str, Any]


def check(run_dir: pathlib.Path, *, must_finish: bool = True) -> Books:
  """Checks the record of a run that nobody is working on any more.

  `must_finish` tells whether it ended by itself.
  """
  record = reader.read(run_dir)
  found = ledger.compute(record)
  rows = found.unmerged_rows()
  broken = [*found.violations]
  broken += [f"the record is damaged: {problem}" for problem in record.problems]
  if found.unaccounted:
    broken.append(f"{found.unaccounted} fragment-tokens have no fate")
  if must_finish:
    for fate in _READ_AGAIN:
      if count := rows.get(fate):
        broken.append(f"{count} rows are {fate} and were not read again")
    broken += _unfinished(run_dir)
  broken += versions_broken(record.events)
  facts = {
    "trained": found.trained,
    "merged": found.merged,
    "pending": found.pending,
    "discarded": found.discarded,
    "rows_unmerged": rows,
  }
  return Books(broken, facts)


def versions_broken(lines: list[reader.Line]) -> list[str]:
  """Versions that do not grow by one, or that two processes committed.

  A return to a cut may leave versions out. A syncer that takes over tells the
  newest merge again, in the same words.
  """
  committers: dict[tuple[int, int], set[str]] = collections.defaultdict(set)
  versions: dict[int, set[int]] = collections.defaultdict(set)
  set_to: dict[int, set[int]] = collections.defaultdict(set)
  for line in lines:
    if line["event"] == events.MERGED:
      place = line["fragment"], line["version"]
      versions[place[0]].add(place[1])
      if "token" in line:
        committers[place].add(str(line["token"]))
    elif line["event"] == events.RESTORED:
      for fragment, version in enumerate(line["version_to"]):
        set_to[fragment].add(version)
  broken = [
    f"version {version} of fragment {fragment} has several committers: tokens"
    f" {', '.join(sorted(tokens))}"
    for (fragment, version), tokens in committers.items()
    if len(tokens) > 1
  ]
  for fragment, found in versions.items():
    known = found | set_to[fragment]
    gaps = sorted(v for v in found if v > 1 and v - 1 not in known)
    if gaps:
      broken.append(f"fragment {fragment} jumps to versions {gaps}")
  return broken


def _unfinished(run_dir: pathlib.Path) -> list[str]:
  """Why a run does not count as finished; nothing if it does."""
  try:
    facts = json.loads((run_dir / "summary.json").read_text())
  except (OSError, ValueError) as error:
    return [f"there is no summary: {error}"]
  if facts["status"] != "finished":
    return [f"the run is {facts['status']}, not finished"]
  if facts["tokens_trained"] < (facts["tokens_budget"] or 0):
    return [
      f"{facts['tokens_trained']} of {facts['tokens_budget']} tokens trained"
    ]
  return []
