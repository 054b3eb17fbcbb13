"""From contributions in a store to the head of a version; values by hand."""

import dataclasses

import numpy as np
import pytest
from cut_builder import PLAN, CutRun, close_of, spoil

from diloco import errors
from diloco.snapshots import arrays, digest, keys, operations
from diloco.syncer import (
  heads,
  orders,
  outer_optimizer,
  protocol,
  round_merge,
)

(SPEC,) = PLAN.fragments[0]


class Committer:
  """Heads, and the arithmetic of their versions."""

  def __init__(self, run, token, momentum):
    self.run, self.held = run, heads.Heads(token)
    run.perform(self.held.fence(2))
    outer = outer_optimizer.OuterOptimizer(0.5, momentum)
    self.merger = round_merge.RoundMerger(run.store, PLAN, "mean", outer)

  def close_round(self, close, weights, facts_of):
    def content_of(merged):
      chunks = self.merger.chunks(close.fragment)
      return heads.Content(chunks, facts_of(merged), merged.digest)

    def execute(operation):
      if isinstance(operation, operations.Merge):
        return self.merger.merge(operation)
      return self.run.store.execute(operation)

    of_chosen = [weights[c.contribution.key] for c in close.chosen]
    script = self.held.close_round(close, of_chosen, content_of)
    operations.perform(script, execute)
    return self.held.records[close.fragment].merged


class Leader:
  """A committer that holds the heads of a run."""

  def __init__(self, tmp_path, momentum=0.0, token=3):
    self.run = CutRun(tmp_path)
    self.momentum = momentum
    self.made = self.committer(token)

  def committer(self, token):
    return Committer(self.run, token, self.momentum)

  def publish(self, island, values, *, norm=None):
    """A contribution to fragment 0 of these values, steps (0, 8]."""
    record = self.run.publish(0, island, 0, 0, 8)
    grad = np.asarray(values, np.float32)
    self.run.store.arrays.write(
      record.payload, [arrays.Tensor.whole(SPEC.name, grad)]
    )
    norm = float(np.linalg.norm(grad)) if norm is None else norm
    return dataclasses.replace(record, norms=[norm], num_bytes=16 + island)

  def close(self, *sent, version=1):
    chosen = [orders.Chosen(c, 0, 0.0, 0.0) for c in sent]
    clock = {c.island: c.step for c in sent}
    return close_of(version=version, chosen=tuple(chosen), clock=clock)

  def merge(self, weights_of, **close):
    """Merges contributions by weight; returns what `facts_of` was given."""
    seen = []

    def facts_of(merged):
      seen.append(merged)
      return {"norm": merged.outer_grad_norm}

    weights = {sent.key: weight for sent, weight in weights_of}
    found = self.made.close_round(
      self.close(*(sent for sent, _ in weights_of), **close), weights, facts_of
    )
    (merged,) = seen
    assert found == {"norm": merged.outer_grad_norm}
    return merged

  def values(self, part="params"):
    payload = self.run.head(0).payload
    return self.run.store.arrays.read(f"{payload}/{part}", SPEC.name)


def test_version_is_the_weighted_outer_step_from_the_one_before(tmp_path):
  leader = Leader(tmp_path)
  first = leader.publish(0, [4, 0, 0, 8])
  second = leader.publish(1, [0, 4, 0, 8])
  merged = leader.merge([(first, 3.0), (second, 1.0)])
  # theta = 0 - 0.5 (3/4 g_0 + 1/4 g_1)
  assert leader.values().tolist() == [-1.5, -0.5, 0, -4]
  assert merged.outer_grad_norm == pytest.approx((9 + 1 + 64) ** 0.5)
  assert merged.num_bytes == 16 + 17
  assert merged.digest == digest.tensors([(SPEC.name, leader.values())])


def test_weights_belong_to_contributions_whatever_their_order(tmp_path):
  leader = Leader(tmp_path)
  sent = [leader.publish(m, np.full(4, m)) for m in range(3)]
  close = leader.close(*sent)
  weights = {s.key: 10.0**s.island for s in reversed(sent)}
  leader.made.close_round(close, weights, lambda merged: {"told": True})
  mean = (0 * 1 + 1 * 10 + 2 * 100) / 111
  np.testing.assert_allclose(leader.values(), -0.5 * mean, rtol=1e-6)


def test_head_of_the_version_has_the_facts_and_the_contents_digest(tmp_path):
  leader = Leader(tmp_path)
  sent = leader.publish(1, [1, 1, 1, 1])
  leader.made.held.cut = 4
  merged = leader.merge([(sent, 2.0)])
  head = leader.run.head(0)
  assert leader.made.held.records == [head, leader.run.head(1)]
  assert (head.version, head.token, head.cut) == (1, 3, 4)
  assert head.clock == {"1": 8}
  assert head.merged == {"norm": merged.outer_grad_norm}
  assert head.digest == merged.digest
  assert head.chunks == [[4]]
  assert leader.made.held.token == 3 and leader.made.held.standing == {}


def test_momentum_is_written_beside_the_parameters_and_used(tmp_path):
  leader = Leader(tmp_path, momentum=0.5)
  sent = [leader.publish(m, [2, 2, 2, 2]) for m in range(2)]
  leader.merge([(sent[0], 1.0)])
  # Nesterov: m = g; theta = -0.5 (g + 0.5 m)
  assert leader.values("momentum").tolist() == [2] * 4
  assert leader.values().tolist() == [-1.5] * 4
  leader.merge([(sent[1], 1.0)], version=2)
  # m = 0.5 * 2 + 2; theta = -1.5 - 0.5 (2 + 0.5 * 3)
  assert leader.values("momentum").tolist() == [3] * 4
  assert leader.values().tolist() == [-3.25] * 4


def test_without_a_momentum_term_none_is_stored(tmp_path):
  leader = Leader(tmp_path)
  leader.merge([(leader.publish(0, [1, 1, 1, 1]), 1.0)])
  names = leader.run.store.names(leader.run.head(0).payload)
  assert names == ["params"]


def _lose(leader, sent):
  leader.run.store.delete_tree(sent.payload)
  return sent


def _not_finite(leader, sent):
  return leader.publish(sent.island, [1, np.nan, 1, 1], norm=2.0)


def _lie(leader, sent):
  return dataclasses.replace(sent, norms=[3.0])


@pytest.mark.parametrize(
  ("spoil_it", "reason"),
  [(_lose, "corrupt"), (_not_finite, "not_finite"), (_lie, "norm_mismatch")],
)
def test_bad_contribution_is_refused_by_name_and_nothing_moves(
  tmp_path, spoil_it, reason
):
  leader = Leader(tmp_path)
  good = leader.publish(0, [1, 1, 1, 1])
  bad = spoil_it(leader, leader.publish(1, [1, 1, 1, 1]))
  before = leader.run.head(0)
  with pytest.raises(protocol.RefusedError) as refused:
    leader.merge([(good, 1.0), (bad, 1.0)])
  ((key, why),) = refused.value.reasons.items()
  assert key == bad.key and why.startswith(reason)
  assert leader.run.head(0) == before
  assert len(leader.run.store.names("globals/0000")) == 1
  leader.merge([(good, 1.0)])
  assert leader.values().tolist() == [-0.5] * 4


def test_deposed_committer_moves_nothing(tmp_path):
  leader = Leader(tmp_path)
  sent = leader.publish(0, [1, 1, 1, 1])
  leader.committer(token=4)
  with pytest.raises(errors.FencedError):
    leader.merge([(sent, 1.0)])
  head = leader.run.head(0)
  assert (head.version, head.token) == (0, 4)


def test_what_facts_of_refuses_is_not_committed(tmp_path):
  leader = Leader(tmp_path)
  sent = leader.publish(0, [1, 1, 1, 1])

  def refuse(merged):
    raise errors.FencedError("another leads")

  with pytest.raises(errors.FencedError):
    leader.made.close_round(leader.close(sent), {sent.key: 1.0}, refuse)
  assert leader.run.head(0).version == 0


def test_fragment_without_its_tensors_stands_still_until_it_moves(tmp_path):
  leader = Leader(tmp_path)
  sent = leader.publish(0, [1, 1, 1, 1])
  payload = leader.run.head(0).payload
  leader.run.store.delete_tree(payload)
  with pytest.raises(errors.CorruptSnapshotError):
    leader.merge([(sent, 1.0)])
  assert list(leader.made.held.standing) == [0]
  leader.run.store.arrays.write(
    f"{payload}/params",
    [arrays.Tensor.whole(SPEC.name, np.zeros(4, np.float32))],
  )
  leader.merge([(sent, 1.0)])
  assert leader.made.held.standing == {}


def test_standstills_are_heads_that_were_there_and_cannot_be_read(tmp_path):
  run = CutRun(tmp_path)
  assert run.perform(heads.standstills(3)) == []  # fragment 2 never was
  run.commit(0, 7, {}, 1.0)
  run.store.delete(keys.head_key(0))
  spoil(run, keys.head_key(1))
  lost, damaged = run.perform(heads.standstills(3))
  assert (lost.fragment, lost.version) == (0, 7)
  assert lost.reason == f"{keys.head_key(0)} is lost"
  assert (damaged.fragment, damaged.version) == (1, 0)
  assert damaged.reason.startswith(f"{keys.head_key(1)}: ")


def test_first_version_that_is_lost_is_a_standstill_once_somebody_publishes(
  tmp_path,
):
  run = CutRun(tmp_path)
  run.store.delete(keys.head_key(0))
  assert run.perform(heads.standstills(2)) == []  # it may never have been
  run.publish(1, 0, 0, 0, 8)
  (lost,) = run.perform(heads.standstills(2))
  assert (lost.fragment, lost.version) == (0, 0)
