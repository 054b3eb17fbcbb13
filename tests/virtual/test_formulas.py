"""Runs against their own tapes, by published formulas in float64.

What was decided when (who published, adopted and was merged) is the run's; what
became of the numbers is computed here, with none of the project's arithmetic.
"""

import dataclasses
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
H = 6


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
  up: Callable[..., Any] = as_is  # what a codec keeps
  owes: bool = False  # and what it leaves is sent later
  down: Callable[..., Any] = as_is  # (version, the one before)


class Island:
  """One island, up to where its tape says, over all its lives."""

  def __init__(self, folder, number, formulas):
    kinds = {
      *(events.STARTED, events.SUBMITTED, events.ADOPTED),
      *(events.SAVING, events.REBASED),
    }
    tape = reader.stream(folder, only_role=f"island-{number}").events
    self.lines = [line for line in tape if line["event"] in kinds]
    self.number, self.formulas = number, formulas
    self.params = loops.Task().init(jax.random.key(0))
    self.state = optax.adamw(loops.RATE).init(self.params)
    self.rows, self.step, self.life = loops.Rows(number), 0, 1
    self.last = -H  # step of a line
    self.anchors = [np.float64(self.params[name]) for name in LEAVES]
    self.references = [{0: anchor} for anchor in self.anchors]
    self.sent = list(self.anchors)  # values last published, or the anchors
    self.owed = [0.0, 0.0]
    self.saves = {}

  def advance(self, versions, sent, states):
    """Follows its tape as far as what it needs is there; whether it did."""
    moved = False
    while self.lines and self.do(self.lines[0], versions, sent, states):
      del self.lines[0]
      moved = True
    return moved

  def do(self, line, versions, sent, states):
    """What one line says; False if it needs what is not there yet."""
    kind, p = line["event"], line.get("fragment")
    if kind == events.STARTED:
      # No line tells of the last steps of a life, after which it may still
      # have given a peer its moments.
      self.train(max(self.step, self.last + H), states)
      return self.begin(line, versions, states)
    self.last = line["step"]
    self.train(line["step"], states)
    if kind == events.ADOPTED and (p, line["version"]) not in versions:
      return False
    if kind == events.SUBMITTED:
      begun = line["first_step"], line["base_version"]
      key = self.number, self.life, p, self.step
      sent[key] = self.publish(p), *begun
    elif kind == events.SAVING:
      saved = self.params, self.state, list(self.sent)
      self.saves[self.life, line["serial"]] = saved
    elif kind == events.REBASED:
      self.start_over(p, self.anchors[p], self.step)
    elif "muted_until" in line:
      first = max(line["muted_until"], self.step)
      self.start_over(p, versions[p, line["version"]], first)
    else:
      self.adopt(p, versions[p, line["version"]], line["kept_from_step"])
    return True

  def train(self, step, states):
    while self.step < step:
      batch = next(self.rows)
      self.params, self.state = loops.inner_loop(
        self.params, self.state, [batch]
      )
      self.step += 1
      states[self.number, self.life, self.step] = self.state

  def begin(self, line, versions, states):
    """A life: global versions, unsent progress, moments of some age."""
    bases = list(enumerate(line["base_versions"]))
    own, peer = line["checkpoint"], line["peer"]
    at = peer and (peer["island"], peer["incarnation"], peer["step"])
    if not versions.keys() >= set(bases) or (peer and at not in states):
      return False
    self.life, self.step = line["incarnation"], line["step"]
    self.rows.seek(self.step)
    if own:
      saved, self.state, sent = self.saves[own["incarnation"], own["serial"]]
    elif peer:
      self.state = states[at]
    for base, first in zip(bases, line["unsent_from_step"], strict=True):
      p, name = base[0], LEAVES[base[0]]
      self.start_over(p, versions[base], first)
      if first < self.step:
        self.put(p, np.float64(saved[name]) + versions[base] - sent[p])
    return True

  def put(self, fragment, value):
    self.params = self.params | {LEAVES[fragment]: jnp.float32(value)}

  def start_over(self, fragment, version, first_step):
    self.anchors[fragment] = self.sent[fragment] = version
    self.references[fragment] = {first_step: version}
    self.put(fragment, version)

  def publish(self, fragment):
    local = np.float64(self.params[LEAVES[fragment]])
    self.references[fragment][self.step] = self.sent[fragment] = local
    grad = self.anchors[fragment] - local + self.owed[fragment]
    kept = self.formulas.up(grad)
    if self.formulas.owes:
      self.owed[fragment] = grad - kept
    return kept

  def adopt(self, fragment, version, kept_from):
    local = np.float64(self.params[LEAVES[fragment]])
    value = {
      "overwrite": version,
      "blend": 0.25 * local + 0.75 * version,
      "carry": local + version - self.references[fragment].get(kept_from, 0),
    }[self.formulas.adoption]
    self.start_over(fragment, version, kept_from)
    self.put(fragment, value)


def computed(folder, num_islands, formulas):
  """The last global parameters, by leaf."""
  islands = [Island(folder, m, formulas) for m in range(num_islands)]
  versions = {(p, 0): islands[0].anchors[p] for p in (0, 1)}
  masters, sent, states = dict(versions), {}, {}
  momenta = [np.zeros_like(anchor) for anchor in islands[0].anchors]
  lines = reader.stream(folder, only_role="syncer").events
  for line in [found for found in lines if found["event"] == events.MERGED]:
    while any([one.advance(versions, sent, states) for one in islands]):
      pass  # one may wait for another one's version or state
    p, before = line["fragment"], line["version"] - 1
    grads, weights = [], []
    for told in line["contributions"]:
      key = told["island"], told["incarnation"], p, told["step"]
      grad, first, base = sent[key]
      steps = told["step"] - first
      tokens = steps * loops.Task.tokens_per_batch
      weights.append(tokens**2 / steps * formulas.decay(before - base))
      grads.append(grad)
    grad = oracles.merge(grads, weights, formulas.merge)
    grad = grad.reshape(grads[0].shape)
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
  "sync": {"every": H, "blend_alpha": 0.25},
  "virtual": {"latency_secs": 0.04},
}
AT_ONCE = {"sync": {"adoption": "overwrite", "wait_after": 0}}
RUNS = {
  "carried, unequal islands": (
    "decoupled",
    UNEQUAL | {"sync": {"every": H}},
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
}


@pytest.mark.parametrize("name", RUNS)
def test_run_is_what_its_formulas_make_of_its_decisions(tmp_path, name):
  method, fields, formulas = RUNS[name]
  sync = {"num_fragments": 2, "overlap_steps": 1} | fields["sync"]
  found = loops.train(tmp_path, method, steps=24, **fields | {"sync": sync})
  loops.close(found, computed(tmp_path, loops.M, formulas))


@pytest.mark.parametrize("adoption", ["carry", "overwrite"])
def test_islands_come_back_to_where_the_formulas_have_them(tmp_path, adoption):
  deaths = tmp_path / "deaths.csv"
  deaths.write_text(
    "secs,target,repair_secs\n2.25,island-0,0.5\n3.1,island-2,0.4\n"
    "3.2,island-1,1.2\n"  # right after it has saved, between two publications
  )
  folder = tmp_path / "run"
  found = loops.train(
    folder,
    "decoupled",
    steps=40,
    speeds=(1.0, 0.8, 0.6),
    sync={"num_fragments": 2, "every": H, "adoption": adoption},
    virtual={"latency_secs": 0.01, "trace": f"{deaths}"},
    programs={"checkpoint_every_steps": 20, "final_eval_batches": 1},
  )
  formulas = Formulas(adoption, "rda", decay=lambda stale: 0.7**stale)
  loops.close(found, computed(folder, loops.M, formulas))
  lives = [
    line
    for m in range(loops.M)
    for line in reader.stream(folder, only_role=f"island-{m}").events
    if line["event"] == events.STARTED and line["incarnation"] > 1
  ]
  assert any(line["peer"] for line in lives)
  assert any(line["checkpoint"] for line in lives)
  first_steps = [
    (line["step"], first)
    for line in lives
    for first in line["unsent_from_step"]
  ]
  carried = any(first < step for step, first in first_steps)
  assert carried or adoption == "overwrite"
  assert any(first > step for step, first in first_steps)  # done again
