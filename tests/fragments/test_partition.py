import itertools
import math

import hypothesis
import numpy as np
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


@hypothesis.given(
  st.lists(
    st.lists(st.integers(1, 40), min_size=0, max_size=3), min_size=1, max_size=8
  ),
  st.integers(1, 12),
)
@hypothesis.settings(deadline=None)
def test_parts_tile_their_leaf_and_balance_the_fragments(shapes, num_fragments):
  leaves = [
    partition.Tensor(f"w{i}", tuple(shape), "mean")
    for i, shape in enumerate(shapes)
  ]
  num_fragments = min(num_fragments, len(leaves))
  plan = partition.partition(leaves, num_fragments, split=True)
  covered = {leaf.name: np.zeros(leaf.shape, int) for leaf in leaves}
  tensors = [t for fragment in plan.fragments for t in fragment]
  for t in tensors:
    box = [slice(None)] * len(t.shape)
    if t.part:
      stop = t.part.start + t.shape[t.part.axis]
      box[t.part.axis] = slice(t.part.start, stop)
    part = covered[t.leaf][tuple(box)]
    assert part.shape == t.shape
    covered[t.leaf][tuple(box)] += 1
  assert all((count == 1).all() for count in covered.values())
  assert partition.FragmentPlan.from_json(plan.to_json()) == plan
  mean = plan.num_params / num_fragments
  if max(t.size for t in tensors) <= mean / 3:
    sizes = [plan.size(p) for p in range(num_fragments)]
    assert max(sizes) <= 4 / 3 * mean


@pytest.mark.parametrize("num_fragments", [2, 8, 24])
@pytest.mark.parametrize(
  "shapes",
  [
    # Twelve stacked layers and an embedding; a table of 100 M elements.
    {
      "q": (12, 64, 64),
      "up": (12, 64, 256),
      "down": (12, 256, 64),
      "e": (999, 64),
    },
    {"table": (262_144, 384), "body": (12, 384, 384), "scale": (384,)},
  ],
)
def test_few_large_leaves_make_balanced_fragments(shapes, num_fragments):
  leaves = [partition.Tensor(n, shape, "mean") for n, shape in shapes.items()]
  plan = partition.partition(leaves, num_fragments, split=True)
  sizes = [plan.size(p) for p in range(num_fragments)]
  assert max(sizes) <= 4 / 3 * sum(sizes) / num_fragments


def test_parts_are_no_larger_than_a_third_of_a_share():
  rows = partition.Tensor("rows", (10, 2), "mean")
  rest = partition.Tensor("rest", (40,), "mean")
  plan = partition.partition([rows, rest], 3, split=True)
  parts = [t for f in plan.fragments for t in f]
  assert max(t.size for t in parts if t.leaf == "rows") <= 60 / 3 / 3


def test_parts_are_placed_as_leaves_of_their_sizes_are():
  leaves = _tensors([40, 11, 10, 4])
  plan = partition.partition(leaves, 3, split=True)
  parts = [t for fragment in plan.fragments for t in fragment]
  alike = [partition.Tensor(t.name, t.shape, t.merge) for t in parts]
  assert [[t.name for t in f] for f in plan.fragments] == [
    [t.name for t in f] for f in partition.partition(alike, 3).fragments
  ]


def test_one_fragment_needs_no_parts():
  leaves = _tensors([40, 11])
  plan = partition.partition(leaves, 1, split=True)
  assert plan == partition.partition(leaves, 1)


def test_more_fragments_than_parts_are_refused_in_a_line():
  leaf = partition.Tensor("w", (3, 2), "mean")
  with pytest.raises(errors.UserError, match="split_tensors to True"):
    partition.partition([leaf], 2)
  assert partition.partition([leaf], 3, split=True).num_fragments == 3
  with pytest.raises(errors.UserError, match=r"has 3 parts.*between 1 and 3$"):
    partition.partition([leaf], 4, split=True)


MODEL = [
  partition.Tensor(name, shape, "mean" if name == "embedding" else "rda")
  for name, shape in {
    "embedding": (50, 4),
    "final_norm/scale": (4,),
    **{f"layer_{i}/attention/w": (4, 4) for i in range(12)},
    **{f"layer_{i}/mlp/w2": (4, 8) for i in range(12)},
  }.items()
]


def _layers(plan):
  """Numbers of the layers in each fragment; -1 is what is in none."""
  return [
    sorted(
      {
        int(t.leaf[6:].split("/")[0]) if "layer" in t.leaf else -1
        for t in fragment
      }
    )
    for fragment in plan.fragments
  ]


@pytest.mark.parametrize(
  ("by", "expected"),
  [
    ("layer", [[-1, 0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
    ("strided", [[-1, 3, 7, 11], [0, 4, 8], [1, 5, 9], [2, 6, 10]]),
  ],
)
def test_layers_stay_whole_and_go_by_their_numbers(by, expected):
  for split in (False, True):  # a part stays with its layer
    plan = partition.partition(MODEL, 4, by=by, split=split)
    assert _layers(plan) == expected
    assert plan.num_params == sum(t.size for t in MODEL)


def test_numbers_of_a_list_are_layers_and_numbers():
  leaves = [
    partition.Tensor(f"body/blocks/{i}/{w}", (2,), "rda")
    for i in range(11)
    for w in ("a", "b")
  ]
  plan = partition.partition(leaves, 11, by="layer")
  for i, fragment in enumerate(plan.fragments):
    assert [t.name for t in fragment] == [f"body/blocks/{i}/{w}" for w in "ab"]
  plan = partition.partition(leaves, 4, by="tensor")
  dealt = [t.name for t in leaves]
  for p, fragment in enumerate(plan.fragments):
    assert [t.name for t in fragment] == sorted(dealt[p::4])


@pytest.mark.parametrize("by", ["balanced", "layer", "tensor", "strided"])
def test_embeddings_apart(by):
  plan = partition.partition(MODEL, 4, by=by, apart=True)
  assert [t.name for t in plan.fragments[-1]] == ["embedding"]
  others = [t for t in MODEL if t.merge == "rda"]
  alone = partition.partition(others, 3, by=by)
  assert plan.fragments[:-1] == alone.fragments
  assert plan.hash != partition.partition(MODEL, 4, by=by).hash


@pytest.mark.parametrize(
  ("tensors", "count", "settings", "why"),
  [
    (MODEL, 14, {"by": "layer"}, "has 13 layers and every.* 1 and 13$"),
    (MODEL, 1, {"apart": True}, "25 parameter tensors beside emb.* 2 and 26,"),
    (MODEL, 27, {"by": "tensor"}, "has 26 parameter tensors and"),
    (MODEL[:1], 1, {"apart": True}, "all of the model's parameters are emb"),
    (MODEL[1:], 2, {"apart": True}, "none of the model's parameters are emb"),
  ],
)
def test_impossible_plans_are_refused_in_a_line(tensors, count, settings, why):
  with pytest.raises(errors.UserError, match=why):
    partition.partition(tensors, count, **settings)


# Of a leaf: its shape, the most elements of a part, and where parts begin
# along which axis; none where it stays whole.
PARTS = [
  ((4, 3), 12, None, []),
  ((4, 3), 6, 0, [0, 2]),
  ((4, 3), 5, 0, [0, 1, 2, 3]),  # whole rows, of 3
  ((2, 100), 30, 1, [0, 14, 28, 42, 57, 71, 85]),  # 15 columns of 2 at most
  ((100, 2), 50, 0, [0, 25, 50, 75]),
  ((2, 3), 0.5, 1, [0, 1, 2]),  # as small as can be, along the longest axis
  ((1,), 0.1, None, []),
]


@pytest.mark.parametrize(("shape", "limit", "axis", "starts"), PARTS)
def test_leaf_is_cut_along_the_first_axis_that_is_fine_enough(
  shape, limit, axis, starts
):
  whole = partition.Tensor("w", shape, "rda")
  parts = partition._parts(whole, limit)
  if axis is None:
    assert parts == [whole]
    return
  places = [partition.Part("w", axis, start) for start in starts]
  assert [part.part for part in parts] == places
  assert sum(part.size for part in parts) == whole.size
