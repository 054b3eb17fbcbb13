"""What a version, and an outer gradient, must be to count as readable."""

import dataclasses

import numpy as np
import pytest
from cut_builder import PLAN, CutRun, filled

from diloco import errors
from diloco.snapshots import arrays, digest, keys, restore, verify

BUFFERS = ("momentum",)


def write(run, head, part, value=1.0):
  tensors = PLAN.fragments[head.fragment]
  whole = [arrays.Tensor.whole(t.name, filled(t, value)) for t in tensors]
  run.store.arrays.write(f"{head.payload}/{part}", whole)


@pytest.fixture
def run(tmp_path):
  return CutRun(tmp_path)


def test_version_is_readable_only_with_all_that_its_head_promises(run):
  head = run.commit(0, 3, {}, 1.0)

  def check(buffers=BUFFERS, **changes):
    one = dataclasses.replace(head, **changes)
    verify.check_version(run.store, PLAN, buffers, one)

  def lacks(*args, **changes):
    with pytest.raises(errors.CorruptSnapshotError):
      check(*args, **changes)

  check()
  lacks(digest="0" * len(head.digest))
  named = ((t.name, filled(t, 1.0)) for t in PLAN.fragments[0])
  check(digest=digest.tensors(named, "as earlier versions took it"))
  lacks(chunks=[])
  lacks(chunks=[*head.chunks, [1]])
  lacks(codec="bf16")
  lacks(deltas=[["x", "y"]])
  write(run, head, keys.MASTER)
  check(deltas=[["x", "y"]])
  delayed = (*BUFFERS, keys.DELAYED)
  write(run, head, keys.DELAYED)
  lacks(delayed)
  count = arrays.Tensor.whole(keys.ARRIVALS, np.float32(2.0))
  run.store.arrays.write(f"{head.payload}/{keys.ARRIVALS}", [count])
  check(delayed)
  run.store.delete_tree(f"{head.payload}/momentum")
  lacks()
  check(())


def test_first_version_has_nothing_of_the_outer_optimizer(run):
  verify.check_version(run.store, PLAN, BUFFERS, run.head(0))


def test_outer_gradient_that_cannot_be_read_says_why(run, tmp_path):
  verifier = verify.Verifier(tmp_path, run.store, PLAN, buffers=BUFFERS)
  sent = run.publish(1, 0, 0, 0, 8)
  assert verifier.check_contribution(sent) == ""
  for changes, why in (
    ({"plan_hash": "else"}, "of another run"),
    ({"chunks": []}, "shorter"),
    ({"codec": "bf16"}, ""),
  ):
    one = dataclasses.replace(sent, **changes)
    assert why in verifier.check_contribution(one) != ""
  run.store.delete_tree(sent.payload)
  assert verifier.check_contribution(sent) != ""


def test_old_controller_neither_holds_the_run_nor_chooses(run):
  run.perform(restore.hold(5))
  run.perform(restore.hold(5))
  with pytest.raises(errors.FencedError, match="token 5"):
    run.perform(restore.hold(4))
  with pytest.raises(errors.FencedError, match="token 5"):
    run.perform(restore.choose(lambda parts: "", lambda sent: "", token=4))
