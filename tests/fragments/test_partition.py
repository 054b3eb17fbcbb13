import itertools
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from diloco import errors
from diloco.fragments import partition


def _tensors(sizes):
  return [
    partition.Tensor(f"layer_{i}/w", (size,), "rda")
    for i, size in enumerate(sizes)
  ]


def _best_largest(sizes, bins):
  return min(
    max(
      sum(s for s, b in zip(sizes, of, strict=True) if b == k)
      for k in range(bins)
    )
    for of in itertools.product(range(bins), repeat=len(sizes))
  )


@hypothesis.given(
  st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3)
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_largest_fragment_is_within_four_thirds_of_best(sizes, bins):
  bins = min(bins, len(sizes))
  plan = partition.partition(_tensors(sizes), bins)
  largest = max(plan.size(p) for p in range(bins))
  assert largest <= 4 / 3 * _best_largest(sizes, bins)


@hypothesis.given(
  st.lists(st.integers(1, 10_000), min_size=1, max_size=60), st.data()
)
@hypothesis.settings(deadline=None)
def test_every_tensor_is_in_exactly_one_fragment(sizes, data):
  num_fragments = data.draw(st.integers(1, len(sizes)))
  tensors = _tensors(sizes)
  plan = partition.partition(tensors, num_fragments)
  placed = [t for tensors in plan.fragments for t in tensors]
  assert sorted(placed, key=lambda t: t.name) == sorted(
    tensors, key=lambda t: t.name
  )
  assert all(plan.fragments)
  assert plan.num_params == sum(sizes)


@hypothesis.given(
  st.lists(st.integers(1, 9), min_size=2, max_size=20), st.randoms()
)
@hypothesis.settings(deadline=None)
def test_plan_does_not_depend_on_the_order_of_tensors(sizes, random):
  tensors = _tensors(sizes)
  shuffled = list(tensors)
  random.shuffle(shuffled)
  plan = partition.partition(tensors, 2)
  assert partition.partition(shuffled, 2) == plan
  assert partition.partition(shuffled, 2).hash == plan.hash


def test_hash_tells_shapes_names_merges_and_grouping_apart():
  plans = [
    partition.partition([partition.Tensor(n, s, m), *_tensors([5, 7])], bins)
    for n, s, m, bins in [
      ("a", (2, 3), "rda", 2),
      ("a", (3, 2), "rda", 2),
      ("b", (2, 3), "rda", 2),
      ("a", (2, 3), "mean", 2),
      ("a", (2, 3), "rda", 1),
    ]
  ]
  assert len({plan.hash for plan in plans}) == len(plans)


def test_plan_round_trips_and_a_tampered_one_is_refused():
  plan = partition.partition(_tensors([3, 4, 5]), 2)
  data = plan.to_json()
  assert partition.FragmentPlan.from_json(data) == plan
  data["fragments"][0][0][1] = [99]
  with pytest.raises(errors.CorruptSnapshotError, match="hash"):
    partition.FragmentPlan.from_json(data)


@pytest.mark.parametrize("num_fragments", [0, -1, 4])
def test_impossible_number_of_fragments_is_refused(num_fragments):
  with pytest.raises(errors.UserError, match="num_fragments"):
    partition.partition(_tensors([1, 2, 3]), num_fragments)


def test_scalars_count_as_one_element():
  assert partition.Tensor("s", (), "rda").size == math.prod(())
