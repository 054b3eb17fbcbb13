"""The last evaluation of a session, judged by what was evaluated.

A loss stands here for the values it is of: the checker finds out by itself of
which versions a loss can be. Who is asked may die, hang or be cut off; then
another must be, and only if nobody could may it be said that it is impossible.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from diloco.controller import outcome as outcome_lib
from diloco.controller import program as program_lib
from diloco.islands import protocol
from diloco.verification import faults, values
from diloco.verification import kernel as kernel_lib

_LOOK_SECS = 0.5
_ABLE_SECS = 25.0  # in which who is able, and is asked, must have done it
_LATE_SECS = 1.5  # until a controller knows who is able


class Evaluations:
  """Of one world."""

  def __init__(self, world: Any):
    self._world = world
    self._kernel: kernel_lib.Kernel = world.kernel
    self._faults = [
      f for f in world.schedule.faults if f.kind in faults.OF_THE_ASKED
    ]
    self._asked: list[str] = []  # for a last evaluation, one after another
    self._by: kernel_lib.Life | None = None  # the controller of these
    self._over = False  # whether it asks no more
    self._mine: set[str] = set()  # whom it has asked
    self._oldest: list[int] = []  # [P], versions that were newest then
    self._able: dict[kernel_lib.Life, float] = {}  # islands, since when
    self._slow: dict[kernel_lib.Life, float] = {}  # what they read, until
    self._struck = 0
    self._until = 0.0  # somebody was asked something else
    self.struck_until = 0.0  # by what meets those who are asked

  def begin(self, by: kernel_lib.Life) -> None:
    """A controller winds the session down."""
    if by is not self._by:
      self._by, self._over = by, False
      self._able, self._mine = {}, set()
      self._watch(by)

  def sent(self, sent: program_lib.Program) -> None:
    """A controller asks somebody something."""
    if sent.name in ("checkpoint", "stop") and not self._over:
      self._over, self._until = True, self._kernel.now
      self._able = {n: at for n, at in self._able.items() if n.alive}
    if sent.name == "evaluate" and sent.preempt:  # not one of many
      self._ask(sent)

  def _ask(self, sent: program_lib.Program) -> None:
    world, kernel = self._world, self._kernel
    self._oldest = [versions[-1].number for versions in world.checker.versions]
    self._mine.add(sent.peer)
    world.checker.seen["asked_another"] += (
      bool(self._asked) and self._asked[-1] != sent.peer
    )
    self._asked.append(sent.peer)
    for fault in self._faults:
      if fault.at == len(self._asked):
        kernel.log(sent.peer, f"fault: {fault}")
        kernel.struck[fault.kind] = kernel.struck.get(fault.kind, 0) + 1
        self._struck += 1  # and nobody else is
        self._strike(fault, world.by_name[sent.peer])

  def _strike(self, fault: faults.Fault, role: kernel_lib.Role) -> None:
    kernel, life, secs = self._kernel, role.life, fault.secs
    if life is None:
      return
    self.struck_until = max(self.struck_until, kernel.now + secs)
    if fault.kind == faults.KILL_ASKED:
      kernel.at(kernel.now + secs, lambda: kernel.kill(life, str(fault)))
    elif fault.kind == faults.PAUSE_ASKED:
      kernel.stop(life, secs)
    elif fault.kind == faults.SLOW_ASKED:
      self._slow[life] = kernel.now + secs
      role.strikes.append(faults.Fault(faults.SLOW, role.name, 0.0, secs))
      role.arm()
    else:
      cut = faults.Fault(faults.PARTITION, role.name, kernel.now, secs)
      self._world.happen(cut)

  def _watch(self, by: kernel_lib.Life) -> None:
    """Who is able to evaluate now, as long as this controller asks."""
    world, kernel = self._world, self._kernel
    if self._over or by is not self._by:
      return
    able: dict[kernel_lib.Life, float] = {}
    struck = sum(kernel.struck.values())
    if struck != self._struck:
      self._struck, self._able = struck, {}
    for role in world.islands:
      life = role.life
      if (
        life is not None
        and life.shell.present
        and life.stopped_until <= kernel.now
        and self._slow.get(life, 0.0) <= kernel.now
        and not (role.cut_off or world.store.full)
      ):
        able[life] = self._able.get(life, kernel.now)
    self._able = able
    kernel.at(kernel.now + _LOOK_SECS, lambda: self._watch(by))

  def evaluate(self, found: Sequence[protocol.Fetched]) -> dict[str, Any]:
    """What an island answers that has read these versions."""
    numbers = [one.head.version for one in found]
    return {
      "version": min(numbers),
      "newest_version": max(numbers),
      "loss": _loss([one.content for one in found]),
    }

  def judge(self, outcome: outcome_lib.Outcome, is_quiet: bool) -> None:
    """A session has ended by its budget."""
    seen, found = self._world.checker.seen, outcome.final_eval
    if not self._world.budget:
      return
    if found is None:
      seen["not_evaluated"] += 1
      if why := self._why_possible(is_quiet):
        raise kernel_lib.Violation(f"{outcome.reason}, although {why}")
      return
    seen["evaluated"] += 1
    committed = self._world.checker.versions
    choices = [
      versions[oldest:]
      for versions, oldest in zip(committed, self._oldest, strict=True)
    ]
    possible = [c for c in itertools.product(*choices) if _is_of(found, c)]
    if not possible:
      raise kernel_lib.Violation(
        f"the last evaluation is {found}, which is of no versions since"
        f" {self._oldest}"
      )
    untrained = not any(version.number for c in possible for version in c)
    if outcome.status != ("failed" if untrained else "finished"):
      raise kernel_lib.Violation(f"a session with {found} is {outcome.status}")

  def _why_possible(self, is_quiet: bool) -> str:
    """Why the last evaluation could have been done; empty if it may not."""
    if is_quiet:
      return "nothing was in its way"
    if self._world.damaging:
      return ""  # nobody may be able to read what was damaged
    for life, since in self._able.items():
      secs, name = self._until - since, life.role.name
      if secs > (_ABLE_SECS if name in self._mine else _LATE_SECS):
        return f"{name} was able to do it for {secs:.0f} s"
    return ""


def _loss(contents: Sequence[values.Version]) -> float:
  return sum(
    (place + 1) * sum(content.theta, 10.0 * content.number)
    for place, content in enumerate(contents)
  )


def _is_of(found: dict[str, Any], contents: Sequence[values.Version]) -> bool:
  return bool(found["loss"] == _loss(contents))
