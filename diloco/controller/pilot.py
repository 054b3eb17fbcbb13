"""What to dispatch next: the run's plan, from progress alone.

Pure decisions: progress comes in, programs to dispatch go out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from diloco import config as config_lib
from diloco.controller import program


@dataclasses.dataclass(frozen=True)
class Wanted:
  """A program to dispatch to an island."""

  island: int
  name: program.Name
  args: Mapping[str, Any]


class Pilot:
  """Keeps every island supplied with programs until the budget is trained."""

  def __init__(self, config: config_lib.RunConfig, tokens_per_step: int):
    self._config = config
    self._tokens_per_step = tokens_per_step
    self._tokens = 0  # after every step of any island somebody asks
    self._steps: dict[int, int] = {}
    # By island, from which step on a step had how many tokens.
    self._rates: dict[int, list[tuple[int, int]]] = {}
    self._next_eval_tokens = 0
    # Evaluations are numbered by the tokens at which they are due.
    self._eval_done: int | None = None
    self._eval_asked: int | None = None
    self._next_checkpoint: dict[int, int] = {}
    speeds = [s.relative_speed for s in config.fleet.slices]
    self._by_speed = sorted(
      range(config.fleet.islands), key=lambda m: (-speeds[m], m)
    )

  @property
  def tokens(self) -> int:
    """Tokens trained by all islands, as far as heard of."""
    return self._tokens

  def _tokens_of(self, island: int) -> int:
    tokens, until = 0, self._steps.get(island, 0)
    for since, rate in reversed(self._rates.get(island, ())):
      tokens += (until - since) * rate
      until = since
    return tokens + until * self._tokens_per_step

  @property
  def budget_spent(self) -> bool:
    """Whether the run's tokens are trained."""
    return self.tokens >= self._config.total_tokens

  def observe(self, island: int, step: int) -> bool:
    """Takes an island's step count in; says whether it moved.

    What it says before it has joined counts for nothing: an island that is
    still starting cannot be asked to evaluate, drain or save.
    """
    moved = step > self._steps.get(island, step)
    if moved:
      before = self._tokens_of(island)
      self._steps[island] = step
      self._tokens += self._tokens_of(island) - before
    return moved

  def joined(self, island: int, step: int, tokens_per_step: int = 0) -> None:
    """An island is ready, at `step`, which may be before where it died.

    Steps that it does now have `tokens_per_step`, if not those of the others.
    """
    before = self._tokens_of(island)
    self._steps[island] = step
    rates = [r for r in self._rates.pop(island, ()) if r[0] < step]
    if rates or tokens_per_step:
      now = (step, tokens_per_step or self._tokens_per_step)
      self._rates[island] = [*rates, now]
    self._tokens += self._tokens_of(island) - before
    # What was due stays due: else lives that are shorter would never save.
    due = step + self._config.programs.checkpoint_every_steps
    self._next_checkpoint[island] = min(
      due, self._next_checkpoint.get(island, due)
    )

  def begin_anew(self) -> None:
    """The run was set back; how far islands are is known once they join."""
    self._steps, self._rates, self._tokens = {}, {}, 0

  def wanted(self, queued: Mapping[int, int]) -> list[Wanted]:
    """Programs to dispatch now; `queued` are each island's train windows."""
    programs = self._config.programs
    wanted: list[Wanted] = []
    for island, windows in sorted(queued.items()):
      if windows >= programs.windows_ahead:
        continue
      for name, args in self._extras(island, queued):
        wanted.append(Wanted(island, name, args))
      window = {"num_steps": programs.window_steps}
      missing = programs.windows_ahead - windows
      wanted += [Wanted(island, "train", window)] * missing
    return wanted

  def _extras(
    self, island: int, queued: Mapping[int, int]
  ) -> list[tuple[program.Name, Mapping[str, Any]]]:
    """What an island does between two train windows."""
    programs = self._config.programs
    extras: list[tuple[program.Name, Mapping[str, Any]]] = []
    every_steps = programs.checkpoint_every_steps
    due = self._next_checkpoint.get(island, 0)
    if every_steps and self._steps.get(island, 0) >= due:
      self._next_checkpoint[island] = self._steps[island] + every_steps
      extras.append(("checkpoint", {"wait": False}))
    every_tokens = programs.eval_every_tokens
    fastest = next((m for m in self._by_speed if m in queued), None)
    if (
      every_tokens
      and not programs.evaluator
      and island == fastest
      and self.tokens >= self._next_eval_tokens
    ):
      self._next_eval_tokens = self.tokens + every_tokens
      args = {"target": "global", "num_batches": self._eval_batches}
      extras.append(("evaluate", args))
    return extras

  @property
  def _eval_batches(self) -> int:
    programs = self._config.programs
    return programs.eval_batches or programs.final_eval_batches

  def evaluation(self, *, free: bool) -> Mapping[str, Any]:
    """What the run's evaluator is to do now.

    Evaluations that are due while it is not `free`, that is ready and with
    nothing to do, are left out, but for the last.

    Returns:
      Arguments of the program "evaluate"; none if nothing is due.
    """
    number = self.tokens // self._config.programs.eval_every_tokens
    if self._eval_done is None:
      self._eval_done = number - 1  # before the first nothing is left out
    if not free or number <= self._eval_done:
      return {}
    self._eval_asked = number
    return {
      "num_batches": self._eval_batches,
      "step": max(self._steps.values(), default=0),
      "skipped": number - self._eval_done - 1,
    }

  def evaluated(self) -> None:
    """The evaluator has answered; one that died is asked again."""
    if self._eval_asked is not None:  # else an earlier controller asked
      self._eval_done = self._eval_asked
