"""How a session of a run ends."""

import dataclasses
from typing import Any, Literal

from diloco import errors

Status = Literal["finished", "stopped", "failed", "killed"]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a run ended.

  Attributes:
    status: "finished" (budget trained), "stopped" (asked to, resumable),
      "failed" (nothing left to run on) or "killed" (asked twice).
    reason: in words.
    final_eval: the last evaluation of the global parameters, if there was one.
    user_error: what to tell the user of a run that never got to work.
  """

  status: Status
  reason: str
  final_eval: dict[str, Any] | None = None
  user_error: errors.UserError | None = None


class StopNowError(Exception):
  """Ends the run at once."""

  def __init__(self, outcome: Outcome):
    super().__init__(outcome.reason)
    self.outcome = outcome
