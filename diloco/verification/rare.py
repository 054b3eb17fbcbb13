"""Rare states of the simulated world, by name.

Random faults reach what is likely. That they also reach the states in which
protocols go wrong is not a matter of faith: those states are named here, each
schedule counts how often it came to them, and a campaign that never reached one
of them has failed. A predicate is asked at one kind of event only, so that
counting costs next to nothing.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diloco.snapshots import keys
from diloco.verification import faults, values

# A campaign of so many schedules has reached each of them, or has failed.
ENOUGH = 3000


class State(NamedTuple):
  """A state worth counting."""

  event: str  # at which it is looked for; see `look`
  what: str  # in words
  # Whether it is there, given the world and the event's subject.
  holds: Callable[[Any, Any], bool]


def look(world: Any, event: str, subject: Any) -> None:
  """Counts the states that an event finds the world in.

  Events and their subjects: "lease" (the life that takes it), "lead" (the
  syncer), "arrival" (a commit record), "commit" (the version), "restore" (the
  cut that an earlier restore began to go back to, or 0), "comeback" (the
  island), "cut" (its parts), "adoption" (island, action, fragment).
  """
  seen = world.checker.seen
  for name, holds in _BY_EVENT.get(event, ()):
    if holds(world, subject):
      seen[name] += 1


def _has_open_cut(world: Any) -> bool:
  directories = world.store.directories
  names = directories.get("cuts")
  if not names:
    return False
  parts = directories[keys.cut_prefix(max(map(int, names)))]
  return keys.COMPLETE not in parts and keys.ABANDONED not in parts


def _is_damaged(world: Any) -> bool:
  return keys.SYNCER_LEASE in world.store.damaged


def _leads_already(world: Any, life: Any) -> bool:
  """Whether another living process believes that it leads."""
  return any(
    seat.life not in (None, life)
    and seat.life.shell.token
    and not seat.life.shell.fenced
    for seat in world.seats
  )


def _somebody_is_suspended(world: Any) -> bool:
  keeper = world.checker.leading_keeper
  return keeper is not None and keeper.suspends > 0


def _has_payload_without_head(world: Any, life: Any) -> bool:
  """Whether a version was written that no head points to."""
  for fragment, versions in enumerate(world.checker.versions):
    number = f"{versions[-1].number + 1:09d}."
    names = world.store.directories[keys.globals_prefix(fragment)]
    if any(name.startswith(number) for name in names):
      return True
  return False


def _board_is_behind(world: Any, syncer: Any) -> bool:
  """Whether the predecessor committed what it did not live to announce."""
  board = world.store.peek(keys.BOARD)
  return board is not None and any(
    head.version > shown
    for head, shown in zip(syncer.heads.records, board.versions, strict=True)
  )


def _is_listed_late(world: Any, record: Any) -> bool:
  """Whether later rows are merged already, and its own are not."""
  newest = world.checker.versions[record.fragment][-1]
  merged = newest.rows.get(record.island, ())
  span = record.first_step, record.step
  return (
    bool(merged)
    and merged[-1][0] >= record.step
    and not values.overlap(merged, (span,))
  )


def _is_of_a_former_life(world: Any, record: Any) -> bool:
  life = world.islands[record.island].life
  return life is None or life.incarnation != record.incarnation


def _is_half_muted(world: Any, island: Any) -> bool:
  """Whether one fragment is muted, and another goes on."""
  start = island.core.step
  muted = [p.first_step > start for p in island.core.positions]
  return any(muted) and not all(muted)


def _is_suspended(world: Any, island: Any) -> bool:
  keeper = world.checker.leading_keeper
  return keeper is not None and keeper.is_suspended(
    island.index, world.checker.leading_clock()
  )


STATES: dict[str, State] = {
  "damaged_lease_taken": State(
    "lease",
    "somebody took a damaged lease",
    lambda world, life: _is_damaged(world),
  ),
  "damaged_lease_taken_in_a_cut": State(
    "lease",
    "somebody took a damaged lease while a cut was open",
    lambda world, life: _is_damaged(world) and _has_open_cut(world),
  ),
  "lease_taken_in_a_cut": State(
    "lease",
    "leadership changed while a cut was open",
    lambda world, life: world.checker.moment > 0 and _has_open_cut(world),
  ),
  "lease_taken_from_the_living": State(
    "lease",
    "a leader was deposed that lives and does not know yet",
    _leads_already,
  ),
  "lease_taken_with_somebody_suspended": State(
    "lease",
    "leadership changed while an island was suspended",
    lambda world, life: _somebody_is_suspended(world),
  ),
  "lease_taken_after_a_payload": State(
    "lease",
    "a takeover between a version's payload and its head",
    _has_payload_without_head,
  ),
  "led_after_an_unannounced_commit": State(
    "lead",
    "a takeover between a version's head and its announcement",
    _board_is_behind,
  ),
  "merged_at_the_staleness_limit": State(
    "commit",
    "a contribution was merged that one more version would have made too old",
    lambda world, version: (
      0 < world.schedule.max_staleness == max(version.staleness)
    ),
  ),
  "merged_of_a_former_life": State(
    "commit",
    "a version has rows of two lives of an island",
    lambda world, version: any(
      world.islands[c.island].lives != c.incarnation for c in version.added
    ),
  ),
  "listed_late": State(
    "arrival",
    "a contribution was listed after a later one was merged",
    _is_listed_late,
  ),
  "arrived_of_a_former_life": State(
    "arrival",
    "a contribution was found whose island's process had ended",
    _is_of_a_former_life,
  ),
  "arrived_in_a_cut_from_before_it": State(
    "arrival",
    "a contribution was found during a cut, sent before it",
    lambda world, record: (
      world.schedule.cuts > 0
      and _has_open_cut(world)
      and record.cut < max(map(int, world.store.directories["cuts"]))
    ),
  ),
  "restore_resumed": State(
    "restore",
    "a restore that died was finished by another",
    lambda world, begun: bool(begun),
  ),
  "restore_by_a_stale_listing": State(
    "restore",
    "a restore chose its cut by an old listing",
    lambda world, begun: "restorer" in world.store.stale,
  ),
  "back_in_a_cut": State(
    "comeback",
    "an island came back while a cut was open",
    lambda world, island: _has_open_cut(world),
  ),
  "back_half_muted": State(
    "comeback",
    "an island came back with one fragment muted and another not",
    _is_half_muted,
  ),
  "back_while_suspended": State(
    "comeback",
    "an island came back while it was suspended",
    _is_suspended,
  ),
  "back_by_a_peer_while_suspended": State(
    "served",
    "an island took a peer's optimizer while it was suspended",
    _is_suspended,
  ),
  "back_without_its_saved_state": State(
    "comeback",
    "an island came back although its saved state could not be read",
    lambda world, island: world.kernel.now < world.unreadable[island.index],
  ),
  "cut_with_a_channel": State(
    "cut",
    "a cut was completed with contributions on their way",
    lambda world, parts: len(parts.contributions) > 0,
  ),
  "cut_without_an_island": State(
    "cut",
    "a cut was completed without an island, which was dead",
    lambda world, parts: len(parts.islands) < world.schedule.islands,
  ),
  "adopted_over_several_versions": State(
    "adoption",
    "an island went on to a version three or more after its own",
    lambda world, found: found[1].version > found[2].anchor.number + 2,
  ),
  "adopted_a_late_publication": State(
    "adoption",
    "an island fell silent: an earlier life's rows were merged after it looked",
    lambda world, found: found[1].muted_until > 0 and not found[1].resync,
  ),
}

_BY_EVENT: Mapping[str, list[tuple[str, Any]]] = collections.defaultdict(list)
for _name, _state in STATES.items():
  _BY_EVENT[_state.event].append((_name, _state.holds))

# Counted where they happen, and as necessary.
COUNTED = {
  "takeovers": "a syncer took over from another",
  "fenced": "a process was fenced out",
  "arrived_in_a_merge": "a leader looked and found something during a merge",
  "cut_in_a_merge": "a leader took part in a cut during a merge",
  "gate_gave_in": "a norm gate gave in after refusing everybody",
  "norm_outlier": "a contribution was refused for its norm",
  "not_finite": "a contribution was refused as not finite",
  "suspended": "a contribution was refused unseen",
  "waited_out": "an island that waits went on without an answer",
  "resyncs": "an island started again from the global parameters",
  "superseded": "a contribution was superseded by a later one",
  "overlaps_merged": "a contribution shared rows with what was merged",
  "passed_over": "a contribution was listed too late to be merged",
  "too_stale": "a contribution was too old",
  "corrupt": "a contribution's payload was damaged",
  "rejected": "a commit record was damaged",
  "before_restore": "a contribution of an earlier epoch was found",
  "discarded_after_its_merge": "a leader discarded what was merged unheard",
  "muted": "a fragment fell silent",
  "rebases": "a muted fragment spoke again",
  "carried": "an island put saved progress back",
  "served_by_peers": "an island took a peer's optimizer",
  "cuts": "a cut was completed",
  "cuts_abandoned": "a cut was given up",
  "struck_at_parts": "something failed, or died, as it wrote to a cut",
  "taken_up": "a controller took up roles that lived",
  "refused_starts": "the machine refused to start a role",
  "killed_for_silence": "a controller killed a role that said nothing",
  "set_back": "a run went back to a cut",
  "set_back_within": "a controller itself took its run back to a cut",
  "ended": "a controller wound a session down",
  "ended_in_order": "a session was wound down with nothing in its way",
  "evaluated": "a session ended with a last evaluation",
  "not_evaluated": "nobody was left who could do the last evaluation",
  "asked_another": "one island after another was asked for the last evaluation",
  "moved_away": "a run went on in another directory",
  "not_moved": "the copied tapes told of no cut to go on from",
  "refused_alive": "a run was not moved, for it was alive",
  "lost_channels": "a program, or its answer, went with its channel",
  "failed": "a controller ended a run, for too few roles were left",
  "failed_alike": "a controller ended a run in which a role failed twice alike",
  "forgiven_once": "a role failed early, in new words, and the run went on",
  "settled": "deaths in a row were forgiven, for a role had got on",
  "moved": "an island was started on another slice than before",
  "given_up": "a run went on without a role that had died too often",
  "mended": "a run went back because a newest version was spoiled",
  "healed": "a damaged head was written anew by whoever held it",
  "spoiled_cuts": "a cut was passed over that points to what is spoiled",
  "reinjected": "a contribution on its way at a cut waited again",
}


_PART = f"@{faults.NEAR_CUTS}"


def struck_at_parts(struck: Mapping[str, int]) -> int:
  """How often a part of a cut, or its end, was not simply written."""
  return sum(number for kind, number in struck.items() if kind.endswith(_PART))


def unreached(seen: Mapping[str, int]) -> list[str]:
  """States that a campaign never came to."""
  return [name for name in (*STATES, *COUNTED) if not seen.get(name)]
