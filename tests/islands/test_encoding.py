"""What a commit record says of its tensors is what the syncer finds."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from diloco.fragments import codec as codec_lib
from diloco.fragments import norms, partition
from diloco.islands import encoding
from diloco.syncer import merge, sources

CASES = {
  "halfway between two of bfloat16": [1 + 2**-8, 1.0],
  "too small for a square": [1e-30, 2e-38],
  "smaller than any normal number": [1e-39, 0.0],
  "too large for bfloat16": [3.4e38, 1.0],
  "a long tail": [4096.0, *[1.0] * 5000],
}


@pytest.mark.parametrize("codec", ["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_norm_is_that_of_the_values_as_encoded(name, codec):
  values = np.asarray(CASES[name], np.float32).astype(codec_lib.FLOATS[codec])
  plan = partition.partition([partition.Tensor("w", values.shape, "rda")], 1)
  encoder = encoding.Encoder(plan, codec_lib.of(codec), {})
  encoded = encoder.encode(0, {"w": jnp.asarray(values)})
  (_, values), *_ = encoded.tensors[0].pieces
  source = sources.MemorySource(values)
  with np.errstate(all="ignore"):
    square = sum(map(norms.square, source.blocks(norms.BLOCK)))
  assert math.sqrt(square) == pytest.approx(
    encoded.norms[0], rel=merge.NORM_TOLERANCE / 3
  )
