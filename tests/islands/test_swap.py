"""Values after an adoption, computed by hand for each way of adopting."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from diloco.fragments import codec as codec_lib
from diloco.fragments import partition
from diloco.islands import core, kernels, packing, placement, shards, swap

PLAN = partition.partition(
  [partition.Tensor("w", (2,), "mean"), partition.Tensor("v", (1,), "mean")], 2
)
F32, BF16 = (packing.Encoding(codec_lib.of(name)) for name in ("f32", "bf16"))
F, OTHER = 0, 1  # the fragments of "w" and of "v"


@pytest.fixture(autouse=True, scope="module", params=["host", "device"])
def memory(request):
  """As on a processor, and as where devices have memory of their own."""
  with pytest.MonkeyPatch.context() as patch:
    if request.param == "device":
      own_memory(patch)
    yield


def own_memory(monkeypatch):
  """Devices have memory of their own besides the host's."""
  monkeypatch.setattr(
    shards, "in_host_memory", lambda x: x.with_memory_kind("pinned_host")
  )


class Model:
  """Two tensors, each a fragment, and a `Swap` of them."""

  def __init__(self, adoption, alpha=0.5, start=0.0):
    self.params = {
      "w": jnp.full((2,), start, jnp.float32),
      "v": jnp.full((1,), start, jnp.float32),
    }
    self.swap = swap.Swap(PLAN, self.params, adoption, alpha, F32)

  def learn(self, *values, name="w"):
    self.params[name] = jnp.asarray(values, jnp.float32)

  def publish(self, step, fragment=F):
    return self.swap.publish(self.params, fragment, step)

  def adopt(self, kept_from, *values, name="w"):
    """Gives the values after it."""
    fragment = F if name == "w" else OTHER
    self.swap.adopt(
      self.params, fragment, anchor(*values, name=name), kept_from
    )
    return np.asarray(self.params[name]).tolist()


def anchor(*values, name="w"):
  return swap.copy_to_host_memory({name: jnp.asarray(values, jnp.float32)})


def test_each_tensor_of_the_plan_is_its_own_fragment():
  assert [[t.name for t in tensors] for tensors in PLAN.fragments] == [
    ["w"],
    ["v"],
  ]


def test_overwrite_takes_the_global_version_as_it_is():
  made = Model("overwrite", 0.25)
  made.learn(1, 2)
  assert made.adopt(0, 8, 16) == [8, 16]


@pytest.mark.parametrize(
  ("alpha", "expected"), [(0.25, [7, 13]), (0.0, [8, 16]), (1.0, [4, 4])]
)
def test_blend_weighs_the_islands_own_values_with_alpha(alpha, expected):
  # alpha * local + (1 - alpha) * global, Streaming DiLoCo, equation 3.
  made = Model("blend", alpha)
  made.learn(4, 4)
  assert made.adopt(0, 8, 16) == expected


def test_carry_adds_what_was_learned_since_the_reference():
  # theta + (G - R): with R of step 4, then with R of step 0.
  for kept_from, expected in ((4, [13, 22]), (0, [14, 24])):
    made = Model("carry", start=1)
    made.learn(2, 3)
    made.publish(4)
    made.learn(5, 5)
    assert made.adopt(kept_from, 10, 20) == expected


def eager_model():
  made = Model("carry")
  made.swap = swap.Swap(
    PLAN, made.params, "eager", 0.0, F32, own_step=kernels.OwnStep(0.25)
  )
  return made


def test_eager_goes_on_from_the_version_less_a_step_of_its_own():
  made = eager_model()
  assert made.adopt(0, 8, 16) == [0, 0]  # used at the next publication
  made.learn(-4, 4)
  (sent,) = made.publish(4).values()
  assert np.asarray(sent).ravel().tolist() == [4, -4]
  assert made.params["w"].tolist() == [8 - 1, 16 + 1]
  made.learn(6, 16)  # of this nothing is published
  begun = np.asarray(made.swap.references()["w"])
  saved = np.asarray(made.params["w"]) - begun
  assert saved.tolist() == [-1, -1]
  assert made.adopt(4, 10, 20) == [6, 16]
  (sent,) = made.publish(8).values()
  assert np.asarray(sent).ravel().tolist() == [1, 1]


@pytest.mark.parametrize(("merged", "expected"), [(4, 6 + 1), (8, 1)])
def test_eager_publishes_again_what_no_version_has(merged, expected):
  made = eager_model()
  made.learn(-4, -4)
  made.publish(4)
  made.learn(*(made.params["w"] - 6).tolist())
  (sent,) = made.publish(8).values()
  assert np.asarray(sent).ravel().tolist() == [4 + 6] * 2
  made.learn(*(made.params["w"] - 1).tolist())
  made.adopt(merged, 100, 100)
  (sent,) = made.publish(12).values()
  assert np.asarray(sent).ravel().tolist() == [expected] * 2


def test_carry_refers_to_what_it_adopted_last():
  made = Model("carry")
  made.learn(2, 2)
  made.publish(4)
  made.learn(5, 5)
  assert made.adopt(4, 10, 10) == [13, 13]
  # Nothing was published since: what it learned is local less the adopted.
  made.learn(20, 20)
  assert made.adopt(4, 100, 100) == [110, 110]


def test_carry_keeps_the_first_reference_and_the_newest_publications():
  steps = range(1, core.PUBLICATIONS_KEPT + 3)

  def published():
    made = Model("carry")
    for step in steps:
      made.learn(step, step)
      made.publish(step)
    made.learn(100, 100)
    return made

  for kept in (0, 1, core.PUBLICATIONS_KEPT - 1, steps[-1]):
    assert published().adopt(kept, 1000, 1000) == [1100 - kept] * 2
  with pytest.raises(KeyError):
    published().adopt(core.PUBLICATIONS_KEPT + 1, 0, 0)


def test_fragments_have_references_of_their_own():
  made = Model("carry", start=1)
  made.learn(3, name="v")
  made.publish(4, OTHER)
  made.learn(5, 5)
  made.learn(5, name="v")
  assert made.adopt(0, 10, 10) == [14, 14]
  assert made.adopt(4, 10, name="v") == [12]


def test_progress_that_never_left_is_put_on_top_and_nothing_is_given_away():
  saved = swap.Progress(
    {"w": jnp.full((2,), 5.0), "v": jnp.full((1,), 7.0)},
    {"w": anchor(2, 2)["w"], "v": jnp.full((1,), 1.0)},
  )
  made = Model("carry")
  versions = [anchor(10, 20), anchor(30, name="v")]
  made.swap.restore(made.params, versions, [3, 4], saved, carried=[F])
  assert np.asarray(made.params["w"]).tolist() == [13, 23]
  assert np.asarray(made.params["v"]).tolist() == [30]
  assert np.asarray(saved.params["w"]).tolist() == [5, 5]
  made.learn(14, 24)
  assert made.adopt(3, 10, 20) == [14, 24]


def test_copies_outlive_what_they_were_made_of():
  made = Model("overwrite", start=7)
  made.learn(4, 5)
  sent = made.publish(0)
  made.params["w"].delete()
  assert np.asarray(sent["w"]).tolist() == [3, 2]
  assert np.asarray(made.swap.references()["w"]).tolist() == [4, 5]
  assert np.asarray(made.swap.anchors[F]["w"]).tolist() == [7, 7]


def test_what_is_adopted_is_not_given_away_with_the_parameters():
  made = Model("overwrite")
  version = anchor(8, 16)
  made.swap.adopt(made.params, F, version, 0)
  made.params["w"].delete()
  assert np.asarray(version["w"]).tolist() == [8, 16]


def test_poison_spares_other_fragments():
  made = Model("carry", start=1)
  made.swap.poison(made.params, F)
  assert np.isnan(made.params["w"]).all()
  assert np.asarray(made.params["v"]).tolist() == [1]
  assert np.asarray(made.swap.anchors[F]["w"]).tolist() == [1, 1]


# Parts of leaves

STACKED = (6, 4)
SPLIT = partition.partition(
  [
    partition.Tensor("w", STACKED, "mean"),
    partition.Tensor("v", (4, 2), "mean"),
  ],
  2,
  split=True,
)


class Split:
  """Two leaves, of which each fragment has parts, on any mesh."""

  def __init__(self, adoption, model):
    where = placement.Placement((1, model), jax.devices()[:model])
    spec = jax.sharding.PartitionSpec("model" if model > 1 else None)
    sharding = jax.sharding.NamedSharding(where.mesh, spec)
    self.sharding = sharding
    self.params = {
      "w": jax.device_put(self.numbers(STACKED, 0), sharding),
      "v": jax.device_put(self.numbers((4, 2), 100), sharding),
    }
    self.before = {n: np.asarray(x) for n, x in self.params.items()}
    self.swap = swap.Swap(SPLIT, self.params, adoption, 0.25, F32)

  def numbers(self, shape, first):
    size = int(np.prod(shape))
    return np.arange(first, first + size, dtype=np.float32).reshape(shape)

  def version(self, fragment, factor):
    """A global version: what the fragment was, times `factor`."""
    held = self.swap.anchors[fragment]
    return {
      name: jax.device_put(np.asarray(t) * np.float32(factor), t.sharding)
      for name, t in held.items()
    }


def box_of(tensor):
  box = [slice(None)] * len(tensor.shape)
  if tensor.part:
    stop = tensor.part.start + tensor.shape[tensor.part.axis]
    box[tensor.part.axis] = slice(tensor.part.start, stop)
  return tuple(box)


@pytest.mark.parametrize("model", [1, 2])
@pytest.mark.parametrize("adoption", ["overwrite", "blend", "carry"])
def test_parts_are_swapped_in_where_they_belong(adoption, model):
  made = Split(adoption, model)
  assert all(len(tensors) > 1 for tensors in SPLIT.fragments)
  made.swap.publish(made.params, 0, 3)
  copies = made.swap.references()
  for name in made.params:
    made.params[name] += 1
  made.swap.adopt(made.params, 0, made.version(0, 10), 3)
  for tensor in SPLIT.fragments[0]:
    was = made.before[tensor.leaf][box_of(tensor)]
    np.testing.assert_array_equal(copies[tensor.name], was)
    local, adopted = was + 1, 10 * was
    expected = {
      "overwrite": adopted,
      "blend": 0.25 * local + 0.75 * adopted,
      "carry": local + (adopted - was),
    }[adoption]
    found = np.asarray(made.params[tensor.leaf])[box_of(tensor)]
    np.testing.assert_array_equal(found, expected)
  for tensor in SPLIT.fragments[1]:
    was = made.before[tensor.leaf][box_of(tensor)]
    found = np.asarray(made.params[tensor.leaf])[box_of(tensor)]
    np.testing.assert_array_equal(found, was + 1)
  for leaf in made.params.values():
    assert leaf.sharding.is_equivalent_to(made.sharding, leaf.ndim)


@pytest.mark.parametrize("model", [1, 2])
def test_leaves_are_assembled_from_all_parts(model):
  made = Split("overwrite", model)
  tensors = {}
  for fragment in range(2):
    tensors |= made.swap.anchors[fragment]
  assert tensors.keys() == made.swap.tensors.keys()
  leaves = made.swap.assemble(tensors)
  assert leaves.keys() == made.params.keys()
  for name, leaf in leaves.items():
    np.testing.assert_array_equal(leaf, made.before[name])
    assert leaf.sharding.is_equivalent_to(made.sharding, leaf.ndim)


def test_progress_on_parts_that_never_left_is_put_on_top():
  made = Split("carry", 2)
  made.swap.publish(made.params, 0, 3)
  for name in made.params:
    made.params[name] += 1
  saved = swap.Progress(dict(made.params), made.swap.references())
  again = Split("carry", 2)
  versions = [again.version(p, 10) for p in range(2)]
  again.swap.restore(again.params, versions, [3, 4], saved, carried=[0])
  for fragment, tensors in enumerate(SPLIT.fragments):
    for tensor in tensors:
      was = made.before[tensor.leaf][box_of(tensor)]
      found = np.asarray(again.params[tensor.leaf])[box_of(tensor)]
      np.testing.assert_array_equal(found, 10 * was + (fragment == 0))


def test_nothing_that_lasts_is_kept_on_the_devices(monkeypatch):
  own_memory(monkeypatch)
  made = Model("carry")
  for step in (4, 8, 12, 16):
    made.learn(step, step)
    sent = made.publish(step)
    assert sent["w"].sharding.memory_kind == "pinned_host"
    assert made.swap.references()["w"].sharding.memory_kind == "pinned_host"
  made.adopt(4, 8, 16)
  made.publish(20)
  kept = [
    value
    for references in made.swap._references.values()
    for held in references.values()
    for value in held.values()
  ]
  assert len(kept) == 3  # two of w, one of v
  for value in kept:
    assert value.sharding.memory_kind == "pinned_host"


# Against the formulas, bit by bit


def drawn(shape, rng):
  """Floats of all sizes, no difference of which is below normal numbers."""
  exponent = rng.integers(-80, 126, shape).astype(np.float32)
  return np.asarray(rng.uniform(-2, 2, shape) * np.exp2(exponent), np.float32)


# Each compiled for one tensor alone; "blend" multiplies and adds in one.
FORMULAS = {
  "overwrite": lambda local, new, held, alpha: new,
  "blend": jax.jit(
    lambda local, new, held, alpha: alpha * local + (1 - alpha) * new
  ),
  "carry": lambda local, new, held, alpha: local + (new - held),
}


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
  seed=st.integers(0, 2**32 - 1),
  adoption=st.sampled_from(["overwrite", "blend", "carry"]),
  encoding=st.sampled_from([F32, BF16]),
  model=st.sampled_from([1, 2]),
)
def test_programs_give_the_bits_of_the_formulas(
  seed, adoption, encoding, model
):
  rng = np.random.default_rng(seed)
  alpha = np.float32(0.3)
  dtype = codec_lib.FLOATS[encoding.codec.name]
  made = Split(adoption, model)

  def leaves():
    return {n: drawn(x.shape, rng) for n, x in made.params.items()}

  def place(values):
    for name, value in values.items():
      made.params[name] = jax.device_put(value, made.sharding)

  start, sent, later, new = leaves(), leaves(), leaves(), leaves()
  place(start)
  made.swap = swap.Swap(SPLIT, made.params, adoption, alpha, encoding)
  place(sent)
  for fragment, tensors in enumerate(SPLIT.fragments):
    outer_grads = made.swap.publish(made.params, fragment, 1)
    for t in tensors:
      box, found = box_of(t), np.asarray(outer_grads[t.name])
      expected = np.subtract(start[t.leaf][box], sent[t.leaf][box])
      assert_equal_bits(found, expected.astype(dtype))
  place(later)
  for fragment, tensors in enumerate(SPLIT.fragments):
    version = {
      t.name: jax.device_put(
        new[t.leaf][box_of(t)], made.swap.tensors[t.name].sharding
      )
      for t in tensors
    }
    made.swap.adopt(made.params, fragment, version, 1)
  for name, found in made.params.items():
    formula = FORMULAS[adoption](later[name], new[name], sent[name], alpha)
    assert_equal_bits(np.asarray(found), np.asarray(formula))


def assert_equal_bits(found, expected):
  assert found.dtype == expected.dtype
  assert found.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("encoding", [F32, BF16])
def test_what_is_not_finite_leaves_as_it_is(encoding, bad):
  params = {"w": jnp.zeros(2), "v": jnp.zeros(1)}
  made = swap.Swap(PLAN, params, "carry", 0.5, encoding)
  params["w"] = jnp.asarray([bad, 1.0])
  sent = np.asarray(made.publish(params, F, 1)["w"]).astype(np.float32)
  np.testing.assert_array_equal(sent, [-bad, -1])


def test_halfway_between_two_of_bfloat16_goes_to_the_even_one():
  params = {"w": jnp.zeros(2), "v": jnp.zeros(1)}
  made = swap.Swap(PLAN, params, "carry", 0.5, BF16)
  params["w"] = -jnp.asarray([1 + 2**-8, 1 + 3 * 2**-8])
  sent = np.asarray(made.publish(params, F, 1)["w"]).astype(np.float32)
  np.testing.assert_array_equal(sent, [1.0, 1 + 2**-6])


def test_rounding_is_drawn_for_each_tensor_fragment_step_and_island():
  encoding = packing.Encoding(codec_lib.of("bf16"), stochastic=True)
  tensors = [partition.Tensor(n, (64,), "mean") for n in "abcd"]
  plan = partition.partition(tensors, 2)
  params = {n: jnp.full(64, -1 / 3, jnp.float32) for n in "abcd"}

  def sent(step, seed):
    start = {n: jnp.zeros(64) for n in "abcd"}
    made = swap.Swap(plan, start, "overwrite", 0.0, encoding, seed)
    return [
      np.asarray(values).astype(np.float32).tobytes()
      for fragment in (0, 1)
      for values in made.publish(dict(params), fragment, step).values()
    ]

  draws = [sent(1, (7, 0)), sent(2, (7, 0)), sent(1, (7, 1)), sent(1, (8, 0))]
  assert sent(1, (7, 0)) == draws[0]  # by these alone
  assert len({one for draw in draws for one in draw}) == 4 * 4


def compiled():
  """Programs that were compiled so far."""
  programs = kernels.extract, kernels.apply
  return sum(program.cache_info().misses for program in programs)


def test_fragments_of_one_kind_share_what_is_compiled():
  tensors = [
    partition.Tensor(f"{kind}{i}", shape, "mean")
    for i in range(4)
    for kind, shape in (("a", (8,)), ("b", (2, 3)))
  ]
  plan = partition.partition(tensors, 4)
  params = {t.name: jnp.ones(t.shape) for t in tensors}
  made = swap.Swap(plan, params, "carry", 0.0, BF16)
  assert len({arranged.signature for arranged in made._arranged}) == 1
  before = compiled()
  made.rehearse()
  for fragment in range(4):
    made.publish(params, fragment, 1)
    made.adopt(params, fragment, dict(made.anchors[fragment]), 1)
    made.start_over(params, fragment, made.anchors[fragment], 2)
  swap.Swap(plan, params, "carry", 0.0, BF16).rehearse()
  assert compiled() <= before + 2  # or in the other memory's turn
