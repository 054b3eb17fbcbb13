"""Shapes of language models from 35M to 12B parameters.

Question: what would a run of such a model take? `diloco plan
--config=experiments/configs/shapes.py:12b --fleet=FLEET.py` takes parameters,
layers and tokens from here. Up to 10B width, layers and heads are those of the
scaling laws below, their MLPs gated here, with as many parameters; 5b and 12b
are of the same make.

Command: `diloco train --config=experiments/configs/shapes.py:35m --workdir=DIR`
trains the smallest of them, on 20 tokens a parameter; the others are alike:
`:90m`, `:180m`, `:335m`, `:550m`, `:1.3b`, `:2.4b`, `:5b`, `:10b` and `:12b`.
Cost: not measured; not for two cores. `:smoke` 44 s of processor time.
Expected: not measured. Tokens are bytes here, so most of the vocabulary, which
is there for the number of parameters, is never used.
Reference: Scaling laws for DiLoCo, arXiv 2503.09799.

Variants: each shape, `:35m` without a word; `:smoke` trains a tiny model for
half a minute.
"""

from typing import NamedTuple

import ml_collections

from experiments.configs import quickstart

_TOKENS_PER_PARAM = 20
_VOCAB = 32_768


class Shape(NamedTuple):
  """Parameters by name, and what makes them."""

  params: float
  num_layers: int
  num_heads: int
  d_model: int


SHAPES = {
  "35m": Shape(35e6, 6, 8, 512),
  "90m": Shape(90e6, 9, 12, 768),
  "180m": Shape(180e6, 12, 16, 1024),
  "335m": Shape(335e6, 15, 20, 1280),
  "550m": Shape(550e6, 18, 24, 1536),
  "1.3b": Shape(1.3e9, 24, 32, 2048),
  "2.4b": Shape(2.4e9, 30, 40, 2560),
  "5b": Shape(5e9, 40, 50, 3200),
  "10b": Shape(10e9, 48, 64, 4096),
  "12b": Shape(12e9, 46, 72, 4608),
}


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the configuration; `variant` is "smoke" or a key of `SHAPES`."""
  smoke = variant == "smoke"
  config = quickstart.like("shapes", variant, *SHAPES)
  config.faults = ()
  if smoke:
    return config
  shape = SHAPES[variant or "35m"]
  config.total_tokens = round(_TOKENS_PER_PARAM * shape.params)
  config.fleet.pace_step_secs = 0.0
  config.task.options.update(
    d_model=shape.d_model,
    num_layers=shape.num_layers,
    num_heads=shape.num_heads,
    # Three matrices of it are as large as two of four widths.
    d_ff=8 * shape.d_model // 3 // 64 * 64,
    vocab=_VOCAB,
    compute_dtype="bfloat16",
    seq_len=2048,
  )
  config.programs.update(eval_every_tokens=0)
  return config
