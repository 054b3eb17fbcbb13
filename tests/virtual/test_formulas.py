"""Runs against their own tapes, by published formulas in float64.

What was decided when (who published, adopted and was merged) is the run's; what
became of the numbers is computed here, with none of the project's arithmetic.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import oracles
import pytest
import test_oracles as loops

from diloco.tape import events, reader

LEAVES = ("w", "v")  # of fragments 0 and 1


def as_is(values, *_):
  return values


def bfloat16(values, *_):
  return np.float64(np.float32(values).astype(ml_dtypes.bfloat16))


def int4(values, *_):
  """In blocks of 8, the last one short, with scales of bfloat16."""
  blocks = np.zeros((-(-values.size // 8), 8), np.float32)
  blocks.reshape(-1)[: values.size] = values.ravel()
  scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(7)
  scales = np.float32(scales.astype(ml_dtypes.bfloat16))
  found = np.clip(np.rint(blocks / scales), -7, 7) * scales
  return np.float64(found.ravel()[: values.size].reshape(values.shape))


@dataclasses.dataclass
class Formulas:
  """How one run computes."""

  adoption: str
  merge: str = "mean"
  rate: float = 1.0
  mu: float = 0.0  # of Nesterov's momentum
  decay: Callable[[int], float] = lambda stale: 1.0
  align: bool = False
  up: Callable[..., Any] = as_is  # what a codec keeps
  owes: bool = False  # and what it leaves is sent later
  down: Callable[..., Any] = as_is  # (version, the one before)


class Island:
  """One island, up to where its tape says."""

  def __init__(self, folder, number, formulas):
    kinds = (events.SUBMITTED, events.ADOPTED)
    tape = reader.stream(folder, only_role=f"island-{number}").events
    self.lines = [line for line in tape if line["event"] in kinds]
    self.number, self.formulas = number, formulas
    self.params = loops.Task().init(jax.random.key(0))
    self.state = optax.adamw(loops.RATE).init(self.params)
    self.rows, self.step = loops.Rows(number), 0
    self.anchors = [np.float64(self.params[name]) for name in LEAVES]
    self.references = [{0: anchor} for anchor in self.anchors]
    self.owed = [0.0, 0.0]

  def advance(self, versions, sent):
    """Follows its tape as long as the versions are there that it adopts."""
    while self.lines:
      line = self.lines[0]
      fragment, step = line["fragment"], line["step"]
      publishes = line["event"] == events.SUBMITTED
      if not publishes and (fragment, line["version"]) not in versions:
        return
      batches = itertools.islice(
        iter(self.rows.__next__, None), step - self.step
      )
      self.params, self.state = loops.inner_loop(
        self.params, self.state, batches
      )
      self.step = step
      if publishes:
        begun = line["first_step"], line["base_version"]
        sent[self.number, fragment, step] = self.publish(fragment), *begun
      else:
        self.adopt(fragment, versions[fragment, line["version"]], line)
      del self.lines[0]

  def publish(self, fragment):
    local = np.float64(self.params[LEAVES[fragment]])
    self.references[fragment][self.step] = local
    grad = self.anchors[fragment] - local + self.owed[fragment]
    kept = self.formulas.up(grad)
    if self.formulas.owes:
      self.owed[fragment] = grad - kept
    return kept

  def adopt(self, fragment, version, line):
    name, kept_from = LEAVES[fragment], line["kept_from_step"]
    local = np.float64(self.params[name])
    value = {
      "overwrite": version,
      "blend": 0.25 * local + 0.75 * version,
      "carry": local + version - self.references[fragment].get(kept_from, 0),
    }[self.formulas.adoption]
    self.references[fragment] = {kept_from: version}
    self.anchors[fragment] = version
    self.params = self.params | {name: jnp.float32(value)}


def computed(folder, num_islands, formulas):
  """The last global parameters, by leaf."""
  islands = [Island(folder, m, formulas) for m in range(num_islands)]
  versions = {(p, 0): islands[0].anchors[p] for p in (0, 1)}
  masters, sent = dict(versions), {}
  momenta = [np.zeros_like(anchor) for anchor in islands[0].anchors]
  lines = reader.stream(folder, only_role="syncer").events
  for line in [found for found in lines if found["event"] == events.MERGED]:
    for island in islands:
      island.advance(versions, sent)
    p, before = line["fragment"], line["version"] - 1
    grads, weights = [], []
    for told in line["contributions"]:
      grad, first, base = sent[told["island"], p, told["step"]]
      steps = told["step"] - first
      tokens = steps * loops.Task.tokens_per_batch
      weights.append(tokens**2 / steps * formulas.decay(before - base))
      if formulas.align:
        grad = oracles.heloco(grad, (1 - formulas.mu) * momenta[p])
      grads.append(grad)
    shape = grads[0].shape
    grad = oracles.merge(grads, weights, formulas.merge, shape=shape)
    grad = grad.reshape(shape)
    momenta[p] = formulas.mu * momenta[p] + grad
    rate = formulas.rate
    if not formulas.mu:  # who is not in it counts as if it had sent zeros
      present = len({told["island"] for told in line["contributions"]})
      rate *= present / (present + len(line["absent"]))
    step = rate * (grad + formulas.mu * momenta[p])
    masters[p, before + 1] = masters[p, before] - step
    versions[p, before + 1] = formulas.down(
      masters[p, before + 1], versions[p, before]
    )
  newest = [max(k for k in versions if k[0] == p) for p in (0, 1)]
  return {n: versions[k] for n, k in zip(LEAVES, newest, strict=True)}


UNEQUAL = {"speeds": (1.0, 0.71, 0.43), "virtual": {"latency_secs": 0.05}}
LATE = {
  "sync": {"every": 6, "blend_alpha": 0.25},
  "virtual": {"latency_secs": 0.04},
}
AT_ONCE = {"sync": {"adoption": "overwrite", "wait_after": 0}}
RUNS = {
  "carried, unequal islands": (
    "decoupled",
    UNEQUAL | {"sync": {"every": 6}},
    Formulas("carry", "rda", decay=lambda stale: 0.7**stale),
  ),
  "overwritten, with momentum and hyperbolic decay": (
    "decoupled",
    UNEQUAL
    | {
      "sync": {
        "adoption": "overwrite",
        "follow": False,
        "staleness_kind": "hyperbolic",
        "merge": "mean",
      },
      "outer": {"learning_rate": 0.6, "momentum": 0.5},
    },
    Formulas(
      "overwrite",
      rate=0.6,
      mu=0.5,
      decay=lambda stale: 1 / (1 + (1 / 0.7 - 1) * stale),
    ),
  ),
  "streaming": ("streaming", LATE, Formulas("blend", rate=0.4, mu=0.9)),
  "streaming, versions in bfloat16": (
    "streaming",
    LATE | {"sync": LATE["sync"] | {"down_codec": "bf16"}},
    Formulas("blend", rate=0.4, mu=0.9, down=bfloat16),
  ),
  "streaming, versions as differences in int4": (
    "streaming",
    LATE | {"sync": LATE["sync"] | {"down_codec": "int4", "codec_block": 8}},
    Formulas(
      "blend",
      rate=0.4,
      mu=0.9,
      down=lambda new, before: before + int4(new - before),
    ),
  ),
  "int4 and what it owes": (
    "streaming",
    {
      "sync": AT_ONCE["sync"]
      | {"codec": "int4", "codec_block": 8, "error_feedback": True}
    },
    Formulas("overwrite", rate=0.4, mu=0.9, up=int4, owes=True),
  ),
  "corrected by the momentum": (
    "streaming",
    {
      "sync": AT_ONCE["sync"] | {"merge_align": True},
      "outer": {"learning_rate": 0.7, "momentum": 0.6},
    },
    Formulas("overwrite", rate=0.7, mu=0.6, align=True),
  ),
  "flattened spectrum": (
    "streaming",
    {"sync": AT_ONCE["sync"] | {"merge": "iso"}},
    Formulas("overwrite", "iso", rate=0.4, mu=0.9),
  ),
}


@pytest.mark.parametrize("name", RUNS)
def test_run_is_what_its_formulas_make_of_its_decisions(tmp_path, name):
  method, fields, formulas = RUNS[name]
  sync = {"num_fragments": 2, "overlap_steps": 1} | fields["sync"]
  found = loops.train(tmp_path, method, steps=24, **fields | {"sync": sync})
  loops.close(found, computed(tmp_path, loops.M, formulas))
