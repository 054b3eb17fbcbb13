"""An explained round as text for a terminal."""

import textwrap
from collections.abc import Iterator, Sequence

from diloco import config as config_lib
from diloco.report import figures
from diloco.tape import explain

_CAUSES: dict[explain.Cause, str] = {
  "all_in": "every live island was in",
  "grace_spent": "the quorum was there and the grace window had ended",
  "draining": "the quorum was there and the run was draining",
}
_NOT_KNOWN = "by a time not known (another syncer's clock)"


def render(facts: explain.Explanation, sync: config_lib.SyncConfig) -> str:
  """Returns the explanation, lines of at most about 100 columns."""
  return "\n".join([*_head(facts, sync), *_parts(facts), *_others(facts)])


def _head(
  facts: explain.Explanation, sync: config_lib.SyncConfig
) -> Iterator[str]:
  yield (
    f"fragment {facts.fragment}, version {facts.version}: closed because"
    f" {_CAUSES[facts.cause]}"
  )
  opener = facts.opened_by
  yield f"  opened     {'' if opener is None else f'by island {opener}'}"
  yield f"  quorum     of {sync.quorum} after {facts.quorum_secs:.3f} s"
  yield (
    f"  grace      offered {facts.grace_secs:.3f} s, spent"
    f" {facts.grace_spent_secs:.3f} s"
  )
  for line in _grace(facts, sync):
    yield f"             {line}"
  yield (
    f"  merge      {facts.merge_secs:.3f} s, outer gradient of norm"
    f" {facts.outer_grad_norm:.4g}"
  )
  token = "?" if facts.token is None else facts.token
  teller = f"{facts.role} {facts.incarnation}"
  who = f"a predecessor of {teller}" if facts.retold else teller
  yield f"  committed  by {who}, token {token}"
  yield f"  digest     {facts.digest or 'not on this tape'}"


def _grace(
  facts: explain.Explanation, sync: config_lib.SyncConfig
) -> Iterator[str]:
  """How the offer came about, as `diloco.syncer.grace` has it."""
  if sync.grace != "adaptive":
    yield f"fixed by config.sync.grace = {sync.grace!r}"
  elif facts.grace_facts:
    steps, known = sync.overlap_steps, facts.grace_facts
    spent = known["quorum_secs"] + known["sync_secs"]
    slack = steps * known["step_secs"] - spent
    yield (
      f"slack {slack:.3f} s = {steps:g} steps of {known['step_secs']:.3f} s"
      f" - {known['quorum_secs']:.3f} s to quorum"
      f" - {known['sync_secs']:.3f} s to merge"
    )
    yield (
      f"offer = min({sync.grace_gamma:g} slack, one step), at least 0;"
      " averages over rounds"
    )


def _parts(facts: explain.Explanation) -> Iterator[str]:
  named = ["in", "steps", "base", "staleness", "tokens", "weight", "share"]
  rows = [[*named, "after opening"]]
  rows += [
    [
      f"island {p.island}.{p.incarnation}",
      f"({p.first_step}, {p.step}]",
      str(p.base_version),
      str(p.staleness),
      f"{p.c_tokens:,}",
      f"{p.weight:.6g}",
      f"{100 * p.share:.1f} %",
      f"{p.waited_secs:.3f} s",
    ]
    for p in facts.parts
  ]
  yield ""
  aligned = figures.columns(rows, right=range(1, len(rows[0])))
  yield textwrap.indent(aligned, "  ")


def _others(facts: explain.Explanation) -> Iterator[str]:
  yield ""
  absent = ", ".join(f"island {m}" for m in facts.absent)
  yield f"  absent     {absent or 'none'}"
  yield from _list(
    "late",
    [
      f"{_who(one)} {_late(one)}"
      for one in sorted(facts.late, key=lambda late: late.key)
    ],
  )
  yield from _list(
    "discarded",
    [
      f"{_who(one)} {one.reason}{_arrived(one.arrived_secs)}"
      for one in facts.discarded
    ],
  )


def _list(name: str, lines: Sequence[str]) -> Iterator[str]:
  for i, line in enumerate(lines or ["none"]):
    yield f"  {'' if i else name:<9}  {line}"


def _who(one: explain.Late | explain.Discarded) -> str:
  return (
    f"island {one.island}.{one.incarnation}, steps ({one.first_step},"
    f" {one.step}]:"
  )


def _late(one: explain.Late) -> str:
  if one.fate == "pending":
    return "pending"
  if one.late_secs is None:
    return f"{_NOT_KNOWN}; {one.fate}"
  return f"{one.late_secs:.3f} s after the close; {one.fate}"


def _arrived(secs: float | None) -> str:
  return "" if secs is None else f", arrived {secs:.3f} s after the opening"
