"""Glyphs: what is drawn, of which kind, and what training never sees."""

import jax
import numpy as np
import pytest

from diloco import errors
from diloco.tasks import glyphs, vision
from diloco.tasks.models import transformer, vit


@pytest.fixture(scope="module")
def drawn():
  return glyphs._draw_all()


@pytest.fixture(scope="module")
def made():
  return glyphs.load(0.1)


def test_sets_share_neither_characters_nor_fonts(drawn, made):
  fonts, codes, _ = drawn
  sets = made.splits
  characters = {s: set(codes[rows].tolist()) for s, rows in sets.items()}
  files = {s: set(fonts[rows].tolist()) for s, rows in sets.items()}
  assert not characters["train"] & characters["characters"]
  assert not files["train"] & files["fonts"]
  # Each is held out by one of the two alone.
  assert files["characters"] <= files["train"]
  assert not characters["fonts"] & characters["characters"]
  both = np.concatenate([sets["characters"], sets["fonts"]])
  assert sorted(both) == sets["heldout"].tolist()
  assert len(sets["train"]) > 30_000 and len(both) > 10_000
  for rows in sets.values():
    assert made.labels[rows].min() >= 0
  images = {s: {made.images[row].tobytes() for row in sets[s]} for s in sets}
  assert not images["train"] & images["heldout"]


def test_glyph_is_of_the_kind_of_its_character(drawn, made):
  _, codes, _ = drawn
  for character, kind in (
    ("A", "LATIN Lu"),
    ("\N{GREEK SMALL LETTER ALPHA}", "GREEK Ll"),
    ("\N{BRAILLE PATTERN DOTS-1}", "BRAILLE So"),
    ("\N{N-ARY SUMMATION}", "Sm"),
  ):
    (label,) = set(made.labels[codes == ord(character)].tolist())
    assert made.kinds[label] == kind


def test_kinds_of_few_characters_are_those_of_their_category():
  latin, greek = range(ord("A"), ord("A") + 24), range(0x391, 0x3A2)
  cyrillic, digits = range(0x410, 0x41A), range(ord("0"), ord("0") + 10)
  found = glyphs.kinds([*latin, *greek, *cyrillic, *digits])
  assert {found[code] for code in latin} == {"LATIN Lu"}
  assert {found[code] for code in (*greek, *cyrillic)} == {"Lu"}
  assert not found.keys() & set(digits)


def test_glyphs_stand_on_one_base_line_in_their_size(drawn):
  fonts, codes, images = drawn

  def rows(character):
    (row,) = np.flatnonzero((codes == ord(character)) & (fonts == "DejaVuSans"))
    ink = np.flatnonzero((images[row] > 64).any(axis=1))
    return ink[0], ink[-1]

  top, bottom = rows("H")
  assert bottom == rows("x")[1] == glyphs._BASE_LINE - 1
  assert bottom - top == 11  # 12 of 16 points
  assert rows("p")[1] > bottom and rows("x")[0] > top
  assert rows("'")[1] < rows("x")[1] - 4


def test_patches_have_no_order_but_that_of_their_positions():
  config = transformer.TransformerConfig(
    vocab=5, d_model=8, num_layers=1, num_heads=2, d_ff=8, causal=False
  )
  model = vit.VisionTransformer(config, patch=2)
  image = jax.random.uniform(jax.random.key(0), (1, 4, 6))
  params = jax.jit(model.init)(jax.random.key(1), image)["params"]
  order = np.array([4, 0, 5, 2, 1, 3])
  patches = image.reshape(2, 2, 3, 2).transpose(0, 2, 1, 3).reshape(6, 2, 2)
  turned = patches[order].reshape(2, 3, 2, 2).transpose(0, 2, 1, 3)
  moved = params | {"positions": params["positions"][order]}
  apply = jax.jit(model.apply)
  expected = apply({"params": params}, image)
  logits = apply({"params": moved}, turned.reshape(1, 4, 6))
  # float32 sums over patches in another order.
  np.testing.assert_allclose(logits, expected, atol=1e-5)
  other = apply({"params": params}, turned.reshape(1, 4, 6))
  assert np.abs(other - expected).max() > 1e-3


@pytest.mark.parametrize(
  ("options", "what", "why"),
  [
    ({"patch": 5}, "patch=5", "24 pixels"),
    ({"num_heads": 3}, "num_heads=3", "same even number"),
    ({"heldout_fraction": 1.0}, "heldout_fraction=1.0", "exclusive"),
  ],
)
def test_options_that_cannot_work_are_refused(options, what, why):
  with pytest.raises(errors.UserError) as caught:
    vision.VisionConfig(**options)
  assert what in caught.value.what and why in caught.value.why


def test_fraction_that_leaves_a_set_empty_is_refused():
  with pytest.raises(errors.UserError, match="no glyph left for characters"):
    glyphs.load(1e-9)
