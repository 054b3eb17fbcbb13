"""A run in plain words."""

from diloco.report import figures, summary
from diloco.report import goodput as goodput_lib
from diloco.report import view as view_lib
from diloco.tape import fates

_ENDINGS = {
  "finished": "It ended as planned",
  "stopped": "It was stopped in order",
  "failed": "It failed",
  "killed": "It was killed",
  "crashed": "It crashed: its controller left no word of an end",
  "running": "It has not ended, or nobody was left to say so",
}

_SETTINGS = (
  ("name", "name"),
  ("task.name", "task"),
  ("seed", "seed"),
  ("total_tokens", "token budget"),
  ("fleet.num_islands", "islands (0: one for each slice)"),
  ("fleet.pace_step_secs", "emulated step time, seconds (0: none)"),
  ("sync.num_fragments", "fragments P"),
  ("sync.fragments_by", "fragments by"),
  ("sync.every", "steps between syncs H"),
  ("sync.overlap_steps", "overlap steps"),
  ("sync.quorum", "quorum K"),
  ("sync.grace", "grace window"),
  ("sync.codec", "codec"),
  ("sync.adoption", "adoption"),
  ("sync.merge", "merge"),
  ("sync.merge_embeddings", "merge of embeddings"),
  ("outer.optimizer", "outer optimizer"),
  ("outer.learning_rate", "outer learning rate"),
  ("outer.momentum", "outer momentum"),
)

# What became of tokens, by fate, and of chip time.
_FATES = {
  "useful": "Compute of steps that were kept, or their pace where emulated.",
  "in vain": "Compute of steps that were lost, done again or rolled back.",
  "stalls": "Between two steps, beyond compute and pace.",
  "waiting": "For answers, without which a synchronous method does not go on.",
  "starting": "From launch to the first step: import, restore, compile.",
  "dead": "From the last step to the next launch.",
  "restarting": "The same after a death.",
  "other": "Evaluations, checkpoints, draining, and the rest of start and end.",
  fates.MERGED: "They are in a global version.",
  fates.PENDING: (
    "Published and waiting to be merged, or trained and not published yet."
  ),
  fates.UNACCOUNTED: "Nothing is known of them. This must not happen.",
  fates.OVERWRITTEN: (
    "An island adopted a newer global version over them, between publishing a"
    " fragment and receiving it back."
  ),
  fates.LOST_WITH_ISLAND: (
    "Trained by an island that died before it had published them."
  ),
  fates.REPEATED: (
    "Trained again after a restart, for the sake of other fragments; their"
    " first training was published."
  ),
  fates.QUARANTINED: (
    "Given up by an island that had sent what must not be merged."
  ),
  fates.ROLLED_BACK: (
    "Merged into a version that a return to an earlier cut took back."
  ),
  fates.PUBLISH_DROPPED: (
    "Their publication was dropped by the island, for a newer one or because"
    " the store could not be reached."
  ),
  fates.SUPERSEDED: (
    "Replaced by a later contribution that was to contain them."
  ),
  "too_stale": (
    "They started from a global version older than the staleness limit."
  ),
  "passed_over": (
    "The store listed their contribution only after later steps were merged."
  ),
  "overlapped": (
    "Published by a life of their island that had ended, beside a later one's"
    " publication that begins in the middle of it."
  ),
  "overlaps_merged": (
    "Their contribution also held steps that had been merged already."
  ),
  "before_restore": (
    "Published before the run was set back to a cut, and not of that cut."
  ),
  "corrupt_record": "The record of their contribution could not be read.",
  "corrupt": "Their contribution was damaged or incomplete in the store.",
  "not_finite": "Their update held NaN or infinite values; quarantined.",
  "no_weight": "All in their round were too stale for any weight.",
  "norm_mismatch": "The update was not what its record said of it.",
  "norm_outlier": (
    "The update was far longer than others had been; quarantined."
  ),
  "norm_overflow": "The update was too large to merge; quarantined.",
  "suspended": "Their island was suspended after repeated refusals.",
}
_OTHER_REASON = "Refused by the syncer; the tape has the details."


def explain(fate: str) -> str:
  """Returns what a fate, or a reason for discarding, means."""
  return _FATES.get(fate, _OTHER_REASON)


def goodput_note(goodput: goodput_lib.Goodput) -> str:
  """Returns how goodput comes about."""
  return (
    f"{figures.percent(goodput.ratio)} ="
    f" {goodput.useful_chip_secs:,.1f} useful chip-seconds over"
    f" {goodput.allocated_chip_secs:,.1f} allocated: the whole time the run was"
    " on, for every island of the fleet. So a short run shows much start-up."
  )


def emulation_note(view: view_lib.RunView) -> str:
  """Returns a remark if the speed of some island is emulated."""
  paced = [m for m, island in view.islands.items() if island.paced]
  if not paced:
    return ""
  which = "all islands"
  if len(paced) < len(view.islands):
    noun = "islands" if len(paced) > 1 else "island"
    which = f"{noun} {', '.join(map(str, paced))}"
  return (
    f"Emulated speed: the steps of {which} were to be stretched to a set pace,"
    " to stand for unequal hardware; those are not the speeds of this machine."
    + _missed_paces(view)
  )


def _missed_paces(view: view_lib.RunView) -> str:
  """Says where the machine was too busy for the pace that was asked for."""
  missed = [
    f"island {m} (asked {figures.secs(island.paced_step_secs)} a step, seen"
    f" {figures.secs(island.missed_pace)})"
    for m, island in view.islands.items()
    if island.missed_pace is not None
  ]
  if not missed:
    return ""
  return f" The pace was not kept by {', '.join(missed)}: it took longer."


def settings(view: view_lib.RunView) -> list[tuple[str, object]]:
  """Returns the settings that matter most, by name."""
  found: list[tuple[str, object]] = []
  for path, label in _SETTINGS:
    value: object = view.config
    for part in path.split("."):
      value = value.get(part) if isinstance(value, dict) else None
    if value is not None:
      found.append((label, value))
  if view.outer_gain is not None:
    found.append(("outer gain G", figures.number(view.outer_gain)))
  return found


def environment(view: view_lib.RunView) -> list[tuple[str, object]]:
  """Returns what the islands ran under last; those alike together."""
  groups: dict[tuple[str, ...], list[str]] = {}
  for number, island in view.islands.items():
    told = [
      ", ".join(f"{name} {value}" for name, value in sorted(found.items()))
      for found in (island.software, island.environ)
    ]
    machine = _number_of(island.devices, "device")
    if island.cores:
      machine += f" on {_number_of(len(island.cores), 'core')}"
    groups.setdefault((machine, *told), []).append(str(number))
  return [
    (f"{label}, island{'s' * (len(numbers) > 1)} {', '.join(numbers)}", text)
    for key, numbers in groups.items()
    for label, text in zip(
      ("machine", "versions", "variables"), key, strict=True
    )
    if text
  ]


def story(run: summary.Run) -> list[str]:
  """Returns what happened, as sentences."""
  view, tokens = run.view, run.ledger.tokens()
  number = len(view.sessions.all)
  sessions = f", in {number} sessions" if number > 1 else ""
  told = [
    f"{_number_of(view.num_islands, 'island')} trained"
    f" {figures.count(tokens.trained)} tokens in"
    f" {figures.secs(view.wall_secs)}{sessions}."
  ]
  told.append(_ending(view))
  if view.merges.count:
    mean = figures.number(view.merges.islands_mean)
    told.append(
      f"The syncer merged {view.merges.count:,} times, with"
      f" {mean} islands in a merge on average;"
      f" {figures.percent(tokens.merged / max(tokens.trained, 1))} of the"
      " tokens are in the global parameters."
    )
  else:
    told.append("Nothing was merged.")
  told += [f"Warning: {text}." for text in summary.warnings(run)]
  told += _incidents(run)
  told += _safety(view)
  told.append(emulation_note(view))
  return [sentence for sentence in told if sentence]


def _ending(view: view_lib.RunView) -> str:
  session = view.sessions.last
  text = _ENDINGS.get(view.status, f"Its end was recorded as {view.status!r}")
  if session is not None and session.reason:
    text += f" ({session.reason})"
  return text + "."


def _number_of(number: int, noun: str) -> str:
  return f"{number or 'no'} {noun}" + ("" if number == 1 else "s")


def _safety(view: view_lib.RunView) -> list[str]:
  """What the run did to stay safe: leaders, refusals, cuts, roll-backs."""
  told = []
  if view.takeovers:
    told.append(
      f"A syncer took over from one that led"
      f" {_number_of(view.takeovers, 'time')}."
    )
  if view.quarantines:
    islands = sorted(view.quarantines)
    told.append(
      f"What it sent had islands {', '.join(map(str, islands))} quarantined,"
      f" {_number_of(view.quarantines.total(), 'time')} in all;"
      f" {_number_of(len(view.resyncs), 'time')} one started again from the"
      " global parameters."
    )
  if view.cuts:
    told.append(
      f"{_number_of(view.cuts, 'consistent cut')} taken, the last of them"
      f" cut {view.last_cut}."
    )
  for line in view.restores.values():
    told.append(f"It was set back to cut {line.get('cut')}: {line.get('why')}.")
  return told


def _incidents(run: summary.Run) -> list[str]:
  incidents = run.incidents
  if not incidents:
    return ["No fault was injected and no role died."]
  injected = sum(incident.injected for incident in incidents)
  others = len(incidents) - injected
  told = [
    f"{_number_of(injected, 'fault').capitalize()} injected;"
    f" {_number_of(others, 'role')} died of other causes."
  ]
  backs = [i.back_secs for i in incidents if i.back_secs is not None]
  if backs:
    told.append(
      f"{len(backs)} of {len(incidents)} targets came back, the slowest after"
      f" {figures.secs(max(backs))}."
    )
  gaps = [i.worst_gap for i in incidents if i.worst_gap is not None]
  if gaps:
    told.append(
      "Around these incidents no surviving island waited longer between two"
      f" steps than {figures.times(max(gaps))} its own median."
    )
  return told
