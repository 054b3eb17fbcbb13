"""The quickstart with its snapshots in a bucket.

Question: is a store that takes tens of milliseconds for every request good
enough, and can the run be seen, and gone on with, from another machine?

Command: `diloco train --config=experiments/configs/object_store.py
--workdir=DIR --config.store='s3://bucket/prefix?endpoint=https://host'`.
Without `--config.store` it is refused. `docs/bucket.md` tells what is in a URL
and what is not, and what can be done by it afterwards.

Cost: the quickstart's, and the bucket's requests, which the report counts and
prices; not measured, but for a smaller model 50 ms away in `docs/results.md`.
Expected: what the quickstart reaches; not measured.
Reference: Decoupled DiLoCo, arXiv 2604.21428.

Variants: `:smoke` trains a tiny model for half a minute.
"""

import ml_collections

from experiments.configs import quickstart


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "" or "smoke"."""
  config = quickstart.like("object_store", variant)
  config.store = "s3://"  # of no bucket: refused until the user names one
  return config
