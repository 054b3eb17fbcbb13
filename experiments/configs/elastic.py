"""One synchronous job that loses slices and takes them back, in virtual time.

Question: what does a job keep that shrinks when a slice dies, where a rigid one
stands still? Three slices die and come back as islands of a decoupled run with
the same seed do: down for 12 % of the time each.

Command: `diloco train --config=experiments/configs/elastic.py --workdir=DIR`;
`:rigid` dies with any of its slices, `:decoupled` has them as islands.
Cost: not measured; `:smoke` half a minute of one core.
Expected: not measured.
Reference: Decoupled DiLoCo, arXiv 2604.21428, for the three kinds of job.

Variants: `:smoke` trains a tiny model; `:rigid`; `:decoupled`.
"""

import ml_collections

from experiments.configs import quickstart

_ELASTIC = "elastic_data_parallel"
_METHODS = {"rigid": "data_parallel", "decoupled": "decoupled"}


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "", "smoke" or in `_METHODS`."""
  config = quickstart.like("elastic", variant, *_METHODS)
  config.method = _METHODS.get(variant, _ELASTIC)
  config.engine = "virtual"
  config.faults = ()
  config.fleet.slices = (dict(kind="v5p", topology="1"),) * 3
  if variant != "decoupled":
    del config.sync, config.outer
  unit_secs = 4.4 if variant == "smoke" else 44.0
  config.virtual = dict(
    mtbi_secs=unit_secs,
    repair_secs=unit_secs * 6 / 44,
    reconfigure_secs=unit_secs / 44 if config.method == _ELASTIC else 0.0,
  )
  return config
