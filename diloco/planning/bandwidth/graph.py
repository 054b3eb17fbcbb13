"""A graph of computing and sending nodes, and when each of them is done.

One island's work is a list of nodes. Every node takes one of two resources,
the *device* or the *link* to the other sites. A resource does its nodes one
after another in the order of the list; a node begins when its resource is free
and everything it comes *after* is done:

    begin(n) = max(free(resource(n)), max over d in after(n) of done(d))
    done(n)  = begin(n) + secs(n) + delay(n)
    free     = begin(n) + secs(n)

A sending node takes bits / bandwidth seconds. Its delay is the latency of the
link: the next node may follow at once, but whoever waits for it waits longer.
All bandwidths are followed at the same time, one element of each array each.

Reference: the simulator of Streaming DiLoCo, arXiv 2501.18512, section 3.1.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["forward", "backward_activations", "backward_weights", "reduce"]


class Node(NamedTuple):
  """One piece of work of one layer in one step."""

  kind: Kind
  step: int
  layer: int
  after: tuple[int, ...]  # positions in the list; all earlier than this one
  secs: float = 0.0  # of the device
  gbits: float = 0.0  # over the link
  delay_secs: float = 0.0  # until the others have it


def done_secs(nodes: Iterable[Node], link_gbps: np.ndarray) -> np.ndarray:
  """When each node is done: [nodes, B], seconds from the start.

  Args:
    nodes: in the order in which each resource takes them.
    link_gbps: [B], bandwidths to be followed side by side.
  """
  device = np.zeros(len(link_gbps))
  link = np.zeros(len(link_gbps))
  done: list[np.ndarray] = []
  for node in nodes:
    begin = link if node.kind == "reduce" else device
    for other in node.after:
      begin = np.maximum(begin, done[other])
    if node.kind == "reduce":
      link = begin + node.gbits / link_gbps
      done.append(link + node.delay_secs)
    else:
      device = begin + node.secs
      done.append(device + node.delay_secs)
  return np.array(done).reshape(len(done), len(link_gbps))
