"""Engines: where the processes of a run live, behind one small interface."""

import abc
import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

LOOPBACK = "127.0.0.1"
_POLL_SECS = 0.02


@dataclasses.dataclass(frozen=True)
class Launch:
  """One role to start."""

  role: str
  module: str  # run as `python -m`
  args: Sequence[str]
  log: pathlib.Path
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  cores: Sequence[int] = ()  # () for any
  # What a later controller must know of it; JSON values.
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Handle(Protocol):
  """A started role."""

  @property
  def pid(self) -> int:
    """Process number; where nodes number their own, the role's life."""
    ...

  def cause_of_death(self) -> str | None:
    """How it ended, as "exit 0" or "SIGKILL"; None while it lives."""
    ...

  def signal(self, number: int) -> None:
    """Sends a signal to the role and all it started."""
    ...

  def wait(self, timeout_secs: float) -> bool:
    """Waits for its end; False on time-out."""
    deadline = time.monotonic() + timeout_secs
    while self.cause_of_death() is None:
      if time.monotonic() >= deadline:
        return False
      time.sleep(_POLL_SECS)
    return True


@dataclasses.dataclass(frozen=True)
class Survivor:
  """A role that outlived the controller that started it."""

  handle: Handle
  facts: Mapping[str, Any]  # of its launch


class Engine(abc.ABC):
  """Starts roles.

  Attributes:
    apart: whether roles have processes of their own that outlive the one that
      started them.
    binds: whether roles are bound to cores of this machine.
    host: address of this machine at which roles find their controller.
  """

  apart: bool
  binds: bool
  host: str

  @abc.abstractmethod
  def start(self, launch: Launch) -> Handle:
    """Starts a role and returns at once.

    Raises:
      OSError: it could not be started; nothing is left of it.
    """

  @abc.abstractmethod
  def survivors(self) -> dict[str, Survivor]:
    """Roles an earlier controller of this run left alive, by name."""

  @abc.abstractmethod
  def kill_leftovers(self) -> list[str]:
    """Ends all roles of this run, whoever started them; returns who lived."""

  def tell_address(self) -> None:  # noqa: B027
    """Has all who live know where their controller is; cheap if they do.

    Those who see the run directory read it there.
    """

  def kill_stray(self, pid: int) -> None:  # noqa: B027
    """Ends a role of this run that is not the one known by its name."""
