"""Graphs small enough to be worked out by hand."""

import numpy as np
import pytest

from diloco.planning.bandwidth import graph, methods, utilisation, workload

# One layer and no headers: a step is 1 s of forward, 1 s of each gradient.
ONE_LAYER = workload.Workload(
  params=1e9 / workload.WIRE_OVERHEAD / 16,  # 1 Gbit in bf16
  layers=1,
  step_secs=3.0,
  every=4,
  fragment_layers=1,
)


def ends(nodes, gbps=1.0):
  return graph.done_secs(nodes, np.array([gbps]))[:, 0].tolist()


def test_device_takes_one_node_after_another():
  nodes = [graph.Node("forward", 0, 0, (), 1.0)] * 3
  assert ends(nodes) == [1.0, 2.0, 3.0]


def test_link_works_while_device_does():
  nodes = [
    graph.Node("backward_weights", 0, 1, (), 1.0),
    graph.Node("reduce", 0, 1, (0,), gbits=4.0),
    graph.Node("backward_weights", 0, 0, (), 1.0),
    graph.Node("reduce", 0, 0, (2,), gbits=4.0),
    graph.Node("forward", 1, 0, (1, 3), 1.0),
  ]
  # The second reduction waits for the link, the forward pass for it.
  assert ends(nodes, gbps=2.0) == [1.0, 3.0, 2.0, 5.0, 6.0]


def test_latency_delays_who_waits_but_not_the_link():
  nodes = [
    graph.Node("reduce", 0, 1, (), gbits=1.0, delay_secs=10.0),
    graph.Node("reduce", 0, 0, (), gbits=1.0, delay_secs=10.0),
  ]
  assert ends(nodes) == [11.0, 12.0]


def test_no_nodes_are_done_at_once():
  assert graph.done_secs([], np.array([1.0, 2.0])).shape == (0, 2)


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
  got = utilisation.utilisation(method, ONE_LAYER, np.array([gbps]))
  assert got[0] == pytest.approx(expected, rel=1e-9)  # rounding only


def test_four_sites_send_half_as_much_again():
  work = workload.Workload(
    ONE_LAYER.params, 1, step_secs=3.0, fragment_layers=1, sites=4
  )
  got = utilisation.utilisation(
    methods.METHODS["data_parallel"], work, np.array([1.0])
  )
  assert got[0] == pytest.approx(3 / (3 + 1.5), rel=1e-9)


def test_latency_of_each_pass_of_a_ring_is_waited_for():
  work = workload.Workload(*(ONE_LAYER.params, 1, 3.0, 4, 1), latency_secs=0.25)
  got = utilisation.utilisation(
    methods.METHODS["data_parallel"], work, np.array([1.0])
  )
  assert got[0] == pytest.approx(3 / (3 + 1 + 2 * 0.25), rel=1e-9)


def test_step_has_three_nodes_a_layer_and_what_is_due():
  work = workload.Workload(layers=4, fragment_layers=2, every=4)
  nodes = methods.build(methods.METHODS["streaming"], work, steps=4)
  kinds = [node.kind for node in nodes]
  assert kinds.count("forward") == kinds.count("backward_weights") == 4 * 4
  sent = [(n.step, n.layer) for n in nodes if n.kind == "reduce"]
  assert sent == [(0, 2), (0, 0), (2, 3), (2, 1)]  # strided, spread over H


def test_overlapped_fragment_is_waited_for_one_step_later():
  work = workload.Workload(layers=2, fragment_layers=2, every=4)
  for name, step in (("streaming", 1), ("overlapped", 2)):
    nodes = methods.build(methods.METHODS[name], work, steps=4)
    sent = [i for i, n in enumerate(nodes) if n.kind == "reduce"]
    waiting = {n.step for n in nodes for i in n.after if i in sent}
    assert waiting == {step}
