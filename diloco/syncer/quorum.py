"""How many islands a merge needs."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MinimumQuorum:
  """K of M: the fewest islands a round may close with."""

  minimum: int  # K

  def reached(self, present: int) -> bool:
    """Whether `present` distinct islands suffice."""
    return present >= self.minimum
