"""How a session of a run ends."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from diloco import errors

Status = Literal["finished", "stopped", "failed", "killed"]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a run ended.

  Attributes:
    status: "finished" (budget trained), "stopped" (asked to, resumable),
      "failed" (nothing left to run on, or nothing to show for it) or "killed"
      (asked twice).
    reason: in words.
    final_eval: the last evaluation of the global parameters, if there was one.
    user_error: what to tell the user of a run that never got to work.
  """

  status: Status
  reason: str
  final_eval: dict[str, Any] | None = None
  user_error: errors.UserError | None = None


def conclude(final_eval: Mapping[str, Any]) -> Outcome:
  """Judges a run whose budget is trained by its final evaluation.

  Args:
    final_eval: of the global parameters, as `islands.evaluation` returns it;
      `error` where there is none, and why.
  """
  if "error" in final_eval:
    why = f"the final evaluation could not be done: {final_eval['error']}"
    return Outcome("failed", why)
  facts = dict(final_eval)
  if not final_eval["newest_version"]:
    why = (
      "nothing was merged, so the global parameters are the untrained ones;"
      " the report says what became of the contributions"
    )
    return Outcome("failed", why, facts)
  if not math.isfinite(final_eval["loss"]):
    why = f"the final loss is {final_eval['loss']}"
    return Outcome("failed", why, facts)
  return Outcome("finished", "token budget trained", facts)
