"""What a simulated fleet delivered: figures of one seed, and of several.

*Goodput* is the useful share of allocated chip-time, *uptime* the share of
wall time in which some island trains. Goodput and losses by cause add up to 1.
Over seeds each figure has its mean, its lowest and its highest value.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy import special

from diloco.planning.fleet import jobs, traffic


@dataclasses.dataclass(frozen=True)
class Job:
  """One island, or a whole synchronous job.

  Attributes:
    history: what became of it.
    pace: its speed, that of its slowest slice; the fleet's fastest is 1.
    share: useful part of its slices' time while they train; the rest waits
      for the slowest slice, or for a straggler.
  """

  history: jobs.History
  pace: float
  share: float


@dataclasses.dataclass(frozen=True)
class Outcome:
  """One seed."""

  jobs: tuple[Job, ...]  # [M], and islands of extra capacity after them
  # Of the windows in which rounds were simulated.
  tallies: tuple[traffic.Tally, ...]
  horizon_secs: float  # simulated
  failures: int  # of chips and groups
  service_outages: int  # of syncer and store
  covered: float  # share of the horizon that the windows cover

  @property
  def waiting(self) -> float:
    """Share of training time spent waiting for rounds, in the windows."""
    waited = sum(float(t.waiting_secs.sum()) for t in self.tallies)
    total = sum(
      t.secs * len(t.steps) - float(t.stopped_secs.sum()) for t in self.tallies
    )
    return waited / total if total > 0 else 0.0

  @property
  def allocated(self) -> float:
    """Slice-seconds."""
    return sum(job.history.allocated for job in self.jobs)

  @property
  def goodput(self) -> float:
    """Useful share of the allocated time."""
    useful = sum(job.history.useful * job.share for job in self.jobs)
    share = useful * (1 - self.waiting) / self.allocated
    return max(share, 0.0)  # sums of nothing round to either side

  @property
  def losses(self) -> dict[str, float]:
    """Shares of the allocated time by cause; with goodput they make 1."""
    sums = np.sum([job.history.losses for job in self.jobs], axis=0)
    found = dict(
      zip(jobs.LOSSES, (sums / self.allocated).tolist(), strict=True)
    )
    slow = sum(job.history.useful * (1 - job.share) for job in self.jobs)
    found["stragglers"] = slow / self.allocated
    useful = sum(job.history.useful * job.share for job in self.jobs)
    found["rounds"] = useful * self.waiting / self.allocated
    return found

  @property
  def uptime(self) -> float:
    """Share of wall time in which some island trains."""
    moments, changes = [], []
    for job in self.jobs:
      history = job.history
      moments += [history.start_secs, history.end_secs]
      changes += [1, -1]
      for start, end, _ in history.pauses:
        moments += [start, end]
        changes += [-1, 1]
    order = np.argsort(moments, kind="stable")
    times = np.array(moments)[order]
    training = np.cumsum(np.array(changes)[order])
    up = np.diff(times)[training[:-1] > 0].sum()
    return float(up / self.horizon_secs)

  @property
  def tokens(self) -> list[float]:
    """Share of all trained tokens, by island."""
    found = [job.history.useful * job.pace for job in self.jobs]
    total = sum(found)
    return [one / total if total else 0.0 for one in found]

  def figures(self) -> dict[str, float]:
    """Returns all single figures by name; not a number if unknown."""
    interruptions = sum(job.history.interruptions for job in self.jobs)
    coalesced = sum(job.history.coalesced for job in self.jobs)
    merges = sum(t.merges for t in self.tallies)
    secs = sum(t.secs for t in self.tallies)
    steps = sum(float(t.steps.sum()) for t in self.tallies)
    return {
      "goodput": self.goodput,
      "uptime": self.uptime,
      "failures": float(self.failures),
      "interruptions": float(interruptions),
      "coalesced_failures": float(coalesced),
      "service_outages": float(self.service_outages),
      "contributors_per_merge": traffic.mean(_contributors(self.tallies)),
      "islands_training_per_merge": (
        sum(t.alive for t in self.tallies) / merges if merges else math.nan
      ),
      "staleness": traffic.mean(
        sum((t.staleness for t in self.tallies), Counter())
      ),
      "merges_per_sec": merges / secs if secs else math.nan,
      "waiting": self.waiting,
      "merged_share": _share([t.merged_steps for t in self.tallies], steps),
      "overwritten_share": _share(
        [t.overwritten_steps for t in self.tallies], steps
      ),
    }


def _share(parts: Sequence[int], steps: float) -> float:
  """Fragment-steps per island step; divided by P it is a share."""
  return sum(parts) / steps if steps else math.nan


def _contributors(tallies: Sequence[traffic.Tally]) -> Counter[int]:
  return sum((t.contributors for t in tallies), Counter())


def interval(values: Sequence[float]) -> dict[str, float | None]:
  """Returns mean, low and high over seeds; None where nothing is known."""
  known = [value for value in values if math.isfinite(value)]
  if not known:
    return {"mean": None, "low": None, "high": None}
  return {"mean": float(np.mean(known)), "low": min(known), "high": max(known)}


def combine(outcomes: Iterable[Outcome], num_fragments: int) -> dict[str, Any]:
  """Returns the figures of several seeds as plain values.

  Of each seed only what they are made of is kept, not all that happened in it.
  """
  figures, losses, tokens, covered = [], [], [], []
  tallies: list[traffic.Tally] = []
  for one in outcomes:
    figures.append(one.figures())
    losses.append(one.losses)
    tokens.append(one.tokens)
    tallies += one.tallies
    covered.append(one.covered)
  for row in figures:
    for name in ("merged_share", "overwritten_share"):
      row[name] /= num_fragments
  facts: dict[str, Any] = {
    name: interval([row[name] for row in figures]) for name in figures[0]
  }
  facts["downtime"] = {
    name: interval([row[name] for row in losses]) for name in losses[0]
  }
  facts["tokens_by_island"] = [
    interval(list(column)) for column in zip(*tokens, strict=True)
  ]
  facts["rounds"] = _windows(tallies, covered)
  return facts


def _windows(
  tallies: Sequence[traffic.Tally], covered: Sequence[float]
) -> dict[str, Any]:
  """How much of the rounds was simulated, and how sure that makes them."""
  means = [traffic.mean(t.contributors) for t in tallies if t.contributors]
  error = None
  if len(means) > 1:
    # 95 % by Student's t, for windows are few.
    quantile = float(special.stdtrit(len(means) - 1, 0.975))
    error = quantile * float(np.std(means, ddof=1)) / math.sqrt(len(means))
  sizes = _contributors(tallies)
  return {
    "windows": len(tallies),
    "secs": sum(t.secs for t in tallies),
    "covered": float(np.mean(covered)),
    "merges": sum(t.merges for t in tallies),
    "contributors_error": error,
    "contributors": {str(n): sizes[n] for n in sorted(sizes)},
  }
