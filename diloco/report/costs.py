"""What a run has asked of its store, by role, and what a bucket would cost."""

import collections
import re
from typing import Any

from diloco.report import view as view_lib

# US dollars for a thousand requests of each kind, as listed for S3 Standard in
# us-east-1 and for Google's standard storage in one region.
LIST_PRICES = (0.0004, 0.005, 0.005, 0.0)


def by_role(view: view_lib.RunView) -> dict[str, dict[str, Any]]:
  """Returns requests of each role, over all its lives, and rates.

  `usd_per_hour` is None where the store is no bucket.
  """
  sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 5)
  for life, counts in sorted(view.requests.items()):
    role = life.rpartition(".")[0]
    sums[role] = [a + b for a, b in zip(sums[role], counts, strict=True)]
  bucket = re.match("(s3|gs):", str(view.config.get("store")), re.IGNORECASE)
  found = {}
  for role, (*counts, secs) in sums.items():
    cost = sum(n * p / 1e3 for n, p in zip(counts, LIST_PRICES, strict=True))
    found[role] = {
      **dict(zip(view_lib.REQUESTS, map(int, counts), strict=True)),
      "per_sec": sum(counts) / secs if secs else None,
      "usd_per_hour": 3600 * cost / secs if secs and bucket else None,
    }
  return found


def per_island(view: view_lib.RunView) -> float | None:
  """Requests a second of an island, in the mean of all."""
  rates = [
    facts["per_sec"]
    for role, facts in by_role(view).items()
    if role.startswith("island-") and facts["per_sec"] is not None
  ]
  return sum(rates) / len(rates) if rates else None


def usd_per_hour(view: view_lib.RunView) -> float | None:
  """Cost of all roles' requests at list prices; None if it is no bucket."""
  costs = [facts["usd_per_hour"] for facts in by_role(view).values()]
  return sum(cost or 0.0 for cost in costs) if any(costs) else None
