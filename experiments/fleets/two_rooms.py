"""Two rooms of eight-GPU machines, with a thin line between them.

Question: how to train one billion parameters on what a laboratory has?

Command: `diloco plan --fleet=experiments/fleets/two_rooms.py --params=1e9`. A
second on one core.

A fleet may be nested mappings too, as here.
"""

from typing import Any


def get_fleet() -> dict[str, Any]:
  """Returns six machines of H100 in one room, four of A100 in the other."""
  h100 = dict(
    kind="h100",
    topology="8",
    count=6,
    memory_gb=80,
    teraflops=989,
    price_per_hour=2.5,
    mtbi_years=2,
  )
  a100 = dict(
    kind="a100",
    topology="8",
    count=4,
    memory_gb=80,
    teraflops=312,
    price_per_hour=1.2,
    mtbi_years=2,
  )
  return dict(
    sites=[
      dict(name="new room", slices=[h100], link_gbps=10, latency_ms=1),
      dict(name="old room", slices=[a100], link_gbps=10, latency_ms=1),
    ]
  )
