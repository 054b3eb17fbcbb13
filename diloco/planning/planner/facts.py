"""A plan as JSON values: the one source of its text and its picture."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from diloco.planning.planner import (
  betterments,
  efficiency,
  exchange,
)
from diloco.planning.planner import model as model_lib
from diloco.planning.planner import plan as plan_lib
from diloco.planning.planner.efficiency import Interval

_SECS_PER_DAY = 86_400.0

ASSUMPTIONS = (
  "an island's steps reach the given share of its chips' peak whatever its"
  " size; the batch of all islands together is the same for every M",
  "an island's chips hold parameters, moments and gradients in f32 and a bf16"
  " copy, all sharded; one sequence a chip, layers recomputed",
  "outer gradients go up in the codec, new versions come down in f32; a site's"
  " link is full duplex, kept below 80 %; the syncer's merge takes no time",
  "goodput: the fleet simulator with its calibrated times, independent failures"
  " of chips only; the interval is of the mean",
  "sample efficiency: extrapolated from 35M-335M parameters, up to 8 islands, H"
  " = 30; the low end believes no closing of the gap beyond 335M, the high end"
  " that it is closed",
  "price of islands' chips only",
)


def gather(
  request: plan_lib.Request,
  weighed: Sequence[plan_lib.Prospect | plan_lib.Misfit],
  best: plan_lib.Prospect,
) -> dict[str, Any]:
  """Everything a plan tells."""
  sync_use = plan_lib.synchronous_utilisation(request, best)
  speedup = best.goodput.mean / sync_use
  return {
    "model": dataclasses.asdict(request.model),
    "fleet": {
      "chips": request.fleet.chips,
      "used_chips": best.chips,
      "sites": [site.name for site in request.fleet.sites],
    },
    "proposal": _proposal(request, best),
    "expected": {
      "goodput": best.goodput._asdict(),
      "utilisation": 1.0,
      "sample_efficiency": best.efficiency._asdict(),
      "tokens_per_sec": best.tokens_per_sec,
      "days_to_tokens": _days(best.secs_to_tokens),
      "days_to_quality": _days(best.secs_to_quality),
      "cost_to_tokens": best.cost(best.secs_to_tokens.mean),
      "cost_to_quality": best.cost(best.secs_to_quality.mean),
      "synchronous_utilisation": sync_use,
      "times_synchronous": speedup,
    },
    "sites": _sites(request, best),
    "islands": _islands(request, best),
    "limits": betterments.limits(request, best),
    "one_more": betterments.one_more(request, best),
    "over_islands": [_weighed(w) for w in weighed],
    "config": _config(request, best),
    "assumptions": list(ASSUMPTIONS),
  }


def _proposal(
  request: plan_lib.Request, best: plan_lib.Prospect
) -> dict[str, Any]:
  return {
    "islands": len(best.islands),
    **_sync(best.exchange),
    "syncer_site": request.fleet.sites[best.exchange.syncer_site].name,
  }


def _sync(choice: exchange.Exchange) -> dict[str, Any]:
  """Fields of `config.sync`."""
  return {
    "every": choice.every,
    "num_fragments": choice.num_fragments,
    "overlap_steps": choice.overlap_steps,
    "quorum": 1,
    "grace": "adaptive",
    "codec": choice.codec,
    "adoption": "carry" if choice.carry else "overwrite",
  }


def _config(
  request: plan_lib.Request, best: plan_lib.Prospect
) -> dict[str, Any]:
  """What `config.from_mapping` takes; the user adds task and optimizers.

  A slice of the configuration is an island's whole hardware: its slices times
  the chips of one.
  """
  secs = _step_secs(request, best)
  return {
    "name": "planned",
    "total_tokens": int(request.model.tokens),
    "fleet": {
      "num_islands": len(secs),
      "slices": [
        {
          "kind": island.hardware.kind,
          "topology": f"{island.slices}x{island.hardware.slice_chips}",
          "relative_speed": min(secs) / own,
        }
        for island, own in zip(best.islands, secs, strict=True)
      ],
    },
    "sync": _sync(best.exchange),
  }


def _step_secs(
  request: plan_lib.Request, best: plan_lib.Prospect
) -> list[float]:
  count = len(best.islands)
  return [model_lib.step_secs(i, count, request.model) for i in best.islands]


def _sites(
  request: plan_lib.Request, best: plan_lib.Prospect
) -> list[dict[str, Any]]:
  found = []
  for number, (site, traffic) in enumerate(
    zip(request.fleet.sites, best.exchange.traffic, strict=True)
  ):
    own = [island for island in best.islands if island.site == number]
    found.append(
      {
        "name": site.name,
        "islands": len(own),
        "chips": sum(island.chips for island in own),
        "link_gbps": site.link_gbps,
        "sent_bytes_per_sec": 1e9 / 8 * traffic.sent_gbps,
        "received_bytes_per_sec": 1e9 / 8 * traffic.received_gbps,
        "load": traffic.load,
        "round_trip_steps": traffic.round_trip_steps,
      }
    )
  return found


def _islands(
  request: plan_lib.Request, best: plan_lib.Prospect
) -> list[dict[str, Any]]:
  secs = _step_secs(request, best)
  return [
    {
      "site": request.fleet.sites[island.site].name,
      "kind": island.hardware.kind,
      "slices": island.slices,
      "chips": island.chips,
      "step_secs": own,
      "memory_bytes_per_chip": held.chip,
      "memory_bytes_of_chip": 1e9 * island.hardware.memory_gb,
      "memory": dataclasses.asdict(held),
    }
    for island, held, own in zip(best.islands, best.memory, secs, strict=True)
  ]


def _weighed(found: plan_lib.Prospect | plan_lib.Misfit) -> dict[str, Any]:
  if isinstance(found, plan_lib.Misfit):
    return {"islands": found.num_islands, "fits": False, "why": found.why}
  count = len(found.islands)
  return {
    "islands": count,
    "fits": True,
    "every": found.exchange.every,
    "goodput": found.goodput._asdict(),
    "sample_efficiency": found.efficiency._asdict(),
    "extrapolated": count > efficiency.MEASURED_ISLANDS
    or found.exchange.every > efficiency.MEASURED_EVERY,
    "days_to_quality": _days(found.secs_to_quality),
    "used_chips": found.chips,
  }


def _days(secs: Interval) -> dict[str, float]:
  return Interval(*(s / _SECS_PER_DAY for s in secs))._asdict()
