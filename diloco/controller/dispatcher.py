"""Asynchronous dispatch: programs queued ahead, in order, with futures back.

Each peer has one queue and runs it in order (gang scheduling: with several
hosts to an island all see the same order). Dispatch never waits.
"""

import itertools
from collections.abc import Callable
from concurrent import futures
from typing import Any

from diloco import channel, crash
from diloco.controller import program as program_lib


class Dispatcher:
  """Queues of all peers."""

  def __init__(
    self,
    send: Callable[[str, channel.Message], bool],
    on_dispatched: Callable[[program_lib.Program], None],
    on_done: Callable[[program_lib.Program, dict[str, Any]], None],
    first_seq: int = 1,
  ):
    """Starts with empty queues.

    Args:
      send: gives a message to a peer; False if it is not connected.
      on_dispatched: called for every program sent.
      on_done: called for every result that came back.
      first_seq: number of the first program; beyond all numbers of earlier
        controllers, whose programs peers may still have.
    """
    self._send = send
    self._on_dispatched = on_dispatched
    self._on_done = on_done
    self._seq = itertools.count(first_seq)
    self._outstanding: dict[str, dict[int, program_lib.Program]] = {}

  def dispatch(
    self,
    peer: str,
    name: program_lib.Name,
    *,
    preempt: bool = False,
    **args: Any,
  ) -> futures.Future[dict[str, Any]]:
    """Queues a program on a peer; returns its result to come.

    The future fails with `ProgramLostError` when the peer is or gets lost.
    """
    program = program_lib.Program(peer, next(self._seq), name, args, preempt)
    # What was sent is under way: nobody can cancel it any more.
    program.result.set_running_or_notify_cancel()
    self._outstanding.setdefault(peer, {})[program.seq] = program
    self._on_dispatched(program)
    crash.point("controller_dispatch")
    if not self._send(peer, program.message()):
      self.lost(peer)
    return program.result

  def queued(self, peer: str, name: program_lib.Name) -> int:
    """Programs of a name a peer has and has not finished."""
    programs = self._outstanding.get(peer, {}).values()
    return sum(program.name == name for program in programs)

  def done(self, peer: str, seq: int, result: dict[str, Any]) -> None:
    """A peer finished a program; unknown ones are of an earlier life."""
    program = self._outstanding.get(peer, {}).pop(seq, None)
    if program is not None:
      self._on_done(program, result)
      program.result.set_result(result)

  def lost(self, peer: str) -> None:
    """A peer is gone, and all it had to do with it."""
    for program in self._outstanding.pop(peer, {}).values():
      error = program_lib.ProgramLostError(f"{peer} lost {program.name}")
      program.result.set_exception(error)
