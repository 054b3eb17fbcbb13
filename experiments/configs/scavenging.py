"""Capacity that comes and goes: two steady islands and one that is preempted.

Question: does an island that is taken away again and again add anything, and
does it cost the steady ones anything? It is killed at five moments and comes
back each time, as a preemptible slice that is returned.

Command: `diloco train --config=experiments/configs/scavenging.py
--workdir=DIR`; `:steady` is the two others alone, on the tokens they train in
the same time.
Cost: not measured; the pace makes it about four minutes. `:smoke` 55 s of
processor time.
Expected: not measured. Of large fleets `python -m
experiments.benchmarks.scavenging` tells the same by simulation.
Reference: Decoupled DiLoCo, arXiv 2604.21428.

Variants: `:smoke` trains a tiny model for half a minute; `:steady`.
"""

import ml_collections

from experiments.configs import quickstart

_STEADY = (
  dict(kind="v6e", topology="1", relative_speed=1.0),
  dict(kind="v6e", topology="1", relative_speed=1.0),
)
_PREEMPTED = dict(kind="v5p", topology="1", relative_speed=0.5)


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "", "smoke" or "steady"."""
  smoke = variant == "smoke"
  config = quickstart.like("scavenging", variant, "steady")
  config.total_tokens = 200_000 if smoke else 2_500_000
  config.fleet.slices = (*_STEADY, _PREEMPTED)
  config.fleet.pace_step_secs = 0.05 if smoke else 0.12
  config.faults = tuple(
    dict(target="island-2", at_fraction=fraction, kind="sigkill")
    for fraction in ((0.3, 0.6) if smoke else (0.15, 0.3, 0.45, 0.6, 0.75))
  )
  if variant == "steady":
    config.fleet.slices = _STEADY
    config.total_tokens = 2_000_000
    config.faults = ()
  return config
