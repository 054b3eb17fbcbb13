"""Failures: does an island that is down 12 % of the time cost loss?

Question: four islands, each dead for 12 % of the time (mean life 44 s, mean
repair 6 s of virtual time): held-out loss against the run without a failure at
equal tokens; and one data-parallel job under deaths of the same rate.

Command: `diloco sweep --sweep=experiments/studies/failures.py --workdir=DIR`,
then `diloco compare DIR`. Cost: 15 runs of 2 to 3 minutes of one core.
Variants: `:medium`, `:smoke`. Expected: within the interval of the run without
failures (88 % goodput, mean benchmark 64.1 against 64.4, arXiv 2604.21428); not
measured.
"""

import ml_collections

from diloco import hyper
from experiments.studies import base


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  config = base.get_config("failures", variant, 4, fragments=0)
  config.virtual.repair_secs = 6.0
  # Or one job, which has no peers to ask, would lose its optimizer each time.
  config.programs.checkpoint_every_steps = 50
  return config


def get_sweep() -> list[hyper.Point]:
  """Without and with failures, and one job with them."""
  dying = [{"virtual.mtbi_secs": 44.0}]
  decoupled = hyper.product(
    [{"method": "decoupled", "sync.num_fragments": 12}],
    hyper.chain([{"virtual.mtbi_secs": 0.0}], dying),
  )
  one_job = hyper.product([{"method": "data_parallel"}], dying)
  seeds = hyper.sweep("seed", base.CONFIRMING_SEEDS)
  return base.named(hyper.product(hyper.chain(decoupled, one_job), seeds))
