"""Eight islands of unequal speed: how many a round should wait for.

Question: islands run up to 18 % apart, and steps jitter by 10 %. What do
waiting for all, waiting for one, and waiting for one plus a grace window cost
in goodput, and how many islands does a merge get?

Command: `diloco simulate --sweep=experiments/sweeps/unequal_islands.py`.
Cost: a minute on one core. Expected: K = M in lockstep loses goodput, K = 1
keeps it and merges few islands, K = 1 with grace keeps both. The first two rows
are as the paper has it, islands that publish on their own schedule and wait for
the answer; the last two are this project's, whose islands never wait and follow
an open round.
Paper: Decoupled DiLoCo, arXiv 2604.21428.
"""

from diloco import hyper

ISLANDS = 8
COMMON = {
  "islands": ISLANDS,
  "mtbi_years": 0,
  "days": 0.04,
  "speeds": tuple(
    round(1 - 0.18 * m / (ISLANDS - 1), 4) for m in range(ISLANDS)
  ),
  "jitter": 0.1,
}


def get_sweep() -> list[hyper.Point]:
  """Returns one point for each way to close a round."""
  published = hyper.product(
    hyper.sweep("quorum", [ISLANDS, 1]),
    [{"grace": 0, "lockstep": True, "follow": False}],
  )
  here = hyper.product(
    hyper.sweep("quorum", [1, ISLANDS]), hyper.sweep("grace", ["adaptive"])
  )
  return hyper.product([COMMON], hyper.chain(published, here))
