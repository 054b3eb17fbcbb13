"""Eager updates: an island's own outer steps, while others' are under way.

At publication t an island takes an outer step with

    (1/M) D(t) + mean D(t-1) - (1/M) D(t-1)

its own fresh outer gradient D and the others' late one, and goes on from there.
With an outer step that is linear in what it is given, the sum of these steps is
known: all that is due to means of D is in the newest global version G, and what
is due to the island's own gradients telescopes. So the island sets itself to

    G - u(D(t)) / M

where u is the outer step with D and a momentum that has seen the island's own
gradients alone. G may come at any time before the next publication, which is
when it is used; D is what was learned since the last such step.

It differs from the paper where the syncer's merge is no plain mean of all M;
where a codec rounds what is in G and not in D; after a restart, at which the
momentum is forgotten; and where a publication is not answered before the next
one, which contains it, and which the momentum then sees once more.

Reference: arXiv 2502.12996.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax

from diloco import config
from diloco.islands import core, kernels

Values: TypeAlias = Mapping[str, jax.Array]  # by tensor
Add: TypeAlias = Callable[[Values, Values], Values]


def own_step(outer: config.OuterConfig, islands: int) -> kernels.OwnStep:
  """The step u / M of a run with so many islands."""
  rate = outer.learning_rate / islands
  if not outer.momentum:
    return kernels.OwnStep(rate)
  step = kernels.OwnStep(rate, outer.momentum, plain=0.0, ahead=1.0)
  if outer.optimizer == "ema":
    return step._replace(taken=1 - outer.momentum)
  if outer.looks_ahead:
    return step._replace(plain=1.0, ahead=outer.momentum)
  return step


@dataclasses.dataclass
class Ahead:
  """Of one fragment, in host memory."""

  # Values after the last own step, or the version it started from.
  begun: Values
  # Of own steps; empty before the first.
  momenta: Values = dataclasses.field(default_factory=dict)
  # By step, outer gradients that no version has answered yet.
  sent: dict[int, Values] = dataclasses.field(default_factory=dict)

  def anchor(self, add: Add) -> Values:
    """Less the parameters this is all that no version has."""
    return (
      add(self.begun, self.sent[max(self.sent)]) if self.sent else self.begun
    )

  def stepped(
    self, step: int, begun: Values, outer_grad: Values, momenta: Values
  ) -> None:
    """A publication of all that no version has was followed by a step."""
    kept = list(self.sent.items())[: core.PUBLICATIONS_KEPT - 1]
    self.sent = dict([*kept, (step, outer_grad)])
    self.begun, self.momenta = begun, momenta

  def answered(
    self, kept_from: int, move: Callable[[Values, Values, Values], Values]
  ) -> None:
    """A version has all up to this step; what was sent later is to be again.

    To `move` is to add the difference of the second and third to the first.
    """
    sent, self.sent = self.sent, {}
    if sent and kept_from != max(sent):
      self.begun = move(self.begun, sent[max(sent)], sent[kept_from])
