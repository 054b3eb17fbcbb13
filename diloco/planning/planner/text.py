"""A plan as text for a terminal."""

from collections.abc import Mapping
from typing import Any

_WORTH_TELLING = 0.002  # of the time to quality


def render(facts: Mapping[str, Any]) -> str:
  """Returns the whole plan; ends with a line break."""
  model, expected = facts["model"], facts["expected"]
  lines = [
    f"{model['params']:.3g} parameters, {model['layers']} layers,"
    f" {model['tokens']:.3g} tokens, {model['batch_tokens']:.3g} a step,"
    f" {model['mfu']:.0%} of peak, on {facts['fleet']['chips']} chips",
    "",
    *_proposal(facts),
    "",
    "Expected",
    f"  goodput            {_percent(expected['goodput'])}",
    "  utilisation        100 %, no island waits; one job over the same links:"
    f" {expected['synchronous_utilisation']:.2%}",
    f"  sample efficiency  {_rough(expected['sample_efficiency'])}",
    f"  to the tokens      {_duration(expected['days_to_tokens']['mean'])},"
    f" {_money(expected['cost_to_tokens'])}",
    f"  to equal quality   {_duration(expected['days_to_quality']['mean'])}"
    f" ({_duration(expected['days_to_quality']['low'])} to"
    f" {_duration(expected['days_to_quality']['high'])}),"
    f" {_money(expected['cost_to_quality'])}",
    f"  {expected['times_synchronous']:.3g} times the tokens a second of one"
    " synchronous job on these links, its failures not counted",
    "",
    *_sites(facts),
    "",
    *_islands(facts),
    "",
    "What limits it",
    *(f"  {limit['share']:6.1%}  {limit['text']}" for limit in facts["limits"]),
    "",
    *_one_more(facts),
    "",
    *_over_islands(facts),
    "",
    "What this rests on",
    *(f"- {assumption}" for assumption in facts["assumptions"]),
  ]
  return "\n".join(lines) + "\n"


def _proposal(facts: Mapping[str, Any]) -> list[str]:
  choice = facts["proposal"]
  return [
    "Proposed",
    f"  M    {choice['islands']:<9} islands",
    f"  H    {choice['every']:<9} steps between syncs of a fragment",
    f"  P    {choice['num_fragments']:<9} fragments",
    f"  tau  {choice['overlap_steps']:<9} steps for a fragment to be back,"
    f" then {choice['adoption']}",
    f"  K    {choice['quorum']:<9} contributions at least, {choice['grace']}"
    " grace",
    f"  codec {choice['codec']}, syncer and store at {choice['syncer_site']}",
  ]


def _sites(facts: Mapping[str, Any]) -> list[str]:
  lines = [
    f"{'Site':16}{'islands':>8}{'chips':>8}{'sends':>11}{'receives':>11}"
    f"{'link':>11}{'load':>7}{'back after':>14}"
  ]
  for site in facts["sites"]:
    back = f"{site['round_trip_steps']:.1f} steps" if site["islands"] else "-"
    lines.append(
      f"{site['name'][:15]:16}{site['islands']:>8}{site['chips']:>8}"
      f"{_rate(site['sent_bytes_per_sec']):>11}"
      f"{_rate(site['received_bytes_per_sec']):>11}"
      f"{_rate(1e9 / 8 * site['link_gbps']):>11}{site['load']:>7.0%}{back:>14}"
    )
  return lines


def _islands(facts: Mapping[str, Any]) -> list[str]:
  lines = [
    f"{'Island':8}{'at':16}{'hardware':22}{'step':>9}{'memory a chip':>20}"
  ]
  for number, island in enumerate(facts["islands"]):
    hardware = f"{island['slices']} slices, {island['chips']} {island['kind']}"
    held = island["memory_bytes_per_chip"] / 1e9
    of = island["memory_bytes_of_chip"] / 1e9
    lines.append(
      f"{number:<8}{island['site'][:15]:16}{hardware[:21]:22}"
      f"{island['step_secs']:>7.3g} s{f'{held:.1f} of {of:g} GB':>20}"
    )
  return lines


def _one_more(facts: Mapping[str, Any]) -> list[str]:
  lines = ["What one more would buy, with as many islands, to equal quality"]
  nothing = []
  for better in facts["one_more"]:
    if better["days"] is None:
      lines.append(f"   none   {better['resource']}: does not fit")
    elif abs(better["saved_share"]) < _WORTH_TELLING:
      nothing.append(better["resource"])
    else:
      lines.append(
        f"  {-better['saved_share']:+6.1%}  {better['resource']}:"
        f" {_duration(better['days'])}, H = {better['every']}"
      )
  if nothing:
    lines.append(f"  nothing  {'; '.join(nothing)}")
  return lines


def _over_islands(facts: Mapping[str, Any]) -> list[str]:
  lines = [
    f"{'M':>4}{'H':>6}{'goodput':>10}{'efficiency':>20}{'to quality':>12}"
  ]
  for row in facts["over_islands"]:
    if not row["fits"]:
      lines.append(f"{row['islands']:>4}  no: {row['why']}")
      continue
    mark = " *" if row["extrapolated"] else ""
    lines.append(
      f"{row['islands']:>4}{row['every']:>6}{row['goodput']['mean']:>10.1%}"
      f"{_rough(row['sample_efficiency']):>20}"
      f"{_duration(row['days_to_quality']['mean']):>12}{mark}"
    )
  if any(row.get("extrapolated") for row in facts["over_islands"]):
    lines.append("  * beyond the M or H that was measured at any size")
  return lines


def _percent(of: Mapping[str, float]) -> str:
  return f"{of['mean']:.1%} ({of['low']:.1%} to {of['high']:.1%})"


def _rough(of: Mapping[str, float]) -> str:
  return f"{of['mean']:.2f} ({of['low']:.2f} to {of['high']:.2f})"


def _duration(days: float) -> str:
  if days < 1 / 24:
    return f"{days * 1440:.3g} min"
  return f"{days * 24:.3g} h" if days < 2 else f"{days:.3g} days"


def _money(amount: float) -> str:
  if not amount:
    return "no price given"
  told = float(f"{amount:.3g}")
  return f"{told:,.0f} in chips" if amount >= 100 else f"{told:g} in chips"


def _rate(bytes_per_sec: float) -> str:
  if bytes_per_sec >= 1e9:
    return f"{bytes_per_sec / 1e9:.3g} GB/s"
  return f"{bytes_per_sec / 1e6:.3g} MB/s"
