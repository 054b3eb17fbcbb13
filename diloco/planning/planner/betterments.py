"""What limits a plan, and what one more of each resource would buy."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from diloco.planning.planner import efficiency, exchange, resources
from diloco.planning.planner import plan as plan_lib


def limits(
  request: plan_lib.Request, outcome: plan_lib.Prospect
) -> list[dict[str, Any]]:
  """What takes a share of the time to quality away, most first."""
  model, choice = request.model, outcome.exchange
  count = len(outcome.islands)
  lost = 1 - outcome.goodput.mean
  found = [(lost, f"failures: goodput is {outcome.goodput.mean:.1%}")]
  short = efficiency.expected(
    *(model.params, count, exchange.PERIODS[0]),
    exchange.CODEC_LOSS[choice.codec],
  ).mean
  if count > 1:
    text = f"sample efficiency: {count} islands need about"
    found.append((1 - short, f"{text} {1 / short - 1:.0%} more tokens"))
  if short > outcome.efficiency.mean:
    more = short / outcome.efficiency.mean - 1
    text = f"links: they force H up to {choice.every}, for about {more:.0%}"
    text += f" more tokens (busiest link at {choice.load:.0%})"
    found.append((1 - outcome.efficiency.mean / short, text))
  idle = request.fleet.chips - outcome.chips
  if idle:
    used = sum(island.flops for island in outcome.islands)
    share = 1 - used / request.fleet.flops
    found.append((share, f"unused: {idle} chips are in no island"))
  found.sort(reverse=True)
  return [{"share": share, "text": text} for share, text in found]


def one_more(
  request: plan_lib.Request, outcome: plan_lib.Prospect
) -> list[dict[str, Any]]:
  """What one more of each resource would buy with the same M, most first.

  `days` is the time to quality then, None where it would not fit;
  `saved_share` is of that time, and negative where it costs some.
  """
  count = len(outcome.islands)
  before = outcome.secs_to_quality.mean
  found: list[dict[str, Any]] = []
  for resource, changed, islands in _variants(request, count):
    after = plan_lib.evaluate(changed, islands)
    row: dict[str, Any] = {
      "resource": resource,
      "days": None,
      "every": None,
      "saved_share": 0.0,
    }
    if isinstance(after, plan_lib.Prospect):
      secs = after.secs_to_quality.mean
      row |= {"days": secs / 86_400, "every": after.exchange.every}
      row["saved_share"] = 1 - secs / before
    found.append(row)
  return sorted(found, key=lambda row: -row["saved_share"])


def _variants(
  request: plan_lib.Request, count: int
) -> Iterator[tuple[str, plan_lib.Request, int]]:
  fleet = request.fleet
  for site in fleet.sites:
    for group in site.slices:
      yield (
        f"one more {group.kind} {group.topology} slice at {site.name}",
        _with_slices(request, functools.partial(_one_more, group)),
        count,
      )
  if sum(1 for site in fleet.sites if site.slices) > 1:
    for name, field, change in (
      ("1 Gbit/s more on every link", "link_gbps", lambda gbps: gbps + 1),
      ("half the latency", "latency_ms", lambda ms: ms / 2),
    ):
      sites = tuple(
        dataclasses.replace(site, **{field: change(getattr(site, field))})
        for site in fleet.sites
      )
      changed = dataclasses.replace(request, fleet=resources.Fleet(sites))
      yield name, changed, count
    for codec in ("bf16", "int4"):
      changed = dataclasses.replace(request, down_codec=codec)
      yield f"new versions sent in {codec}", changed, count
  yield (
    "1 GB more on every chip",
    _with_slices(
      request, lambda g: dataclasses.replace(g, memory_gb=g.memory_gb + 1)
    ),
    count,
  )
  longer = dataclasses.replace(request, mtbi_factor=2 * request.mtbi_factor)
  yield "chips that live twice as long", longer, count
  yield "one more island", request, count + 1


def _one_more(
  group: resources.Slices, other: resources.Slices
) -> resources.Slices:
  return dataclasses.replace(other, count=other.count + (other is group))


def _with_slices(
  request: plan_lib.Request,
  change: Callable[[resources.Slices], resources.Slices],
) -> plan_lib.Request:
  sites = tuple(
    dataclasses.replace(site, slices=tuple(map(change, site.slices)))
    for site in request.fleet.sites
  )
  return dataclasses.replace(request, fleet=resources.Fleet(sites))
