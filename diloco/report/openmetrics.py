"""The state of a run as OpenMetrics text, for a scraper such as Prometheus.

Reference: https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

import types
from collections.abc import Mapping
from typing import Any

FILE_NAME = "openmetrics.txt"

# Of the run and of each island, as in `diloco.report.status`.
_COUNTERS = (
  *("tokens", "merges", "faults", "deaths", "takeovers", "quarantines"),
  *("rollbacks", "restarts", "bytes_published", "bytes_adopted"),
)
_GAUGES = (
  *("alive", "tokens_budget", "tokens_per_sec", "bytes_per_sec", "step"),
  *("contributors_mean", "eval_loss", "last_cut_age_secs", "loss"),
  *("staleness_mean", "suspended_secs"),
)


def text(facts: Mapping[str, Any], run: str) -> str:
  """Returns the exposition of a run; `run` is a label of every sample.

  Of the facts of `diloco.report.status`, what is None is left out.
  """
  # Imported here: few runs ask for it.
  from prometheus_client import metrics_core
  from prometheus_client.openmetrics import exposition

  families: list[metrics_core.Metric] = []
  for names, kind in (
    (_COUNTERS, metrics_core.CounterMetricFamily),
    (_GAUGES, metrics_core.GaugeMetricFamily),
  ):
    for name in names:
      islands = {(run, m): part for m, part in facts["islands"].items()}
      scopes: tuple[tuple[str, list[str], Mapping[Any, Any]], ...] = (
        ("run", ["run"], {(run,): facts}),
        ("island", ["run", "island"], islands),
      )
      for scope, labels, parts in scopes:
        family = kind(f"diloco_{scope}_{name}", name, labels=labels)
        for values, part in parts.items():
          if part.get(name) is not None:
            family.add_metric(values, float(part[name]))
        if family.samples:
          families.append(family)
  registry = types.SimpleNamespace(collect=lambda: families)
  return exposition.generate_latest(registry).decode()
