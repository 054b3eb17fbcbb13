"""Models small enough to be worked out by hand."""

import numpy as np
import pytest

from diloco.planning.bandwidth import methods, workload

# One layer and no headers: a step is 1 s of forward, 1 s of each gradient.
ONE_LAYER = workload.Workload(
  params=1e9 / workload.WIRE_OVERHEAD / 16,  # 1 Gbit in bf16
  layers=1,
  step_secs=3.0,
  every=4,
  fragment_layers=1,
)


@pytest.mark.parametrize(
  ("name", "gbps", "expected"),
  [
    # 1 Gbit a step is wholly exposed: one layer has nothing to overlap with.
    ("data_parallel", 1.0, 3 / (3 + 1)),
    ("data_parallel", 0.1, 3 / (3 + 10)),
    ("diloco", 1.0, 12 / (12 + 1)),
    ("streaming", 0.5, 12 / (12 + 2)),
    # One more step hides 3 s of the reduction.
    ("overlapped", 0.5, 1.0),
    ("overlapped", 0.2, 12 / (12 + 5 - 3)),
  ],
)
def test_utilisation_of_one_layer_is_what_a_hand_finds(name, gbps, expected):
  method = methods.METHODS[name]
  got = methods.utilisation(method, ONE_LAYER, np.array([gbps]))
  assert got[0] == pytest.approx(expected, rel=1e-9)  # rounding only


def test_four_sites_send_half_as_much_again():
  work = workload.Workload(
    ONE_LAYER.params, 1, step_secs=3.0, fragment_layers=1, sites=4
  )
  got = methods.utilisation(
    methods.METHODS["data_parallel"], work, np.array([1.0])
  )
  assert got[0] == pytest.approx(3 / (3 + 1.5), rel=1e-9)


def test_latency_of_each_pass_of_a_ring_is_waited_for():
  work = workload.Workload(*(ONE_LAYER.params, 1, 3.0, 4, 1), latency_secs=0.25)
  got = methods.utilisation(
    methods.METHODS["data_parallel"], work, np.array([1.0])
  )
  assert got[0] == pytest.approx(3 / (3 + 1 + 2 * 0.25), rel=1e-9)


def test_overlapped_fragment_is_waited_for_one_step_later():
  # Of two layers a fragment of 4 Gbit: one step after it is due, or two.
  work = workload.Workload(
    ONE_LAYER.params * 4, 2, step_secs=6.0, every=4, fragment_layers=2
  )
  got = [
    methods.utilisation(methods.METHODS[name], work, np.array([0.5]))[0]
    for name in ("streaming", "overlapped")
  ]
  # 8 s to be sent; the first half of it leaves 2 s before the step ends.
  assert got == pytest.approx([24 / (24 + 6), 1.0], rel=1e-9)
