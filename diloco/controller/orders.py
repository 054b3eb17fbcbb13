"""What the controller's core hears, and what it orders.

*Events* are what its shell saw: messages of roles, deaths, what became of an
order. *Orders* are what the shell is to do, one after the other; a controller
may die between any two.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from diloco import config as config_lib
from diloco import process
from diloco.controller import outcome as outcome_lib
from diloco.controller import program as program_lib

_FAILED = re.compile("exit [1-9][0-9]*")

Changes = Mapping[str, tuple[Any, Any]]  # field -> before, after


class Order:
  """What the shell is to do."""

  __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Start(Order):
  """Start a new life of the role; `Begun` or `Failed` tells what came of it."""

  role: str


@dataclasses.dataclass(frozen=True, slots=True)
class Kill(Order):
  """Kill the role's process."""

  role: str
  cause: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class KillStray(Order):
  """Kill a process of this run that is not the one known by its role."""

  role: str
  pid: int


@dataclasses.dataclass(frozen=True, slots=True)
class Signal(Order):
  """Send the role a signal that the configuration asks for, by its name."""

  role: str
  name: str


@dataclasses.dataclass(frozen=True, slots=True)
class MoveSlice(Order):
  """The island's slice is suspect; its next life has another if one is free."""

  role: str


@dataclasses.dataclass(frozen=True, slots=True)
class Send(Order):
  """Give a program to its role."""

  program: program_lib.Program


@dataclasses.dataclass(frozen=True, slots=True)
class Record(Order):
  """Write a line on the tape."""

  event: str
  fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Say(Order):
  """Log a line for people."""

  text: str
  level: str = "warning"


@dataclasses.dataclass(frozen=True, slots=True)
class Point(Order):
  """Pass a named place for crashes."""

  name: str


@dataclasses.dataclass(frozen=True, slots=True)
class LookAtCuts(Order):
  """Ask for a cut if one is due, and see to the one that is open."""

  lives: Mapping[int, int]  # island -> incarnation, of those that are ready


@dataclasses.dataclass(frozen=True, slots=True)
class CloseCuts(Order):
  """Give an open cut up: its islands will not train on."""


@dataclasses.dataclass(frozen=True, slots=True)
class TakeChanges(Order):
  """Take up a change of the configuration that somebody wishes."""


@dataclasses.dataclass(frozen=True, slots=True)
class GoBack(Order):
  """Set the run back to its newest sound cut, if it is damaged.

  `Ending` is told before the roles are ended, `SetBack` at the end.
  """


@dataclasses.dataclass(frozen=True, slots=True)
class End(Order):
  """Leave no role alive; the session is over."""

  outcome: outcome_lib.Outcome


class Event:
  """What the shell saw."""

  __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Opened(Event):
  """The session begins; roles that live have been told as `Begun`."""

  token: int  # of the controller's lease
  changes: Changes  # of the configuration, since the session before


@dataclasses.dataclass(frozen=True, slots=True)
class Begun(Event):
  """The role has a process."""

  role: str
  life: int
  pid: int
  taken_up: bool = False  # an earlier controller started it


@dataclasses.dataclass(frozen=True, slots=True)
class Failed(Event):
  """The machine or the store refused what was ordered."""

  order: Order
  error: str


@dataclasses.dataclass(frozen=True, slots=True)
class Hello(Event):
  """A role has found its channel, or can be asked something from now on."""

  role: str
  pid: int | None = None  # that of the channel if it does not say
  ready: bool = False  # whether it can be asked something
  token: int = 0  # under which a syncer leads; 0 if it waits
  draining: bool = False  # as an earlier controller told a syncer to
  step: int | None = None  # of an island


@dataclasses.dataclass(frozen=True, slots=True)
class Status(Event):
  """A role lives."""

  role: str
  progress: int | None = None  # see `Supervisor.told`; None of a syncer
  extra_secs: float = 0.0
  step: int = 0  # of an island
  merges: int = 0  # of a syncer's life
  damaged: Sequence[int] = ()  # fragments a syncer can neither read nor mend
  pid: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Done(Event):
  """A role has finished a program."""

  role: str
  seq: int
  result: Mapping[str, Any]
  pid: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Lost(Event):
  """A role's channel is gone, or does not take a program."""

  role: str
  pid: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Died(Event):
  """A role's process is gone."""

  role: str
  life: int
  cause: str  # "exit 1", "SIGKILL"
  error: str = ""  # the line in which it said why
  log: str = ""  # where all is that it said

  @property
  def failed(self) -> bool:
    """Whether it ended by itself, with an error, and not by a signal."""
    return _FAILED.fullmatch(self.cause) is not None

  @property
  def mistake(self) -> bool:
    """Whether code of the user's is to blame."""
    return self.cause == f"exit {process.EXIT_MISTAKE}"

  @property
  def no_data(self) -> bool:
    """Whether its data are over."""
    return self.cause == f"exit {process.EXIT_NO_DATA}"


@dataclasses.dataclass(frozen=True, slots=True)
class Interrupted(Event):
  """The user wants the session to end: in order; the second time, at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Configured(Event):
  """The configuration has changed."""

  config: config_lib.RunConfig
  changes: Changes


@dataclasses.dataclass(frozen=True, slots=True)
class Ending(Event):
  """A cut to go back to was found: now all roles are ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class SetBack(Event):
  """What `GoBack` came to."""

  done: bool  # whether the run was damaged, and was set back
  error: str = ""  # why it is damaged and cannot be


@dataclasses.dataclass(frozen=True, slots=True)
class Tick(Event):
  """Time passed; several a second."""
