"""Synchronous DiLoCo: all islands wait for the merge of all of them.

Question: what does decoupling change? Here the whole model is one fragment,
each island waits every 24 steps for the version that answers it, and a round
closes with all three islands only; fleet and tokens are the quickstart's.

Command: `diloco train --config=experiments/configs/synchronous.py
--workdir=DIR`, beside `experiments/configs/quickstart.py`.
Cost: not measured; the slowest island sets the pace, so longer than the
quickstart's four minutes. `:smoke` 39 s of processor time.
Expected: not measured.
Reference: DiLoCo, arXiv 2311.08105, for the method and its outer optimizer
(Nesterov, learning rate 0.7, momentum 0.9).

Variants: `:smoke` trains a tiny model for half a minute; `:muloco` has Muon for
its inner optimizer (MuLoCo, arXiv 2505.23725).
"""

import ml_collections

from experiments.configs import quickstart


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "", "smoke" or "muloco"."""
  config = quickstart.like("synchronous", variant, "muloco")
  config.faults = ()
  config.sync.update(
    num_fragments=1,
    every=8 if variant == "smoke" else 24,
    quorum=len(config.fleet.slices),
    adoption="overwrite",
    merge="mean",
    follow=False,
    wait_secs=60.0,
  )
  config.outer.update(learning_rate=0.7, momentum=0.9, nesterov=True)
  if variant == "muloco":
    config.task.options.optimizer = "muon"
  return config
