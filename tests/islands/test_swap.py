"""Values after an adoption, computed by hand for each way of adopting."""

import jax.numpy as jnp
import numpy as np
import pytest

from diloco.islands import core, swap

F = 3  # the fragment


def params(*values):
  return {"w": jnp.asarray(values, jnp.float32)}


def values(found):
  return np.asarray(found["w"]).tolist()


def test_overwrite_takes_the_global_version_as_it_is():
  made = swap.Swap("overwrite", 0.25)
  made.started(F, 0, params(1, 2))
  assert values(made.adopt(F, 0, params(5, 6), params(8, 16))) == [8, 16]


@pytest.mark.parametrize(
  ("alpha", "expected"), [(0.25, [7, 13]), (0.0, [8, 16]), (1.0, [4, 4])]
)
def test_blend_weighs_the_islands_own_values_with_alpha(alpha, expected):
  # alpha * local + (1 - alpha) * global, Streaming DiLoCo, equation 3.
  made = swap.Swap("blend", alpha)
  assert values(made.adopt(F, 0, params(4, 4), params(8, 16))) == expected


def test_carry_adds_what_was_learned_since_the_reference():
  made = swap.Swap("carry", 0.5)
  made.started(F, 0, params(1, 1))
  made.published(F, 4, params(2, 3))
  # theta + (G - R): with R of step 4, then with R of step 0.
  assert values(made.adopt(F, 4, params(5, 5), params(10, 20))) == [13, 22]
  made.started(F, 0, params(1, 1))
  assert values(made.adopt(F, 0, params(5, 5), params(10, 20))) == [14, 24]


def test_carry_refers_to_what_it_adopted_last():
  made = swap.Swap("carry", 0.5)
  made.started(F, 0, params(1))
  made.published(F, 4, params(2))
  local = made.adopt(F, 4, params(5), params(10))
  assert values(local) == [13]
  # Nothing was published since: what it learned is local less the adopted.
  assert values(made.adopt(F, 4, params(20), params(100))) == [110]


def test_carry_keeps_the_first_reference_and_the_newest_publications():
  made = swap.Swap("carry", 0.5)
  made.started(F, 0, params(0))
  steps = range(1, core.PUBLICATIONS_KEPT + 3)
  for step in steps:
    made.published(F, step, params(step))
  for kept in (0, 1, core.PUBLICATIONS_KEPT - 1, steps[-1]):
    made_again = swap.Swap("carry", 0.5)
    made_again.started(F, 0, params(0))
    for step in steps:
      made_again.published(F, step, params(step))
    adopted = made_again.adopt(F, kept, params(100), params(1000))
    assert values(adopted) == [100 + 1000 - kept]
  with pytest.raises(KeyError):
    made.adopt(F, core.PUBLICATIONS_KEPT + 1, params(0), params(0))


def test_fragments_have_references_of_their_own():
  made = swap.Swap("carry", 0.5)
  made.started(0, 0, params(1))
  made.started(1, 0, params(2))
  made.published(1, 4, params(3))
  assert values(made.adopt(0, 0, params(5), params(10))) == [14]
  assert values(made.adopt(1, 4, params(5), params(10))) == [12]


def test_carry_over_gives_nothing_away():
  local, adopted, reference = params(5), params(10), params(2)
  assert values(swap.carry_over(local, adopted, reference)) == [13]
  assert values(local) == [5] and values(adopted) == [10]


def test_copies_outlive_what_they_were_made_of():
  original = params(7)
  copies = swap.Swap("overwrite", 0.0).copy(original)
  original["w"].delete()
  assert values(copies) == [7]
