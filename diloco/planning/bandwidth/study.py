"""One study of the links: every method's figures, and what they rest on."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from diloco.planning.bandwidth import decoupled, methods, published
from diloco.planning.bandwidth import workload as workload_lib

ASSUMPTIONS = (
  "a layer's forward pass, its activations' gradient and its weights' gradient"
  " take a third of the layer's time each",
  "a layer's reduction may leave once its weights' gradient is done; reductions"
  " cross the link one at a time, in that order",
  "fragments are strided over the layers and spread over the H steps",
  "the first layer of a later step waits for a fragment as a whole: of the next"
  " step, or of the next but one where overlapped (tau = 1)",
  "16 bits a parameter in bf16, 4.25 in 4-bit (f32 scales of blocks of 128),"
  " and 0.6 % for packet headers",
  "a site sends 2 (S - 1) / S of its size in an all-reduce of S sites, in"
  " 2 (S - 1) passes of one latency each; links are full duplex, the slowest"
  " counts",
  "all parameters are in equal layers; within a site sending costs nothing",
  "steady state: the third of three periods of H steps",
)


@dataclasses.dataclass(frozen=True)
class Request:
  """What is asked."""

  work: workload_lib.Workload  # the model and the sites
  names: tuple[str, ...]  # methods, of `methods.METHODS`
  links_gbps: tuple[float, ...]  # of each site; empty: the table only
  latencies_secs: tuple[float, ...]  # of each site
  sync: decoupled.Sync | None  # of decoupled islands; None: leave them out
  syncer_site: int | None = None  # where they meet; None: at none of the sites


def run(request: Request) -> dict[str, Any]:
  """Returns the study as JSON values."""
  work = request.work
  result: dict[str, Any] = {
    "workload": dataclasses.asdict(work),
    "levels": list(methods.LEVELS),
    "methods": {name: _method(name, request) for name in request.names},
  }
  errors_of = [
    abs(step)
    for found in result["methods"].values()
    for step in found.get("grid_steps", [])
  ]
  if errors_of:
    result["worst_grid_steps"] = max(errors_of)
    result["cells_exact"] = errors_of.count(0)
    result["cells"] = len(errors_of)
  if request.links_gbps:
    result["links_gbps"] = list(request.links_gbps)
  if request.sync is not None:
    result["decoupled"] = _decoupled(request, request.sync)
  result["assumptions"] = list(ASSUMPTIONS)
  return result


def _method(name: str, request: Request) -> dict[str, Any]:
  method, work = methods.METHODS[name], request.work
  grid = methods.GRID_GBPS
  slowest = min(request.links_gbps, default=None)
  points = np.append(grid, slowest) if slowest else grid
  curve = methods.utilisation(method, work, points)
  needed = methods.needed(curve[: len(grid)])
  found: dict[str, Any] = {
    "title": method.title,
    "gbps": [n.figure_gbps for n in needed],
    "reached_gbps": [n.reached_gbps for n in needed],
  }
  row = published.row(name, work)
  if row is not None:
    found["published_gbps"] = list(row.gbps)
    found["grid_steps"] = [
      methods.grid_steps(n.figure_gbps or 0.1) - methods.grid_steps(p)
      for n, p in zip(needed, row.gbps, strict=True)
    ]
  if slowest:
    found["utilisation"] = float(curve[-1])
    found["wall_secs_per_step"] = work.step_secs / float(curve[-1])
  return found


def _decoupled(request: Request, sync: decoupled.Sync) -> dict[str, Any]:
  work = request.work
  link = decoupled.Link(
    float("inf"), max(request.latencies_secs), 1, work.step_secs
  )
  found: dict[str, Any] = {
    "sync": dataclasses.asdict(sync),
    "gbps": _finite(decoupled.needed_gbps(sync, link)),
    "mean_gbps": _finite(decoupled.mean_gbps(sync, link)),
  }
  if request.links_gbps:
    links = [  # the last is a site of the syncer's own
      decoupled.Link(gbps, latency, 1, work.step_secs)
      for gbps, latency in zip(
        request.links_gbps, request.latencies_secs, strict=True
      )
    ]
    links.append(decoupled.Link(float("inf"), islands=0))
    syncer_site = request.syncer_site
    if syncer_site is None:
      syncer_site = len(links) - 1
    sites = decoupled.traffic(sync, links, syncer_site)[:-1]
    busiest = max(site.load for site in sites)
    slowest_trip = max(site.round_trip_steps for site in sites)
    found |= {
      "utilisation": 1.0,
      "sites": [dataclasses.asdict(site) for site in sites],
      "fits_link": busiest <= 1,
      "fits_overlap": slowest_trip <= sync.overlap_steps,
      "every_on_these_links": max(1.0, busiest) * sync.every,
      "advantage": _advantage(work, min(request.links_gbps)),
    }
  return found


def _advantage(work: workload_lib.Workload, gbps: float) -> float:
  """Times as fast as a synchronous job whose sites share these links.

  The islands never wait, so it is one over that job's utilisation. It reduces
  its gradients in bf16, whatever the islands' codec.
  """
  work = dataclasses.replace(work, codec="bf16")
  sync = methods.METHODS["data_parallel"]
  return 1 / float(methods.utilisation(sync, work, np.array([gbps]))[0])


def _finite(value: float) -> float | None:
  return value if np.isfinite(value) else None


def text(result: Mapping[str, Any]) -> str:
  """Returns a study for a terminal; ends with a line break."""
  work = result["workload"]
  lines = [
    f"{work['params']:.3g} parameters, {work['layers']} layers,"
    f" {work['step_secs']:g} s a step, H = {work['every']}, fragments of"
    f" {work['fragment_layers']} layers, {work['sites']} sites, {work['codec']}"
  ]
  if result["methods"]:
    lines += ["", *_table(result)]
  if "links_gbps" in result:
    lines += ["", *_links(result)]
  if "decoupled" in result:
    lines += ["", *_decoupled_lines(result["decoupled"])]
  lines += ["", "What this rests on:"]
  lines += [f"- {assumption}" for assumption in result["assumptions"]]
  return "\n".join(lines) + "\n"


def _table(result: Mapping[str, Any]) -> list[str]:
  levels = [f"{100 * level:.0f} %" for level in result["levels"]]
  lines = [_row("Gbit/s for utilisation", levels)]
  for method in result["methods"].values():
    lines.append(_row(method["title"], map(_gbps, method["gbps"])))
    if "published_gbps" in method:
      lines.append(_row("  published", map(_gbps, method["published_gbps"])))
    reached = map(_gbps, method["reached_gbps"])
    lines.append(_row("  reached with", reached))
  lines.append(
    "(the published figure is the grid point below the one that reaches it)"
  )
  if "cells" in result:
    lines.append(
      f"{result['cells_exact']} of {result['cells']} published cells on the"
      f" same grid point, none further than {result['worst_grid_steps']}"
    )
  return lines


def _links(result: Mapping[str, Any]) -> list[str]:
  slowest = min(result["links_gbps"])
  lines = [f"On these links, the slowest of {slowest:g} Gbit/s:"]
  for method in result["methods"].values():
    lines.append(
      f"  {method['title']:30} utilisation {method['utilisation']:7.2%},"
      f" {method['wall_secs_per_step']:.3g} s a step"
    )
  return lines


def _decoupled_lines(found: Mapping[str, Any]) -> list[str]:
  sync = found["sync"]
  needed = found["gbps"]
  lines = [
    f"Decoupled islands, H = {sync['every']}, P = {sync['num_fragments']}, tau"
    f" = {sync['overlap_steps']}, {sync['up_bits']:g} bits up and"
    f" {sync['down_bits']:g} down: never wait",
    f"  a site moves {_gbps(found['mean_gbps'])} Gbit/s in the busier direction"
    + (
      f", and needs {_gbps(needed)} for fragments to be back in time"
      if needed
      else "; merging and latency alone take longer than tau steps"
    ),
  ]
  for number, site in enumerate(found.get("sites", [])):
    lines.append(
      f"  site {number}: load {site['load']:.0%}, a fragment is back after"
      f" {site['round_trip_steps']:.2g} steps"
    )
  if "advantage" in found:
    lines.append(
      f"  {found['advantage']:.3g} times as fast as a synchronous job on these"
      f" links; H becomes {found['every_on_these_links']:.3g}"
    )
  return lines


def _row(name: str, cells: Any) -> str:
  return f"{name:30}" + "".join(f"{cell:>9}" for cell in cells)


def _gbps(value: float | None) -> str:
  if value is None:
    return "-"
  return f"{value:.3g}"
