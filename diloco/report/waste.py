"""Work that is in vain, or not merged: when to warn, and what to change."""

from collections.abc import Mapping

from diloco import config as config_lib
from diloco.report import figures
from diloco.tape import fates

LIMIT = 0.05  # share of the trained tokens
# From this gain on runs with H = 12 were ruined (docs/results.md); what of them
# holds for twice that was not measured.
_GAIN, _STEPS = 1.4, 24

_SLOW_STORE = (
  "raise config.sync.every, so that islands publish less often, or set"
  " a config.sync.codec of fewer bits"
)
_OLD_CUT = (
  "lower config.programs.cut_every_secs, unless you asked to go back so far"
)
_REMEDIES = {
  fates.OVERWRITTEN: "set config.sync.adoption = 'carry'",
  fates.PUBLISH_DROPPED: _SLOW_STORE,
  fates.SUPERSEDED: _SLOW_STORE,
  fates.LOST_WITH_ISLAND: (
    "lower config.programs.checkpoint_every_steps or config.sync.every"
  ),
  fates.REPEATED: "lower config.programs.checkpoint_every_steps",
  fates.ROLLED_BACK: _OLD_CUT,
  fates.QUARANTINED: "lower the task's learning rate, or mend its loss",
  "before_restore": _OLD_CUT,
  "too_stale": "raise config.sync.max_staleness",
  "norm_outlier": "raise config.sync.gate_factor, if those updates are sound",
  "not_finite": (
    "their updates held NaN or infinite values, so lower the task's learning"
    " rate, or mend its loss"
  ),
  "norm_overflow": "lower the task's learning rate",
}
_SUSPENDED = "suspended"  # for what was refused before: see that


def warning(trained: int, discarded: Mapping[str, int]) -> str:
  """Says that too much was given up, and which setting to change.

  Of tokens, `discarded` by reason; empty if it is not too much.
  """
  total = sum(discarded.values())
  if total <= LIMIT * trained:
    return ""
  reason = what = max(discarded, key=lambda name: discarded[name])
  offences = ("not_finite", "norm_outlier", "norm_overflow")
  before = {name: discarded[name] for name in offences if name in discarded}
  if reason == _SUSPENDED and before:
    reason = max(before, key=lambda name: before[name])
    what = f"{_SUSPENDED} after {reason}"
  remedy = _REMEDIES.get(reason, "see the report for why")
  return (
    f"{figures.percent(total / trained)} of the trained tokens were discarded,"
    f" most of them as {what}: {remedy}"
  )


def left(trained: int, pending: int) -> str:
  """Says that a run has ended before much of its work was merged.

  Of tokens; empty if it is not much.
  """
  if pending <= LIMIT * trained:
    return ""
  return (
    f"{figures.percent(pending / trained)} of the trained tokens are in no"
    " global version, since the store or the syncer was too slow for the end:"
    " 'diloco resume' with a greater config.total_tokens goes on with them;"
    f" {_SLOW_STORE}"
  )


def overshoot(config: config_lib.RunConfig) -> str:
  """Says that momentum makes outer steps too long for so frequent rounds.

  Measured only where rounds close without all islands; empty elsewhere.
  """
  outer, sync, islands = config.outer, config.sync, config.fleet.islands
  long = outer.momentum > 0 and outer.gain >= _GAIN
  if not (long and sync.every <= _STEPS and sync.quorum < islands):
    return ""
  return (
    f"config.outer has a gain of {figures.number(outer.gain)}, rounds come"
    f" every {sync.every} steps and close with {sync.quorum} of {islands}"
    f" islands: at 12 steps runs were ruined from a gain of {_GAIN} on; set"
    " config.outer.momentum = 0 and config.outer.learning_rate = 1"
  )
