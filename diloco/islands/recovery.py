"""Coming back: what an island starts its new life from.

Parameters come from the newest global versions, plus progress of the own saved
state that never left the island. The inner optimizer comes from the own saved
state if it is recent, else from a healthy peer, else from the saved state
however old, else it is new. What cannot be read is passed over with a reason.
Where to go on is decided in `diloco.islands.comeback`.
"""

import logging
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from diloco import errors
from diloco.islands import (
  bootstrap,
  checkpoints,
  comeback,
  core,
  fetching,
  peer_protocol,
  peers,
  protocol,
)
from diloco.islands import learner as learner_lib
from diloco.islands import trainer as trainer_lib
from diloco.snapshots import checkpoint, keys, operations, records, store

logger = logging.getLogger(__name__)

_READ_ATTEMPTS = 2
_FIRST_STEP = core.Position._fields.index("first_step")
_PUBLISHED = core.Position._fields.index("published")
_RETRY_SECS = 0.2


class Recovered(NamedTuple):
  """What a life starts from.

  Attributes:
    plan: where to go on.
    epoch: the store's timeline.
    cut: the last cut that counts as taken part in; a life takes no part in one
      asked for before it began, for it may start from what came after.
    saved: marker of the checkpoint that was used, if one was.
    peer: whose optimizer state was used, if one's was.
    passed_over: what could not be used, and why.
    heads: [P], of the global versions.
  """

  plan: comeback.Comeback
  epoch: int
  cut: int
  saved: checkpoint.Checkpoint | None
  peer: records.PeerState | None
  passed_over: list[str]
  heads: Sequence[records.Head]

  @property
  def origins(self) -> Sequence[core.Origin]:
    """[P], where the fragments' progress counts from."""
    return self.plan.origins

  def describe(self) -> str:
    """What it started from, for people."""
    if not self.plan.start:
      return "initial parameters"
    parts = []
    if self.saved is not None:
      parts.append(f"checkpoint of step {self.saved.step}")
    if self.peer is not None:
      parts.append(f"optimizer of island {self.peer.from_island}")
    return ", ".join([*(parts or ["new optimizer"]), "global versions"])

  def facts(self) -> dict[str, Any]:
    """What the tape says of it."""
    saved, peer = self.saved, self.peer
    return {
      "step": self.plan.start,
      "restored_from": self.describe(),
      "checkpoint": saved and identity_of(saved),
      "peer": peer
      and {
        "island": peer.from_island,
        "incarnation": peer.from_incarnation,
        "step": peer.step,
      },
      "base_versions": [o.base for o in self.origins],
      "base_digests": [head.digest for head in self.heads],
      "initial_by": [bootstrap.initial_writer(head) for head in self.heads],
      "unsent_from_step": [o.first_step for o in self.origins],
      "passed_over": self.passed_over,
      "epoch": self.epoch,
    }


def identity_of(saved: checkpoint.Checkpoint) -> dict[str, int]:
  """How the tape names a checkpoint."""
  return {
    "incarnation": saved.incarnation,
    "serial": saved.serial,
    "step": saved.step,
  }


class Recovery:
  """Brings one trainer to where its island can go on."""

  def __init__(
    self,
    run_dir: pathlib.Path,
    snapshots: store.SnapshotStore,
    trainer: trainer_lib.Trainer,
    island: int,
    incarnation: int,
    sleep: Callable[[float], None] = time.sleep,
  ):
    """Args: where things are, what goes on, who it is, how to wait."""
    self._run_dir = run_dir
    self._store = snapshots
    self._trainer = trainer
    self._island = island
    self._incarnation = incarnation
    self._sleep = sleep
    self._passed_over: list[str] = []

  def run(self, sync_every: int, heartbeat_secs: float) -> Recovered:
    """Brings the trainer there.

    Args:
      sync_every: H.
      heartbeat_secs: of the run; a peer is waited for a few of them.
    """
    epoch, cut, known, fetched = self._look()
    saved, snapshot = self._newest_saved(epoch)
    own = None
    if saved is not None:
      own = comeback.Saved(
        saved.step,
        [p[_PUBLISHED] for p in saved.positions],
        [p[_FIRST_STEP] for p in saved.positions],
      )
    plan = comeback.decide(own, known, sync_every)
    peer, opt_state = None, snapshot and snapshot.opt_state
    if plan.optimizer == "peer":
      found = self._from_peer(known.versions, heartbeat_secs)
      if found is not None:
        peer, opt_state = found
        saved = None
    self._trainer.resume(
      plan.start,
      [found.content for found in fetched],
      [origin.first_step for origin in plan.origins],
      opt_state=opt_state,
      saved=snapshot and snapshot.progress,
      carried=plan.carried,
    )
    return Recovered(
      plan,
      epoch.epoch if epoch else 0,
      cut,
      saved,
      peer,
      self._passed_over,
      [found.head for found in fetched],
    )

  def _look(self) -> protocol.Standing:
    """Reads what the store has, however long that takes.

    Whoever started this island knows how long it may take to be ready.
    """
    trainer = self._trainer
    fetcher = fetching.Fetcher(
      self._store, trainer.plan, trainer.swap.shardings
    )
    while True:
      try:
        return operations.perform(
          protocol.come_back(self._island, trainer.plan.num_fragments),
          fetcher.execute,
        )
      except (*operations.FAILURES, LookupError) as error:
        logger.warning("recovery_waits error=%s", error)
        self._sleep(_RETRY_SECS)

  def _newest_saved(
    self, epoch: records.Epoch | None
  ) -> tuple[checkpoint.Checkpoint | None, learner_lib.Snapshot | None]:
    """Restores the newest checkpoint that can be trusted."""
    folder = checkpoint.directory(self._run_dir, self._island)
    for path in checkpoint.completed(folder):
      try:
        marker = checkpoint.read_marker(path)
        if not self._is_of_this_timeline(path, marker, epoch):
          self._pass_over(f"checkpoint {path.name} is from before a roll-back")
          continue
        marker, snapshot = checkpoints.restore(path, self._trainer)
      except errors.CorruptSnapshotError as error:
        self._pass_over(str(error))
        continue
      if len(marker.positions) != self._trainer.plan.num_fragments:
        self._pass_over(f"checkpoint {path.name} has other fragments")
        continue
      return marker, snapshot
    return None, None

  def _is_of_this_timeline(
    self,
    path: pathlib.Path,
    marker: checkpoint.Checkpoint,
    epoch: records.Epoch | None,
  ) -> bool:
    """After a roll-back only the cut's own checkpoint is older than it."""
    if epoch is None or marker.epoch == epoch.epoch:
      return True
    part = self._store.read(
      keys.cut_part_key(epoch.cut, self._island), records.CutPart
    )
    return (
      part is not None
      and self._run_dir.absolute() / part.checkpoint == path
      and checkpoint.checksum(path) == part.checksum
    )

  def _from_peer(
    self, versions: Sequence[int], heartbeat_secs: float
  ) -> peer_protocol.Heard | None:
    """Asks for an optimizer state; what fails here costs only its moments."""
    request = records.PeerRequest(
      self._island, self._incarnation, list(versions)
    )
    try:
      healthy = self._store.perform(peer_protocol.healthy(self._island))
      if not healthy:
        return None
      trainer = self._trainer
      opt_state = trainer.state.opt_state
      patience_secs = peer_protocol.patience_secs(
        healthy, heartbeat_secs, peers.size_of(opt_state)
      )
      for _ in range(_READ_ATTEMPTS):
        try:
          heard = peers.ask(
            self._store,
            request,
            opt_state,
            patience_secs,
          )
        except errors.CorruptSnapshotError as error:
          # Another peer may have answered as well, and be the one to read.
          self._pass_over(str(error))
          self._store.perform(peer_protocol.clean_up(self._island))
          self._sleep(_RETRY_SECS)
          continue
        if heard is None:
          self._pass_over("no peer sent its optimizer state in time")
        return heard
    except OSError as error:
      self._pass_over(f"no peer can be asked: {error}")
    finally:
      self._clean_up()
    return None

  def _clean_up(self) -> None:
    try:
      self._store.perform(peer_protocol.clean_up(self._island))
    except OSError as error:
      logger.warning("peer_cleanup_failed error=%s", error)

  def _pass_over(self, reason: str) -> None:
    logger.warning("passed_over reason=%s", reason)
    self._passed_over.append(reason)
