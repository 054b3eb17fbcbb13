"""What failures, unequal speeds, few bits and the merge cost four islands.

Question: around one tuned run (four equal islands with Muon, rounds that close
with one of them and the grace window), what becomes of goodput and of held-out
loss at equal tokens when

- islands are dead for 12 % of the time (mean life 44 s, mean repair 6 s of
  virtual time), against one data-parallel job under deaths of the same rate,
  and against one that goes on with the slices that are left; and what each of
  the three has learned in the same virtual time, under one trace of deaths
  (islands with a quarter of H, too);
- two islands are slower, to 0.82 or 0.25 of the others, and a round waits for
  all of them, for one and the grace window, or for one;
- outer gradients travel as int8, int4 or int2 with error feedback or without,
  and versions as differences of four bits;
- the merge is radial-directional in place of the mean?

Command: `diloco sweep --sweep=experiments/studies/costs.py --workdir=DIR`, then
`diloco compare DIR`. Cost: 105 runs of 4 to 7 minutes of one core. Variants:
`:medium` (886 k parameters; not what has equal time), `:smoke`. Expected: int4
within 0.1 % (Streaming DiLoCo, arXiv 2501.18512) and int2 within 1 %; with
failures within the interval of the run without, and goodput of quorum 1 with
the loss of the full one (88 % goodput, mean benchmark 64.1 against 64.4, arXiv
2604.21428).
"""

import pathlib
from typing import Any

import ml_collections

from diloco import hyper
from experiments.studies import base

_FEEDBACK = {"sync.error_feedback": True}
# Or one job, which has no peers to ask, would lose its optimizer each time.
_SAVED = {"programs.checkpoint_every_steps": 50}
_DYING = {"virtual.mtbi_secs": 44.0, **_SAVED}
# By diloco simulate --islands=4 --chips=4 --mtbi_years=1.4e-6 --days=0.012
# --repair_scale_secs=12.8 --draw=experiments/studies/deaths.csv
_TRACE = {
  "virtual.trace": str(pathlib.Path(__file__).with_name("deaths.csv")),
  **_SAVED,
}


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  config = base.get_config("costs", variant, 4)
  config.sync.merge = "mean"
  config.virtual.repair_secs = 6.0
  return config


def get_sweep() -> list[hyper.Point]:
  """What the questions need most comes first; five seeds."""
  first: list[hyper.Point] = [
    {},
    _DYING,
    base.ONE_JOB | _DYING,
    base.ONE_JOB | _DYING | {"method": "elastic_data_parallel"},
  ]
  # Tokens are those that each has when islands have merged all, after 320 s.
  clock: list[hyper.Point] = [
    _TRACE,
    _TRACE | {"sync.every": 3, "sync.num_fragments": 3},
    base.ONE_JOB | _TRACE | {"total_tokens": 2_180_000},
    base.ONE_JOB
    | _TRACE
    | {"method": "elastic_data_parallel", "total_tokens": 4_190_000},
  ]
  after: list[hyper.Point] = [
    {"sync.codec": "f32"},
    {"sync.codec": "int4", **_FEEDBACK, "sync.down_codec": "int4"},
    {"sync.codec": "int2", **_FEEDBACK},
    _with_slow(0.25),
    _with_slow(0.25) | base.TOGETHER,
    _with_slow(0.82),
    _with_slow(0.82) | base.TOGETHER,
    {"sync.merge": "rda"},
  ]
  last: list[hyper.Point] = [
    *({"sync.codec": codec} for codec in ("int8", "int4", "int2")),
    *(_with_slow(slow) | {"sync.grace": "0"} for slow in (0.82, 0.25)),
  ]
  seeds = hyper.sweep("seed", base.CONFIRMING_SEEDS)
  return base.named(
    hyper.chain(
      *(
        hyper.product(seeds, [base.MUON], arms)
        for arms in (first, clock, after, last)
      )
    )
  )


def _with_slow(slow: float) -> dict[str, Any]:
  fast, slower = {"relative_speed": 1.0}, {"relative_speed": slow}
  return {"fleet.slices": (fast, fast, slower, slower)}
