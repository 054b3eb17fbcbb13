"""How a run is judged whose token budget is trained."""

import math

import pytest

from diloco.controller import outcome

_LOSS = {"loss": 2.5, "version": 3, "newest_version": 4}


@pytest.mark.parametrize(
  ("final_eval", "status", "reason"),
  [
    (_LOSS, "finished", "token budget trained"),
    # Fragments that had no merge yet beside others that had.
    (_LOSS | {"version": 0, "newest_version": 1}, "finished", "budget"),
    (_LOSS | {"version": 0, "newest_version": 0}, "failed", "nothing was mer"),
    (_LOSS | {"loss": math.nan}, "failed", "the final loss is nan"),
    (_LOSS | {"loss": math.inf}, "failed", "the final loss is inf"),
    ({"error": "OSError: gone"}, "failed", "not be done: OSError: gone"),
  ],
)
def test_run_without_a_result_has_failed(final_eval, status, reason):
  found = outcome.conclude(final_eval)
  assert found.status == status
  assert reason in found.reason and "\n" not in found.reason
