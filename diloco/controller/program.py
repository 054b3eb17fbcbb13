"""Programs: what the controller asks islands to do, and what comes back.

A program is a node of the run's dataflow; its result is a reference that the
controller holds as a future before the program has even started, which lets
dispatch run ahead of execution. Results are small; tensors stay where they
are.

Reference: Barham et al., "Pathways: asynchronous distributed dataflow for ML",
arXiv 2203.12533, section 4.
"""

import dataclasses
from collections.abc import Mapping
from concurrent import futures
from typing import Any, Literal

Name = Literal[
  "train", "evaluate", "checkpoint", "configure", "drain", "poison", "stop"
]


class ProgramLostError(RuntimeError):
  """The island that had this program is gone; it may have run in part."""


@dataclasses.dataclass(frozen=True)
class Program:
  """One program on one peer's queue."""

  peer: str
  seq: int  # order on this peer
  name: Name
  args: Mapping[str, Any]
  preempt: bool  # end the train window under way, skip those queued
  result: futures.Future[dict[str, Any]] = dataclasses.field(
    default_factory=futures.Future, compare=False
  )

  def message(self) -> dict[str, Any]:
    """What is sent to the peer."""
    return {
      "type": "program",
      "seq": self.seq,
      "name": self.name,
      "args": dict(self.args),
      "preempt": self.preempt,
    }
