"""Codecs: what do few bits cost?

Question: four islands; outer gradients as f32, bf16, int8, int4 and int2, the
last two with and without error feedback, and int4 with versions as differences
of four bits.

Command: `diloco sweep --sweep=experiments/studies/codecs.py --workdir=DIR`,
then `diloco compare DIR`. Cost: 40 runs of 2 to 3 minutes of one core.
Variants: `:medium`, `:smoke`. Expected: int4 within 0.1 % of f32 (Streaming
DiLoCo, arXiv 2501.18512), int2 within 1 %; not measured.
"""

import ml_collections

from diloco import hyper
from experiments.studies import base


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
  """What all points share."""
  return base.get_config("codecs", variant, 4)


def get_sweep() -> list[hyper.Point]:
  """Eight ways, five seeds."""
  codecs = hyper.chain(
    hyper.sweep("sync.codec", ["f32", "bf16", "int8", "int4", "int2"]),
    hyper.product(
      hyper.sweep("sync.codec", ["int4", "int2"]),
      [{"sync.error_feedback": True}],
    ),
    [
      {
        "sync.codec": "int4",
        "sync.error_feedback": True,
        "sync.down_codec": "int4",
      }
    ],
  )
  seeds = hyper.sweep("seed", base.CONFIRMING_SEEDS)
  return base.named(hyper.product(codecs, seeds))
