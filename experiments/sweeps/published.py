"""Goodput over fleet sizes: rigid, elastic, and islands.

Question: what do 150 thousand to 2.4 million chips deliver, each interrupted
once a year, as one rigid job, one elastic job, or 2 to 16 islands?

Command: `diloco simulate --sweep=experiments/sweeps/published.py --seeds=3`.
Cost: two minutes on one core. Expected: the rows of one job as published (they
were fitted); 8 islands at 1.2 million chips 88 % (published) and 100 % uptime;
M islands like one elastic job with M times fewer chips.
Paper: Decoupled DiLoCo, arXiv 2604.21428.
"""

from typing import Any

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)


def get_sweep() -> list[dict[str, Any]]:
  """Returns one row for each cell."""
  rows: list[dict[str, Any]] = []
  for islands, elastic in (
    (1, False),
    (1, True),
    (2, True),
    (4, True),
    (8, True),
    (16, True),
  ):
    rows += [
      {"chips": chips, "islands": islands, "elastic": elastic}
      for chips in CHIPS
    ]
  return rows
