"""What a controller acts on, and its record."""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from diloco import channel
from diloco.controller import tenure as tenure_lib
from diloco.controller.engines import base
from diloco.tape import recorder

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Outside:
  """What a controller acts on.

  Attributes:
    engine: where roles run.
    server: its end of all channels.
    clock: gives monotonic seconds.
    on_tick: called several times a second, for the live view.
    set_back: sets the run back to its newest sound cut if it is damaged, once
      what it is given has ended all roles; says whether it did. `UserError`: no
      cut will do, and nothing was changed. `OSError`: to be tried again.
    tenure: its hold on the run.
  """

  engine: base.Engine
  server: channel.Server
  clock: Callable[[], float] = time.monotonic
  on_tick: Callable[[], None] = lambda: None
  set_back: Callable[[Callable[[], list[str]]], bool] = lambda _: False
  tenure: tenure_lib.Unopposed = dataclasses.field(
    default_factory=tenure_lib.Unopposed
  )


class Tape(recorder.Recorder):
  """A tape whose failure stops nobody."""

  def record(self, event: str, /, **fields: Any) -> None:
    """Appends one event; one that the disk refuses is lost."""
    try:
      super().record(event, **fields)
    except OSError as error:
      logger.warning("line_lost event=%s error=%s", event, error)

  def close(self) -> None:
    """Closes the file."""
    try:
      super().close()
    except OSError as error:
      logger.warning("lines_lost error=%s", error)
