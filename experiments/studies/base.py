"""What the studies of learning have in common.

Every point is one run of the byte model on the standard library's text, in
virtual time on one core; `--only=PATTERN` does some of a study's. Rules: 20
tokens a parameter and at least 100 rounds a fragment; every arm is tuned with
as many runs, on a seed that no confirmation has; an optimum at the edge of its
grid is called unbracketed.
"""

from collections.abc import Sequence
from typing import Any

import ml_collections

from diloco import hyper

TUNING_SEED = 0
CONFIRMING_SEEDS = (1, 2, 3, 4, 5)
TOKENS_A_STEP = 512  # of an island

MUON = {
  "task.options.optimizer": "muon",
  "task.options.learning_rate": 0.016,
}
ONE_JOB = {"method": "data_parallel", "sync.num_fragments": 1}
TOGETHER = {"sync.quorum": 4, "sync.grace": "0", "sync.follow": False}  # K = M
# What a field is called in a point's name, if not by its own.
_WORDS = {
  "outer.learning_rate": "outer",
  "programs.checkpoint_every_steps": "saved",
}

# Width, depth and tokens; `small` has 265 k parameters, `medium` 886 k.
_SIZES = {
  "small": (96, 2, 288, 5_300_000),
  "medium": (128, 4, 384, 17_700_000),
}


def get_config(
  name: str, size: str = "small", islands: int = 4, fragments: int = 12
) -> ml_collections.ConfigDict:
  """A decoupled run of so many equal islands.

  Args:
    name: of the study.
    size: "small", "medium" or "smoke".
    islands: M.
    fragments: P.
  """
  smoke = size == "smoke"
  width, depth, hidden, tokens = _SIZES["small" if smoke else size]
  config = ml_collections.ConfigDict()
  config.name = name
  config.engine = "virtual"
  config.method = "decoupled"
  config.seed = TUNING_SEED
  config.total_tokens = 100_000 if smoke else tokens
  config.task = ml_collections.ConfigDict(
    dict(
      name="language_model",
      options=dict(
        d_model=32 if smoke else width,
        num_layers=1 if smoke else depth,
        num_heads=4,
        d_ff=64 if smoke else hidden,
        seq_len=128,
        batch_size=TOKENS_A_STEP // 128,
        learning_rate=0.004,
      ),
    )
  )
  config.fleet = ml_collections.ConfigDict(
    dict(slices=slices(islands), pace_step_secs=0.1, jitter=0.1)
  )
  config.sync = ml_collections.ConfigDict(
    dict(every=12, num_fragments=fragments)
  )
  config.programs = ml_collections.ConfigDict(
    dict(
      window_steps=12,
      checkpoint_every_steps=0,
      final_eval_batches=2 if smoke else 256,
    )
  )
  config.virtual = ml_collections.ConfigDict(dict(latency_secs=0.01))
  return config


def against_one_job(
  rates: Sequence[float],
  job: float,
  islands: float,
  *more: tuple[hyper.Point, float],
) -> list[hyper.Point]:
  """Four islands and one job: learning rates by one seed, then five seeds.

  Args:
    rates: learning rates that all are tuned by.
    job: the rate with which the job is confirmed.
    islands: that with which four islands are, with half the studies' H.
    more: other arms, each with its own.
  """
  merged = {"sync.merge": "mean", "sync.every": 6, "sync.num_fragments": 6}
  arms: tuple[tuple[hyper.Point, float], ...] = (
    (ONE_JOB, job),
    (merged, islands),
    *more,
  )
  field = "task.options.learning_rate"
  tuning = hyper.product([arm for arm, _ in arms], hyper.sweep(field, rates))
  best = [arm | {field: rate} for arm, rate in arms]
  return named(
    hyper.chain(
      hyper.product([{"seed": TUNING_SEED}], tuning),
      hyper.product(hyper.sweep("seed", CONFIRMING_SEEDS), best),
    )
  )


def named(points: list[hyper.Point]) -> list[hyper.Point]:
  """The points, with names that say what they have."""
  found = []
  for point in points:
    words: list[str] = []
    for field, value in point.items():
      if field == "method":
        words.insert(0, value)
      elif field == "virtual.trace":
        words.append("trace")
      elif field == "fleet.slices":
        slowest = min(s.get("relative_speed", 1.0) for s in value)
        words.insert(0, f"m{len(value)}")
        words += [f"slowest-{slowest}"] if slowest < 1 else []
      else:
        word = _WORDS.get(field, field.rpartition(".")[2])
        words.append(f"{word}-{value}")
    found.append({"name": ".".join(words).replace("_", "")} | point)
  return found


def slices(count: int) -> tuple[dict[str, Any], ...]:
  """So many equal slices."""
  return (dict(kind="cpu", topology="1"),) * count
