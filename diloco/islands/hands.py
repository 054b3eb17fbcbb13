"""What happens between two steps: the core decides, the hands carry it out.

The same live and simulated, in the same order: a verdict before anything else,
then what the core makes of the moment, then an answer to a peer's call. What
the values are that hands move is a world's own matter.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from diloco.islands import core as core_lib
from diloco.islands import peer_protocol, watching
from diloco.snapshots import operations, records


class Patience(NamedTuple):
  """How long a drain waits."""

  answer_secs: float  # for versions that answer what is under way
  coming_secs: float  # for such versions that are known to be there
  limit_secs: float  # in all


class Hands(abc.ABC):
  """Of one life of an island.

  Attributes:
    core: decides.
    at_hand: by fragment, a newer version that may be adopted; as the world
      keeps it, with its `head`.
  """

  __slots__ = ()

  core: core_lib.IslandCore
  at_hand: dict[int, Any]

  def act(
    self,
    step: int,
    board: records.Board | None,
    heard: watching.Notices,
    now: float = 0.0,
  ) -> None:
    """Does what there is to do after this step; waits for nothing."""
    core, at_hand = self.core, self.at_hand
    if heard.suspended_secs:
      core.handle(core_lib.Suspended(heard.suspended_secs, now))
    if heard.offences:
      for _ in core.handle(core_lib.Refused()):
        at_hand.clear()
        self.begin_anew(heard.offences)
    ready = [self._ready(found) for found in at_hand.values()]
    rounds = {int(p): m for p, m in board.open_rounds.items()} if board else {}
    told = core_lib.Board(board.versions, rounds) if board else None
    actions = core.handle(core_lib.Stepped(step, ready, told, heard.cut, now))
    resynced = False
    action: Any
    for action in actions:
      kind = type(action)
      if kind is core_lib.Adopt:
        self.adopt(action, at_hand[action.fragment])
        resynced = resynced or action.resync
      else:
        self.carry_out(action)
    if resynced:
      self.mend(actions)
    if at_hand and not core.resyncing:
      # What is newer than what is there is not what is waited for.
      for fragment, position in enumerate(core.positions):
        found = at_hand.get(fragment)
        if found and found.head.version <= position.base:
          del at_hand[fragment]
    if heard.request is not None and not core.resyncing:
      bases = [p.base for p in core.positions]
      if peer_protocol.can_serve(bases, heard.request.versions):
        self.answer(heard.request, bases)

  def wait(
    self,
    clock: Callable[[], float],
    look: Callable[[], None],
    interrupted: Callable[[], bool],
    poll_secs: float,
  ) -> operations.Script[None]:
    """Waits, as a synchronous method does, until the next step may begin.

    To `look` is to go through what is between two steps again, by this `clock`.
    """
    while self.core.holds(clock()) and not interrupted():
      yield poll_secs
      look()

  def publishing_all(
    self,
    clock: Callable[[], float],
    look: Callable[[], None],
    flushed: Callable[[], bool],
    patience: Patience,
    poll_secs: float,
  ) -> operations.Script[bool]:
    """Publishes all progress, at a standstill, and waits until it has arrived.

    To `look` is as for `wait`; `flushed` says whether all that was handed over
    for publication has arrived. Gives whether all of it has in time.
    """
    core = self.core
    deadline = clock() + patience.limit_secs
    for _ in range(2):  # the store may have been away, and be back by now
      began = clock()
      while core.in_flight and clock() < min(
        deadline, began + patience[core.overtaken]
      ):
        look()
        yield poll_secs
      self.publish_all()
      while not (done := flushed()) and clock() < deadline:
        yield poll_secs
      if not core.overtaken:
        break
    return done

  def publish_all(self) -> None:
    """Publishes all progress that is not published yet."""
    for action in self.core.handle(core_lib.Drain()):
      self.carry_out(action)

  def carry_out(self, action: Any) -> None:
    """Does an action that needs no version at hand."""
    kind = type(action)
    if kind is core_lib.Publish:
      self.publish(action)
    elif kind is core_lib.Rebase:
      self.rebase(action)
    elif kind is core_lib.Cut:
      self.take_part(action)

  def _ready(self, found: Any) -> core_lib.Ready:
    """What the core is to know of a version at hand."""
    head: records.Head = found.head
    merged_step = head.merged_step(self.core.island)
    return core_lib.Ready(head.fragment, head.version, merged_step, head.cut)

  @abc.abstractmethod
  def publish(self, action: core_lib.Publish) -> None:
    """Hands a fragment's progress over to the thread that publishes."""

  @abc.abstractmethod
  def adopt(self, action: core_lib.Adopt, found: Any) -> None:
    """Swaps a version in."""

  @abc.abstractmethod
  def rebase(self, action: core_lib.Rebase) -> None:
    """Sets a muted fragment to the version it started from."""

  @abc.abstractmethod
  def take_part(self, action: core_lib.Cut) -> None:
    """Starts saving the state as the island's part of a cut."""

  @abc.abstractmethod
  def begin_anew(self, offences: int) -> None:
    """The island is refused: all fragments are to be fetched anew."""

  @abc.abstractmethod
  def mend(self, actions: list[core_lib.Action]) -> None:
    """All fragments are new: makes the optimizer sound again."""

  @abc.abstractmethod
  def answer(self, request: records.PeerRequest, bases: Sequence[int]) -> None:
    """Sends the optimizer's state, of versions `bases` ([P]), to a peer."""
