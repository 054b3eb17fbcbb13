"""Coming back: what an island starts its new life from.

Parameters come from the newest global versions, plus progress of the own saved
state that never left the island. The inner optimizer comes from the own saved
state if it is recent, else from a healthy peer, else from the saved state
however old, else it is new. How that is found is in
`diloco.islands.protocol`, where to go on in `diloco.islands.comeback`.
"""

import logging
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from diloco.islands import (
  bootstrap,
  checkpoints,
  feedback,
  peer_protocol,
  peers,
  protocol,
)
from diloco.islands import learner as learner_lib
from diloco.snapshots import checkpoint, operations, records, states, store

logger = logging.getLogger(__name__)


def describe(basis: protocol.Basis) -> str:
  """What a life started from, for people."""
  if not basis.plan.start:
    return "initial parameters"
  if basis.heard is not None:
    source = f"optimizer of island {basis.heard.state.from_island}"
  elif basis.saved is not None:
    source = f"checkpoint of step {basis.saved.step}"
  else:
    source = "new optimizer"
  return f"{source}, global versions"


def facts(basis: protocol.Basis, island: int) -> dict[str, Any]:
  """What the tape says of it."""
  heads = [found.head for found in basis.standing.fetched]
  peer = basis.heard and basis.heard.state
  saved = None if peer else basis.saved
  origins = basis.plan.origins
  return {
    "step": basis.plan.start,
    "restored_from": describe(basis),
    "checkpoint": saved and identity_of(saved),
    "peer": peer
    and {
      "island": peer.from_island,
      "incarnation": peer.from_incarnation,
      "step": peer.step,
    },
    "base_versions": [o.base for o in origins],
    "base_digests": [head.digest for head in heads],
    "initial_by": [bootstrap.initial_writer(head) for head in heads],
    "unsent_from_step": [o.first_step for o in origins],
    "answers": [news_of(head, island)[1:] for head in heads],
    "passed_over": basis.passed_over,
    "epoch": basis.standing.epoch,
  }


def news_of(head: records.Head, island: int) -> feedback.News:
  """What a version tells an island of its publications."""
  holes = head.holes.get(str(island), ())
  return feedback.News(head.version, head.merged_step(island), holes)


def identity_of(saved: checkpoint.Checkpoint) -> dict[str, int]:
  """How the tape names a checkpoint."""
  return {
    "incarnation": saved.incarnation,
    "serial": saved.serial,
    "step": saved.step,
  }


class Recovery(protocol.Search):
  """Brings one learner to where its island can go on."""

  def __init__(
    self,
    run_dir: pathlib.Path,
    snapshots: store.SnapshotStore,
    learner: learner_lib.Learner,
    island: int,
    incarnation: int,
    heartbeat_secs: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    super().__init__(island, incarnation, clock)
    self._run_dir = run_dir.absolute()
    self._store = snapshots
    self._copies = states.of_run(run_dir, snapshots)
    self._learner = learner
    self._heartbeat_secs = heartbeat_secs

  def recovering(self, sync_every: int) -> operations.Script[protocol.Basis]:
    """Brings the learner there; `sync_every` is H."""
    learner = self._learner
    basis = yield from self.find(learner.plan.num_fragments, sync_every)
    for reason in basis.passed_over:
      logger.warning("passed_over reason=%s", reason)
    plan, state, heard = basis.plan, basis.state, basis.heard
    saved = state and state.progress
    if heard and saved:
      saved = saved._replace(residuals={})  # too old a state
    learner.resume(
      plan.start,
      [found.content for found in basis.standing.fetched],
      [origin.first_step for origin in plan.origins],
      opt_state=heard.content if heard else state and state.opt_state,
      saved=saved,
      carried=plan.carried,
      news=[
        news_of(found.head, self._island) for found in basis.standing.fetched
      ],
    )
    # Holds on to no tensors that the learner has taken.
    heard = heard and heard._replace(content=None)
    return basis._replace(state=None, heard=heard)

  def execute(self, operation: operations.Operation) -> Any:
    """Does one operation of `recovering`."""
    if isinstance(operation, operations.ReadState):
      return peers.read(self._store, operation.state, self._learner.opt_state)
    return self._learner.fetcher(self._store).execute(operation)

  def saved_states(self) -> Sequence[pathlib.Path]:
    """See `Search`."""
    folder = checkpoint.directory(self._run_dir, self._island)
    names = {path.name for path in checkpoint.completed(folder)}
    if self._copies:
      names.update(self._copies.completed(folder))
    return [folder / name for name in checkpoint.newest_first(names)]

  def marker_of(self, saved: pathlib.Path) -> checkpoint.Checkpoint:
    """See `Search`."""
    if copies := self._elsewhere(saved):
      return copies.read_marker(saved)
    return checkpoint.read_marker(saved)

  def is_part(self, saved: pathlib.Path, part: records.CutPart) -> bool:
    """See `Search`."""
    return (
      self._run_dir / part.checkpoint == saved
      and self.marker_of(saved).crc32() == part.checksum
    )

  def restore(self, saved: pathlib.Path) -> learner_lib.Snapshot:
    """See `Search`."""
    if copies := self._elsewhere(saved):
      copies.fetch(saved)
      logger.info("state_fetched name=%s", saved.name)
    return checkpoints.restore(saved, self._learner)[1]

  def _elsewhere(self, saved: pathlib.Path) -> states.Copies | None:
    """Where a state is that is not here."""
    return None if (saved / checkpoint.MARKER).exists() else self._copies

  def patience_secs(self, healthy: Sequence[records.Member]) -> float:
    """See `Search`."""
    num_bytes = peers.size_of(self._learner.opt_state)
    return peer_protocol.patience_secs(healthy, self._heartbeat_secs, num_bytes)
