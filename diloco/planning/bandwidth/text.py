"""A study of the links as text for a terminal."""

from collections.abc import Mapping
from typing import Any


def render(result: Mapping[str, Any]) -> str:
  """Returns the whole answer; ends with a line break."""
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
    lines += ["", *_decoupled(result["decoupled"])]
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


def _decoupled(found: Mapping[str, Any]) -> list[str]:
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
