"""Every kind of fault in one run: killed, stopped and poisoned.

Question: does a run finish with every token accounted for, when islands, the
leading syncer and the one that waits are killed, stopped, or made to publish
what is not finite?

Command: `diloco train --config=experiments/configs/chaos.py --workdir=DIR`. For
many drawn faults, each checked for itself: `diloco chaos --workdir=DIR`.
Cost: not measured; the pace makes it about four minutes. `:smoke` 39 s of
processor time.
Expected: status `finished` and `tokens_unaccounted` 0 in summary.json; the loss
is not measured.
Reference: Decoupled DiLoCo, arXiv 2604.21428.

Variants: `:smoke` trains a tiny model for half a minute, with three faults.
"""

import ml_collections

from experiments.configs import quickstart

_FAULTS = (
  dict(target="island-1", at_fraction=0.2, kind="sigkill"),
  dict(target="syncer", at_fraction=0.35, kind="sigkill"),
  dict(target="island-2", at_fraction=0.5, kind="poison"),
  dict(target="standby", at_fraction=0.6, kind="sigkill"),
  dict(target="syncer", at_fraction=0.7, kind="sigstop"),
  dict(target="island-2", at_fraction=0.8, kind="sigkill"),
)


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "" or "smoke"."""
  config = quickstart.like("chaos", variant)
  config.faults = _FAULTS[:3] if variant == "smoke" else _FAULTS
  return config
