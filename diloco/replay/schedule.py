"""What a replay can do next: pure bookkeeping over a plan.

Only one thing is done at a time. A life goes on until it needs a version that
does not exist yet; a version is merged as soon as it can be. When nothing can
go on and something is left, the tape cannot be true.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

from diloco import errors
from diloco.replay import script


class Begin(NamedTuple):
  """Make a life's first state."""

  life: script.LifeId


class Advance(NamedTuple):
  """Do the next operations of a life, and the steps between them."""

  life: script.LifeId
  operations: Sequence[script.Operation]
  last: bool  # nothing of the life is left


class Make(NamedTuple):
  """Make a version."""

  making: script.Making


Task = Begin | Advance | Make


class Schedule:
  """Progress through a plan."""

  def __init__(self, plan: script.Plan):
    """Starts with nothing done."""
    self._plan = plan
    # Versions of a fragment are made in their order.
    self._left: dict[int, collections.deque[script.Making]] = {}
    for version, making in sorted(plan.makings.items()):
      self._left.setdefault(version.fragment, collections.deque())
      self._left[version.fragment].append(making)
    self._made: set[script.VersionId] = set()
    self._published: set[str] = set()
    self._kept: set[tuple[type, script.StateId]] = set()
    self._done: dict[script.LifeId, int] = {}  # operations, once begun
    self._uses = _uses(plan)
    self._current: script.LifeId | None = None

  def next(self) -> Task | None:
    """The next task, to be done before the call after it; None at the end.

    Raises:
      UserError: nothing can go on.
    """
    for left in self._left.values():
      if left and self._can_make(left[0]):
        self._made.add(left[0].id)
        return Make(left.popleft())
    # The life that is in memory first.
    lives = sorted(self._plan.lives, key=lambda i: (i != self._current, i))
    for life_id in lives:
      task = self._go_on(self._plan.lives[life_id])
      if task is not None:
        self._current = life_id
        return task
    self._check_end()
    return None

  def _can_make(self, making: script.Making) -> bool:
    match making:
      case script.Initial():
        return True
      case script.Return():
        return making.of in self._made
      case script.Merge():
        keys = {share.key for share in making.shares}
        return making.before in self._made and keys <= self._published

  def _go_on(self, life: script.Life) -> Task | None:
    done = self._done.get(life.id)
    if done is None:
      if not self._can_begin(life.beginning):
        return None
      self._done[life.id] = 0
      return Begin(life.id)
    end = done
    for operation in life.operations[done:]:
      if not self._can_do(operation):
        break
      self._note(operation)
      end += 1
    if end == done:
      return None
    self._done[life.id] = end
    operations = life.operations[done:end]
    return Advance(life.id, operations, end == len(life.operations))

  def _can_do(self, operation: script.Operation) -> bool:
    match operation:
      case script.Adopt(_, fragment, version):
        return script.VersionId(fragment, version) in self._made
      case script.Mend(_, script.StateId() as source):
        return (script.Save, source) in self._kept
    return True

  def _can_begin(self, beginning: script.Beginning) -> bool:
    versions = {
      script.VersionId(p, v) for p, v in enumerate(beginning.versions)
    }
    saved, lent = beginning.saved, beginning.lent
    return (
      versions <= self._made
      and (saved is None or (script.Save, saved) in self._kept)
      and (lent is None or (script.Lend, lent) in self._kept)
    )

  def _note(self, operation: script.Operation) -> None:
    match operation:
      case script.Publish():
        self._published.add(operation.key)
      case script.Save() | script.Lend():
        self._kept.add((type(operation), operation.state))

  def forget(self, task: Task) -> list[script.VersionId | str]:
    """Versions and contributions nobody needs once `task` is done."""
    free = []
    for name in _used_by(self._plan, task):
      self._uses[name] -= 1
      if not self._uses[name]:
        free.append(name)
    return free

  def _check_end(self) -> None:
    left = [queue[0].id for queue in self._left.values() if queue]
    if not left:
      return
    waits = [
      f"{life.id} waits for {_next(life, self._done)}"
      for life in self._plan.lives.values()
      if self._done.get(life.id, -1) < len(life.operations)
    ]
    raise errors.UserError(
      "replay",
      f"{left[0]} cannot be made: {'; '.join(waits) or 'nothing is left'}",
      "the tape contradicts itself; restore it",
    )


def _next(life: script.Life, done: dict[script.LifeId, int]) -> str:
  if life.id not in done:
    return "what it began from"
  operation = life.operations[done[life.id]]
  return f"{operation!r}"


def _uses(plan: script.Plan) -> collections.Counter[script.VersionId | str]:
  """How many tasks read each version and contribution."""
  uses: collections.Counter[script.VersionId | str] = collections.Counter()
  for making in plan.makings.values():
    uses.update(_used_by(plan, Make(making)))
  for life in plan.lives.values():
    uses.update(_used_by(plan, Begin(life.id)))
    uses.update(_used_by(plan, Advance(life.id, life.operations, True)))
  return uses


def _used_by(plan: script.Plan, task: Task) -> list[script.VersionId | str]:
  match task:
    case Begin(life):
      versions = plan.lives[life].beginning.versions
      return [script.VersionId(p, v) for p, v in enumerate(versions)]
    case Advance(_, operations, _):
      return [
        script.VersionId(o.fragment, o.version)
        for o in operations
        if isinstance(o, script.Adopt)
      ]
    case Make(script.Merge() as merge):
      return [merge.before, *(share.key for share in merge.shares)]
    case Make(script.Return(_, of, _)):
      return [of]
  return []
