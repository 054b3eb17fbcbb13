"""Codecs of published outer gradients.

A codec maps float32 to the type a contribution is stored in. Outer gradients
tolerate low precision far better than parameters do, which is why islands
publish differences from their anchor and never parameters.

Reference: Streaming DiLoCo, arXiv 2501.18512, section 2.4.
"""

import ml_dtypes
import numpy as np

from diloco import errors

DTYPES = {
  "f32": np.dtype(np.float32),
  "bf16": np.dtype(ml_dtypes.bfloat16),
}


def check(codec: str) -> None:
  """Raises `UserError` for a codec that does not exist."""
  if codec not in DTYPES:
    raise errors.UserError(
      f"config.sync.codec = {codec!r}",
      "there is no such codec",
      f"choose one of {', '.join(sorted(DTYPES))}",
    )
