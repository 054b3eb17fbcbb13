"""Where an island goes on after it died: a pure decision.

Step t of an island reads row t of its share of the data, in every incarnation.
So an island that goes back to an earlier step reads the same rows again, and
what matters is that no fragment merges a row twice, and that none is skipped.

For each fragment p the store tells s_p, the last step published (merged, or
waiting to be). The saved state tells its own step s_c and k_p, the last step
of p that was published when it was saved. The island goes on after

    start = max(s_c, min_p s_p)

and a fragment with s_p > start trains along but publishes nothing until s_p.
If a publication up to k_p was refused or lost, k_p > s_p, its steps are in
nobody's hands: the island goes back to min_p s_p and does them again. It does
so too if k_p < s_p < s_c: then a publication of an earlier life came late, and
the saved progress of p holds steps on both sides of its end.
While versions come back, progress waits at most H steps for its publication
(`diloco.islands.core`); so that is what an island loses, saved state or not,
beside publications that were under way.

Reference: Decoupled DiLoCo, arXiv 2604.21428 (recovery from a healthy peer
that has seen the current vector clock, at most H steps stale).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from diloco.islands import core

OptimizerSource = Literal["own", "peer"]


class Saved(NamedTuple):
  """An island's own saved state; see `core.Position`."""

  step: int  # inner steps done when it was saved
  published: Sequence[int]  # [P]
  first_steps: Sequence[int]  # [P]


class Known(NamedTuple):
  """What the store knows of an island."""

  published: Sequence[int]  # [P], last step merged or waiting to be
  versions: Sequence[int]  # [P], current global versions
  merged: Sequence[int]  # [P], last step merged


class Comeback(NamedTuple):
  """How to go on."""

  start: int  # the last step that need not be done again
  origins: tuple[core.Origin, ...]  # [P]
  # Fragments whose saved unpublished progress is put back, on top of the
  # current global version.
  carried: tuple[int, ...]
  # Where the inner optimizer's state comes from. A "peer" may turn out to be
  # none; then the saved state is used however old, or a new one.
  optimizer: OptimizerSource


def decide(saved: Saved | None, known: Known, sync_every: int) -> Comeback:
  """Decides where to go on; an optimizer further back than H steps is stale."""
  reached = min(known.published)
  usable = saved is not None and not _has_hole(saved, known)
  start = max(saved.step, reached) if saved and usable else reached
  origins, carried = [], []
  for fragment, version in enumerate(known.versions):
    first_step = max(known.published[fragment], start)
    if (
      saved
      and usable
      and saved.published[fragment] >= known.published[fragment]
    ):
      first_step = saved.published[fragment]
      if first_step < start:
        carried.append(fragment)
    origins.append(core.Origin(version, first_step))
  fresh = start == 0
  recent = saved is not None and reached - saved.step <= sync_every
  optimizer: OptimizerSource = "own" if fresh or recent else "peer"
  return Comeback(start, tuple(origins), tuple(carried), optimizer)


def _has_hole(saved: Saved, known: Known) -> bool:
  """Whether steps before the saved one would be in nobody's hands.

  Either a publication made before saving has come to nothing, or one that was
  not known when saving counts, and ends before the saved step. The steps since
  the last one that counts are in none, and what they did to the parameters
  cannot be told from the rest: they are done again.
  """
  return any(
    (first_step < kept and reached < kept) or kept < reached < saved.step
    for first_step, kept, reached in zip(
      saved.first_steps, saved.published, known.published, strict=True
    )
  )
