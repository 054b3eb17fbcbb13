"""The transformer's own properties: causality, positions, tying, dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.tasks.models import transformer

_CONFIG = transformer.TransformerConfig(
  vocab=32, d_model=16, num_layers=2, num_heads=2, d_ff=24
)


@functools.cache
def _build(**changes):
  config = dataclasses.replace(_CONFIG, **changes)
  model = transformer.Transformer(config)
  tokens = jnp.zeros((1, 2), jnp.int32)
  params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
  return model, params


def _tokens(length, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, _CONFIG.vocab, (2, length)).astype(np.int32)


def test_changing_a_token_changes_no_earlier_logits():
  # Long enough for several query blocks, with an uneven last one.
  length, changed = 150, 70
  model, params = _build()
  apply = jax.jit(model.apply)
  tokens = _tokens(length)
  other = tokens.copy()
  other[:, changed] = (other[:, changed] + 1) % _CONFIG.vocab
  before = np.asarray(apply({"params": params}, tokens))
  after = np.asarray(apply({"params": params}, other))
  # The same program on the same numbers: exact.
  np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
  assert np.all(np.any(before[:, changed:] != after[:, changed:], axis=-1))


@pytest.mark.parametrize("length", [1, 5, 64, 150, 512])
def test_blocked_attention_equals_full_attention(length):
  shape = (1, 2, length, 4)
  query, key, value = (
    jax.random.normal(k, shape) for k in jax.random.split(jax.random.key(1), 3)
  )
  scores = np.einsum("bnlk,bnmk->bnlm", query, key)
  weights = np.tril(np.exp(scores))
  weights /= weights.sum(axis=-1, keepdims=True)
  expected = np.einsum("bnlm,bnmk->bnlk", weights, value)
  actual = jax.jit(transformer.causal_attention)(query, key, value)
  # float32 sums of up to 512 terms in another order.
  np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_rotation_makes_products_depend_on_distance_alone():
  width, length, shift = 8, 24, 9
  query, key = jax.random.normal(jax.random.key(2), (2, width))
  queries = transformer.rotate(jnp.broadcast_to(query, (1, 1, length, width)))[
    0, 0
  ]
  keys = transformer.rotate(jnp.broadcast_to(key, (1, 1, length, width)))[0, 0]
  products = np.asarray(queries @ keys.T)
  # float32 sines and cosines of angles up to 24.
  np.testing.assert_allclose(
    products[shift:, shift:], products[:-shift, :-shift], atol=1e-5
  )
  assert np.ptp(products[0]) > 0.1
  np.testing.assert_allclose(
    np.linalg.norm(queries, axis=-1), np.linalg.norm(query), rtol=1e-5
  )


def test_one_embedding_serves_input_and_output():
  model, params = _build(num_layers=1)
  leaves = jax.tree_util.tree_leaves_with_path(params)
  sized_by_vocab = [
    jax.tree_util.keystr(path)
    for path, leaf in leaves
    if _CONFIG.vocab in leaf.shape
  ]
  assert sized_by_vocab == ["['embedding']"]
  unused = 31
  tokens = jnp.zeros((1, 4), jnp.int32)

  def logit(table, token):
    changed = {**params, "embedding": table}
    return model.apply({"params": changed}, tokens)[0, -1, token]

  gradient = jax.jit(jax.grad(logit))(params["embedding"], unused)
  # As an output, row 31; as an input, row 0.
  touched = np.flatnonzero(np.any(np.asarray(gradient) != 0, axis=-1))
  assert touched.tolist() == [0, unused]


def test_every_layer_has_leaves_of_its_own():
  _, params = _build()
  layers = [params[f"layer_{index}"] for index in range(2)]
  shapes = [jax.tree.map(np.shape, layer) for layer in layers]
  assert shapes[0] == shapes[1]
  assert not np.array_equal(
    layers[0]["attention"]["query"], layers[1]["attention"]["query"]
  )


@pytest.mark.parametrize("mlp", sorted(transformer.ACTIVATIONS))
def test_the_gated_mlp_follows_its_formula(mlp):
  _, params = _build()  # of either: the activation has none
  config = dataclasses.replace(_CONFIG, mlp=mlp)
  block = params["layer_0"]["mlp"]
  x = jax.random.normal(jax.random.key(3), (1, 3, _CONFIG.d_model))
  actual = transformer.GatedMLP(config).apply({"params": block}, x)
  normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
  gate = transformer.ACTIVATIONS[mlp](normed @ block["gate"])
  expected = (gate * (normed @ block["up"])) @ block["down"]
  # Joined and separate float32 products round differently.
  np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_params_and_gradients_are_float32(compute_dtype):
  model, params = _build(num_layers=1, compute_dtype=compute_dtype)

  def total(params):
    logits = model.apply({"params": params}, _tokens(6))
    assert logits.dtype == jnp.float32
    return jnp.sum(jnp.square(logits))

  with jax.numpy_dtype_promotion("strict"):
    gradients = jax.jit(jax.grad(total))(params)
  for leaf in (*jax.tree.leaves(params), *jax.tree.leaves(gradients)):
    assert leaf.dtype == jnp.float32
    assert np.all(np.isfinite(leaf))


def test_gradients_of_kernels_sum_over_one_axis():
  """Over rows and positions apart, a CPU takes twice as long."""
  layer = transformer.Layer(_CONFIG)
  x = jnp.ones((2, 3, _CONFIG.d_model))
  params = layer.init(jax.random.key(0), x)
  gradient = jax.grad(lambda params: jnp.sum(layer.apply(params, x)))
  summed = [
    len(equation.params["dimension_numbers"][0][0])
    for equation in jax.make_jaxpr(gradient)(params).jaxpr.eqns
    if equation.primitive.name == "dot_general"
  ]
  assert len(summed) > 8 and set(summed) == {1}


def test_bfloat16_compute_stays_near_float32():
  tokens = _tokens(20)
  exact_model, params = _build(num_layers=1)
  rough_model = transformer.Transformer(
    dataclasses.replace(exact_model.config, compute_dtype="bfloat16")
  )
  exact = jax.jit(exact_model.apply)({"params": params}, tokens)
  rough = jax.jit(rough_model.apply)({"params": params}, tokens)
  error = np.sqrt(np.mean((exact - rough) ** 2) / np.mean(exact**2))
  # bfloat16 keeps 8 bits, 0.4 % a rounding; a layer has about twenty.
  assert 0 < error < 0.05
