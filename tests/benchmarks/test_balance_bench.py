"""Parts of a few large leaves balance, and merge to the bits of the whole."""

import json

from experiments.benchmarks import balance


def test_parts_are_balanced_and_merge_to_the_same_bits(monkeypatch):
  found = balance.run(2)
  json.dumps(found)
  assert found["embedding"]["largest_leaf"] == 2 * 4096 * 6 * 2
  for told in found.values():
    assert told["leaves"] < told["fragments"] < told["tensors"]
    assert (
      told["largest_over_mean"] <= 4 / 3 < told["unsplit_largest_over_mean"]
    )
    assert told["unequal"] == 0
  merged, calls = balance._merged, []

  def off_by_a_bit(drawn):
    calls.append(drawn)
    theta, momentum = merged(drawn)
    theta.flat[0] += len(calls) == 1
    return theta, momentum

  monkeypatch.setattr(balance, "_merged", off_by_a_bit)
  assert balance.run(2)["stacked"]["unequal"] == 1
