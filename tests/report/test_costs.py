"""What a run has asked of its store, at a bucket's list prices."""

import pytest

from diloco.report import costs
from diloco.report import view as view_lib


def _asked(**counts):
  view = view_lib.RunView()
  view.config = {"store": "s3://bucket/run"}
  told = {"reads": 0, "writes": 0, "lists": 0, "over_secs": 3600.0} | counts
  view._store_requests({"role": "syncer", "incarnation": 1} | told)
  return costs.by_role(view)["syncer"]


@pytest.mark.parametrize(
  ("counts", "usd"),
  [
    ({"reads": 10_000}, 0.004),
    ({"writes": 1000, "lists": 1000}, 0.01),
    ({"deletes": 10**6}, 0.0),
  ],
)
def test_requests_are_priced_by_kind_and_deletions_are_free(counts, usd):
  asked = _asked(**counts)
  assert asked["usd_per_hour"] == pytest.approx(usd)
  assert asked["per_sec"] == pytest.approx(sum(counts.values()) / 3600)
