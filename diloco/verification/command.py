"""`diloco simulate-protocol`: campaigns, single seeds, traces, shrinking."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from diloco import errors
from diloco.verification import (
  campaign,
  rare,
  schedules,
  shrink,
  world,
)

_LINES = 400  # of a trace, the last ones
_LOG_LINES = 20  # of progress, where nobody watches


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Runs the command; gives the exit code, and what `--json` prints.

  Raises:
    UserError: the flags make no sense.
  """
  if args.jobs < 1 or args.schedules < 0 or args.seed < 0:
    raise errors.UserError(
      "simulate-protocol",
      "--seed, --schedules and --jobs cannot be negative",
      "leave them out for the defaults",
    )
  if args.schedule or args.trace:
    return _run_one(args)
  return _run_many(args)


def _run_one(args: Any) -> tuple[int, dict[str, Any]]:
  """Plays one schedule, with its trace if wanted."""
  schedule = (
    schedules.Schedule.from_json(args.schedule)
    if args.schedule
    else schedules.draw(args.seed)
  )
  trace: list[str] | None = [] if args.trace else None
  outcome = world.run(schedule, trace)
  if trace is not None:
    say = sys.stderr if args.json else sys.stdout
    for fault in schedule.faults:
      print(f"fault: {fault}", file=say)
    for line in trace if len(trace) < 5000 else trace[-_LINES:]:
      print(line, file=say)
  facts = {
    "schedule": schedule.to_json(),
    "violation": outcome.violation,
    "rounds": outcome.rounds,
    "virtual_secs": outcome.secs,
    "faults": outcome.struck,
    "states": outcome.seen,
  }
  if not args.json:
    print(outcome.violation or f"no violation in {outcome.rounds} rounds")
  return (1 if outcome.violation else 0), facts


def _run_many(args: Any) -> tuple[int, dict[str, Any]]:
  """Plays many schedules; the first failure is shrunk and printed."""
  count = args.schedules or 1000
  with _progress(count) as told:
    tally = campaign.run(args.seed, count, args.jobs, told)
  facts = tally.to_dict()
  if tally.violations and not args.no_shrink:
    seed, reason = tally.violations[0]
    small = shrink.shrink(schedules.draw(seed), shrink.fails_like(reason))
    facts["shrunk"] = small.to_json()
    print(
      f"seed {seed} shrunk to:\n"
      f"  diloco simulate-protocol --trace --schedule='{small.to_json()}'",
      file=sys.stderr,
    )
  if not args.json:
    print(
      f"{tally.schedules} schedules, {tally.num_violations} violations,"
      f" {facts['schedules_per_sec_per_core']:.0f} schedules per second and"
      f" core, {facts['rounds_per_schedule']:.1f} rounds each"
    )
    _tell_states(tally)
  return (1 if tally.num_violations or tally.unreached else 0), facts


def _tell_states(tally: campaign.Tally) -> None:
  """In how many schedules each rare state was reached, the rarest first."""
  what = {name: state.what for name, state in rare.STATES.items()}
  for name, words in sorted(
    (what | rare.COUNTED).items(), key=lambda item: tally.reached[item[0]]
  ):
    print(f"{tally.reached[name]:8d}  {name}: {words}")
  if tally.unreached:
    print(
      f"never reached in {tally.schedules} schedules:"
      f" {', '.join(tally.unreached)}"
    )


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[campaign.Tally], None]]:
  """Violations on stderr as they are found, and how far the campaign is.

  Where somebody watches, the last line is written over.
  """
  watched = sys.stderr.isatty()
  end = "\r" if watched else "\n"
  every = 1 if watched else max(count // _LOG_LINES, 1)
  known: set[int] = set()
  shown = 0

  def told(tally: campaign.Tally) -> None:
    nonlocal shown
    for seed, reason in tally.violations:
      if seed not in known:
        known.add(seed)
        print(f"seed {seed}: {reason}", file=sys.stderr)
    if tally.schedules - shown >= every:
      shown = tally.schedules
      line = f"{shown}/{count} schedules, {tally.num_violations} violations"
      print(line, end=end, file=sys.stderr, flush=True)

  yield told
  if watched:
    print(file=sys.stderr)
