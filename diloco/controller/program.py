"""Programs: what the controller asks roles to do, and what comes back.

A program is a node of the run's dataflow; the controller holds its result to
come before the program has even started, which lets dispatch run ahead of
execution. Results are small; tensors stay where they are. Each peer has one
queue and runs it in order (gang scheduling: with several hosts to an island all
see the same order).

Reference: Barham et al., "Pathways: asynchronous distributed dataflow for ML",
arXiv 2203.12533, section 4.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal

Name = Literal[
  "train", "evaluate", "checkpoint", "configure", "drain", "poison", "stop"
]


@dataclasses.dataclass(eq=False)
class Program:
  """One program on one peer's queue.

  Attributes:
    peer: whose.
    seq: order on this peer.
    name: what to do.
    args: how.
    preempt: whether to end the train window under way and skip those queued.
    anew: whether its peer has no other of this name, as far as is known. What
      it still has came over a channel that was lost, and has its place taken.
    result: what came back, once it did.
    lost: its peer is gone; it may have run in part.
  """

  peer: str
  seq: int
  name: Name
  args: Mapping[str, Any]
  preempt: bool = False
  anew: bool = False
  result: Mapping[str, Any] | None = None
  lost: bool = False

  @property
  def over(self) -> bool:
    """Whether nothing more will come of it."""
    return self.lost or self.result is not None

  def message(self) -> dict[str, Any]:
    """What is sent to the peer."""
    return {
      "type": "program",
      "seq": self.seq,
      "name": self.name,
      "args": dict(self.args),
      "preempt": self.preempt,
      "anew": self.anew,
    }


class Queues:
  """Programs that are under way, of all peers."""

  def __init__(self, first_seq: int):
    """Starts with empty queues.

    Args:
      first_seq: number of the first program; beyond all numbers of earlier
        controllers, whose programs peers may still have.
    """
    self._seq = itertools.count(first_seq)
    self._under_way: dict[str, dict[int, Program]] = {}

  def add(
    self, peer: str, name: Name, args: Mapping[str, Any], *, preempt: bool
  ) -> Program:
    """A program for a peer, with the next number."""
    anew = not self.queued(peer, name)
    program = Program(peer, next(self._seq), name, args, preempt, anew)
    self._under_way.setdefault(peer, {})[program.seq] = program
    return program

  def queued(self, peer: str, name: Name) -> int:
    """Programs of a name a peer has and has not finished."""
    programs = self._under_way.get(peer, {}).values()
    return sum(program.name == name for program in programs)

  def done(
    self, peer: str, seq: int, result: Mapping[str, Any]
  ) -> Program | None:
    """A peer finished a program; unknown ones are of an earlier life."""
    program = self._under_way.get(peer, {}).pop(seq, None)
    if program is not None:
      program.result = result
    return program

  def lost(self, peer: str) -> None:
    """A peer is gone, and all it had to do with it."""
    for program in self._under_way.pop(peer, {}).values():
      program.lost = True
