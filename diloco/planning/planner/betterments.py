"""What limits a plan, and what one more of each resource would buy."""

import dataclasses
from collections.abc import Iterator
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
  short = efficiency.expected(model.params, count, exchange.PERIODS[0]).mean
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
  for s, site in enumerate(fleet.sites):
    for g, group in enumerate(site.slices):
      more = dataclasses.replace(group, count=group.count + 1)
      yield (
        f"one more {group.kind} {group.topology} slice at {site.name}",
        _with_group(request, s, g, more),
        count,
      )
  used = sum(1 for site in fleet.sites if site.slices)
  if used > 1:
    wider = tuple(
      dataclasses.replace(site, link_gbps=site.link_gbps + 1)
      for site in fleet.sites
    )
    yield "1 Gbit/s more on every link", _with_sites(request, wider), count
    nearer = tuple(
      dataclasses.replace(site, latency_ms=site.latency_ms / 2)
      for site in fleet.sites
    )
    yield "half the latency", _with_sites(request, nearer), count
    for codec in ("bf16", "int4"):
      options = dataclasses.replace(request.options, down_codec=codec)
      if codec != request.options.down_codec:
        changed = dataclasses.replace(request, options=options)
        yield f"new versions sent in {codec}", changed, count
  roomier = tuple(
    dataclasses.replace(
      site,
      slices=tuple(
        dataclasses.replace(group, memory_gb=group.memory_gb + 1)
        for group in site.slices
      ),
    )
    for site in fleet.sites
  )
  yield "1 GB more on every chip", _with_sites(request, roomier), count
  longer = dataclasses.replace(request, mtbi_factor=2 * request.mtbi_factor)
  yield "chips that live twice as long", longer, count
  yield "one more island", request, count + 1


def _with_group(
  request: plan_lib.Request, site: int, group: int, more: resources.Slices
) -> plan_lib.Request:
  groups = list(request.fleet.sites[site].slices)
  groups[group] = more
  sites = list(request.fleet.sites)
  sites[site] = dataclasses.replace(sites[site], slices=tuple(groups))
  return _with_sites(request, tuple(sites))


def _with_sites(
  request: plan_lib.Request, sites: tuple[resources.Site, ...]
) -> plan_lib.Request:
  return dataclasses.replace(request, fleet=resources.Fleet(sites))
