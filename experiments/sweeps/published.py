"""Goodput over fleet sizes: rigid, elastic, and islands.

Question: what do 150 thousand to 2.4 million chips deliver, each interrupted
once a year, as one rigid job, one elastic job, or 2 to 16 islands?

Command: `diloco simulate --sweep=experiments/sweeps/published.py --seeds=3`.
Cost: two minutes on one core. Expected: the rows of one job as published (they
were fitted); 8 islands at 1.2 million chips 88 % (published) and 100 % uptime;
M islands like one elastic job with M times fewer chips.
Paper: Decoupled DiLoCo, arXiv 2604.21428.
"""

from diloco import hyper

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)


def get_sweep() -> list[hyper.Point]:
  """Returns one point for each cell."""
  one_job = hyper.product(
    hyper.sweep("islands", [1]), hyper.sweep("elastic", [False, True])
  )
  several = hyper.product(
    hyper.sweep("islands", [2, 4, 8, 16]), hyper.sweep("elastic", [True])
  )
  return hyper.product(
    hyper.chain(one_job, several), hyper.sweep("chips", CHIPS)
  )
