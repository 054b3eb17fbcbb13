"""Asynchronous Local-SGD: each arrival is merged at once, and its island waits.

Question: what is it worth that islands go on with local steps while they wait
to hear of a version? Here an island stops for the version that has what it
published; slower islands do fewer steps between two, so that none is far
behind. Fleet and tokens are the quickstart's.

Command: `diloco train --config=experiments/configs/asynchronous.py
--workdir=DIR`, beside `experiments/configs/quickstart.py`.
Cost: not measured; the pace is the quickstart's, four minutes, and islands wait
besides. `:smoke` 41 s of processor time.
Expected: not measured.
Reference: Asynchronous Local-SGD, arXiv 2401.09135.

Variants: `:smoke` trains a tiny model.
"""

import ml_collections

from experiments.configs import quickstart


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "" or "smoke"."""
  config = quickstart.like("asynchronous", variant)
  config.method = "async_local_sgd"
  config.faults = ()
  del config.outer
  config.sync = ml_collections.ConfigDict(dict(every=24))
  return config
