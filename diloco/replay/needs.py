"""Which lives and versions a replay needs, and how far each life.

What is wanted is closed under what it depends on: a version under its
contributions and the version before, a contribution under all its life did
before, a life under the versions and states it took.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from diloco import errors
from diloco.replay import script


class Needs:
  """See the module."""

  def __init__(
    self,
    lives: Mapping[script.LifeId, script.Life],
    makings: Mapping[script.VersionId, script.Making],
  ):
    """Args: all lives and versions there are; none is needed yet."""
    self._lives = lives
    self._makings = makings
    self._versions: set[script.VersionId] = set()
    self._reached: dict[script.LifeId, int] = {}  # operations needed
    self._open: list[tuple[script.LifeId, int]] = []
    self._place: dict[Any, tuple[script.LifeId, int]] = {}
    for life in lives.values():
      for i, operation in enumerate(life.operations):
        match operation:
          case script.Publish():
            self._place[operation.key] = life.id, i
          case script.Save() | script.Lend():
            self._place[type(operation), operation.state] = life.id, i

  def version(self, wanted: script.VersionId) -> None:
    """Takes a version in, and all before it."""
    waiting = [wanted]
    while waiting or self._open:
      if not waiting:
        waiting += self._follow(*self._open.pop())
        continue
      version = waiting.pop()
      if version in self._versions:
        continue
      self._versions.add(version)
      match self._makings.get(version):
        case script.Merge() as merge:
          waiting.append(merge.before)
          for share in merge.shares:
            self._reach(share.key, f"contribution {share.key} of {version}")
        case script.Return(_, old, _):
          waiting.append(old)
        case script.Initial(_, life, _):
          if life in self._lives:
            self._open.append((life, 0))
        case None:
          raise _lacking(f"how {version} came to be")

  def _reach(self, place: Any, what: str) -> None:
    if place not in self._place:
      raise _lacking(what)
    life, index = self._place[place]
    self._open.append((life, index + 1))

  def _follow(
    self, life_id: script.LifeId, count: int
  ) -> list[script.VersionId]:
    """Takes in the first `count` operations of a life; returns versions."""
    life, found = self._lives[life_id], []
    before = self._reached.get(life_id)
    if before is None:
      beginning = life.beginning
      found += [
        script.VersionId(p, v) for p, v in enumerate(beginning.versions)
      ]
      if beginning.saved is not None:
        what = f"the state of {beginning.saved} that {life_id} took"
        self._reach((script.Save, beginning.saved), what)
      if beginning.lent is not None:
        what = f"the state of {beginning.lent} that {life_id} was lent"
        self._reach((script.Lend, beginning.lent), what)
    self._reached[life_id] = max(count, before or 0)
    for operation in life.operations[before or 0 : count]:
      match operation:
        case script.Adopt():
          version = script.VersionId(operation.fragment, operation.version)
          found.append(version)
        case script.Mend(_, script.StateId() as source):
          self._reach((script.Save, source), f"the state that {life_id} took")
    return found

  def lives(self) -> dict[script.LifeId, script.Life]:
    """The lives that are needed, each as far as it is."""
    wanted = {
      share.key
      for version in self._versions
      if isinstance(merge := self._makings[version], script.Merge)
      for share in merge.shares
    }
    found = {}
    for life_id, count in sorted(self._reached.items()):
      operations = tuple(
        o._replace(wanted=o.key in wanted)
        if isinstance(o, script.Publish)
        else o
        for o in self._lives[life_id].operations[:count]
      )
      life = self._lives[life_id]
      found[life_id] = dataclasses.replace(life, operations=operations)
    return found

  def makings(self) -> dict[script.VersionId, script.Making]:
    """The versions that are needed."""
    return {v: self._makings[v] for v in sorted(self._versions)}


def _lacking(what: str) -> errors.UserError:
  return errors.UserError(
    "replay", f"the tape does not say: {what}", "restore the whole tape"
  )
