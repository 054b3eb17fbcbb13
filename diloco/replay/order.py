"""What a replay does, in which order, and what of it is needed: pure.

Whatever is wanted is done after all it depends on, and nothing else: a version
after its contributions and the version before, a contribution after all that
its life did before, a life after the versions and states it took. Versions are
wanted from the oldest on. What would have to come before itself shows that the
tape cannot be true.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from diloco import errors
from diloco.replay import script

_Needed = tuple[script.VersionId | tuple[script.LifeId, int], str]


class Begin(NamedTuple):
  """Make a life's first state."""

  life: script.LifeId


class Advance(NamedTuple):
  """Do the next operations of a life, and the steps between them."""

  life: script.LifeId
  operations: tuple[script.Operation, ...]
  last: bool = False  # nothing of the life is left


class Make(NamedTuple):
  """Make a version."""

  making: script.Making


Task = Begin | Advance | Make
Name = script.VersionId | str  # a version, or the key of a contribution


@dataclasses.dataclass(frozen=True)
class Plan:
  """A whole replay; what nothing depends on is left out."""

  lives: Mapping[script.LifeId, script.Life]
  makings: Mapping[script.VersionId, script.Making]
  # In order, each with what nobody needs any more once it is done.
  tasks: tuple[tuple[Task, tuple[Name, ...]], ...]


def plan(
  lives: Mapping[script.LifeId, script.Life],
  makings: Mapping[script.VersionId, script.Making],
  wanted: Iterable[script.VersionId],
) -> Plan:
  """Plans to make versions, of all lives and makings there are.

  Raises:
    UserError: the tape lacks what they need, or contradicts itself.
  """
  order = _Order(lives, makings)
  open_: list[Iterator[_Needed]] = [
    order.follow((version, ""))
    for version in sorted(wanted, key=lambda v: v[::-1])
  ]
  open_.reverse()
  while open_:
    needed = next(open_[-1], None)
    if needed is None:
      open_.pop()
    else:
      open_.append(order.follow(needed))
  return order.plan()


class _Order:
  def __init__(
    self,
    lives: Mapping[script.LifeId, script.Life],
    makings: Mapping[script.VersionId, script.Making],
  ):
    self._lives, self._makings = lives, makings
    self._tasks: list[Begin | Make | tuple[script.LifeId, list[Any]]] = []
    self._open: set[Any] = set()  # what waits for something else
    self._made: set[script.VersionId] = set()
    self._done: dict[script.LifeId, int] = {}  # operations, once begun
    self._named: set[script.LifeId] = set()  # who made initial parameters
    self._place: dict[Any, tuple[script.LifeId, int]] = {}
    for life in lives.values():
      for i, operation in enumerate(life.operations):
        match operation:
          case script.Publish():
            self._place[operation.key] = life.id, i + 1
          case script.Save() | script.Lend():
            self._place[type(operation), operation.state] = life.id, i + 1

  def follow(self, needed: _Needed) -> Iterator[_Needed]:
    """Yields what must be done before, each with who waits for it."""
    what, waits = needed
    if isinstance(what, script.VersionId):
      return self._version(what, waits)
    return self._life(*what)

  def _begin(self, what: Any, waits: str) -> None:
    errors.require(
      what not in self._open,
      "replay",
      f"nothing can go on: {waits}",
      "the tape contradicts itself; restore it",
    )
    self._open.add(what)

  def _version(
    self, version: script.VersionId, waits: str
  ) -> Iterator[_Needed]:
    if version in self._made:
      return
    self._begin((script.VersionId, version), waits)
    making = self._makings.get(version)
    match making:
      case script.Merge():
        yield making.before, f"{version} waits for the one before"
        for share in making.shares:
          yield self._state(share.key, f"contribution {share.key} of {version}")
      case script.Return(_, old):
        yield old, f"{version} waits for {old}"
      case script.Initial(_, life, _):
        self._named.add(life)
      case None:
        raise _lacking(f"how {version} came to be")
    self._made.add(version)
    self._tasks.append(Make(making))

  def _life(self, life: script.LifeId, count: int) -> Iterator[_Needed]:
    if life not in self._done:
      self._begin((script.LifeId, life), f"{life} waits for what it began from")
      yield from self._beginning(life)
      self._done[life] = 0
      self._tasks.append(Begin(life))
    while (done := self._done[life]) < count:
      operation = self._lives[life].operations[done]
      waits = f"{life} waits for {operation!r}"
      self._begin((life, done), waits)
      match operation:
        case script.Adopt(_, fragment, version):
          yield script.VersionId(fragment, version), waits
        case script.Mend(_, script.StateId() as source):
          what = f"the state that {life} took"
          yield self._state((script.Save, source), what)
      self._done[life] = done + 1
      match self._tasks[-1]:
        case (before, list() as operations) if before == life:
          operations.append(operation)
        case _:
          self._tasks.append((life, [operation]))

  def _beginning(self, life: script.LifeId) -> Iterator[_Needed]:
    beginning = self._lives[life].beginning
    for fragment, version in enumerate(beginning.versions):
      waits = f"{life} waits for what it began from"
      yield script.VersionId(fragment, version), waits
    for kind, state, verb in (
      (script.Save, beginning.saved, "took"),
      (script.Lend, beginning.lent, "was lent"),
    ):
      if state is not None:
        what = f"the state of {state} that {life} {verb}"
        yield self._state((kind, state), what)

  def _state(self, place: Any, what: str) -> _Needed:
    """What a life did, by its place there."""
    if place not in self._place:
      raise _lacking(what)
    return self._place[place], ""

  def plan(self) -> Plan:
    """What was followed, as far as that."""
    makings = {v: self._makings[v] for v in sorted(self._made)}
    merges = [m for m in makings.values() if isinstance(m, script.Merge)]
    wanted = {share.key for merge in merges for share in merge.shares}

    def told(operation: script.Operation) -> script.Operation:
      if isinstance(operation, script.Publish):
        return operation._replace(wanted=operation.key in wanted)
      return operation

    lives = {}
    for life_id in sorted(self._named & set(self._lives) | set(self._done)):
      life = self._lives[life_id]
      operations = tuple(
        map(told, life.operations[: self._done.get(life_id, 0)])
      )
      lives[life_id] = dataclasses.replace(life, operations=operations)
    left = {life: len(lives[life].operations) for life in self._done}
    tasks: list[Task] = []
    for task in self._tasks:
      if not isinstance(task, Begin | Make):
        life_id, done = task
        left[life_id] -= len(done)
        last = not left[life_id]
        tasks.append(Advance(life_id, tuple(map(told, done)), last))
      else:
        tasks.append(task)
    steps = zip(tasks, _freed(tasks, lives), strict=True)
    return Plan(lives, makings, tuple(steps))


def _freed(
  tasks: Sequence[Task], lives: Mapping[script.LifeId, script.Life]
) -> list[tuple[Name, ...]]:
  """Of each task, what none of those after it reads."""
  found, known = [], set[Name]()
  for task in reversed(tasks):
    read: list[Name] = []
    match task:
      case Begin(life):
        versions = enumerate(lives[life].beginning.versions)
        read = [script.VersionId(p, v) for p, v in versions]
      case Advance(_, operations, _):
        read = [
          script.VersionId(o.fragment, o.version)
          for o in operations
          if isinstance(o, script.Adopt)
        ]
      case Make(script.Merge() as merge):
        read = [merge.before, *(share.key for share in merge.shares)]
      case Make(script.Return(_, of)):
        read = [of]
    found.append(
      tuple(name for name in dict.fromkeys(read) if name not in known)
    )
    known.update(read)
  return found[::-1]


def _lacking(what: str) -> errors.UserError:
  return errors.UserError(
    "replay", f"the tape does not say: {what}", "restore the whole tape"
  )
