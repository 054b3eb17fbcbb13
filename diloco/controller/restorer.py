"""Before a session: is the run's state whole, and if not, back to a cut.

Without damage and without `--cut` a session goes on from the store as it is:
that is at or past the last cut, and consistent by the protocol.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Mapping

from diloco import config as config_lib
from diloco import errors, process
from diloco.fragments import partition
from diloco.snapshots import (
  checkpoint,
  cut_parts,
  keys,
  records,
  restore,
  store,
  verify,
)
from diloco.tape import events, evidence, recorder

LAST = "last"
_BEFORE = "before_restore"  # why what waits for a merge is discarded

_WRITTEN_WITH_HEADS = (
  f"checkpoints/island-*/*/{checkpoint.MARKER}",
  f"{recorder.TAPE_DIR}/island-*.jsonl",
)


def check_wanted(wanted: str | None) -> None:
  """Refuses a `--cut` that is neither "last" nor a number."""
  if wanted is not None and wanted != LAST and not wanted.isdecimal():
    raise errors.UserError(
      f"--cut={wanted}",
      "a cut is 'last' or a number",
      "see 'diloco status' for the cuts of a run",
    )


def begun(run_dir: pathlib.Path) -> str:
  """A file that tells that islands of the run had joined; empty if none does.

  An island writes these once every fragment has a head. The store is not asked:
  it may lie on a disk that is not there.
  """
  for pattern in _WRITTEN_WITH_HEADS:
    for path in sorted(run_dir.glob(pattern)):
      if path.stat().st_size:
        return str(path.relative_to(run_dir))
  return ""


def check_store(run_dir: pathlib.Path, snapshots: store.SnapshotStore) -> None:
  """Refuses a run that had begun and whose store knows nothing of it.

  To go on would be to start anew, and to delete the old saved states one by
  one.

  Raises:
    UserError: nothing has been written.
    CorruptSnapshotError: the fragment plan is damaged.
  """
  evidence = begun(run_dir)
  if evidence and snapshots.read_plan() is None:
    raise errors.UserError(
      f"the run in {run_dir}",
      f"it has trained, as {evidence} tells, but its store {snapshots.url} is"
      " missing or empty",
      "mount the store or put it back, or name a new --workdir",
    )


class Restorer:
  """What `diloco train` and `diloco resume` do before anything else."""

  def __init__(
    self,
    run_dir: pathlib.Path,
    config: config_lib.RunConfig,
    plan: partition.FragmentPlan,
    end_roles: Callable[[], list[str]],
    incarnation: int,
    known: Mapping[str, evidence.Contribution] | None = None,
    token: int = 0,
  ):
    """Touches nothing yet.

    Args:
      run_dir: directory of the run.
      config: the run's configuration.
      plan: of its fragments.
      end_roles: ends roles that are alive; gives their names.
      incarnation: of the controller, on whose tape it goes.
      known: by key, all that waits to be merged as far as tapes tell whose ends
        are lost: what they do not tell of is not told now. None if they tell
        all.
      token: of the controller's lease; with an older one it is refused.
    """
    self._token = token
    self._run_dir = run_dir
    self._store = store.SnapshotStore(process.store_url(run_dir, config))
    self._verifier = verify.Verifier(
      run_dir, self._store, plan, buffers=config.outer.buffers
    )
    self._end_roles = end_roles
    self._incarnation = incarnation
    self._known = known

  def prepare(self, wanted: str | None) -> restore.Restored | None:
    """Sets the run back to the cut `wanted`, or if it must be; gives how.

    Raises:
      UserError: no cut will do. Nothing has been changed.
    """
    try:
      return self._prepare(wanted)
    except OSError as error:
      raise errors.UserError(
        f"the snapshot store {self._store.url}",
        f"it cannot be read or written: {error}",
        "make it reachable, then give the command again",
      ) from error

  def set_back(self) -> bool:
    """Sets a damaged run back, for a session that is on; says whether it was.

    Raises:
      UserError: no cut will do. Nothing has been changed.
      OSError: the store cannot be read or written; to be tried again before
        any role is started.
    """
    return self._prepare(None) is not None

  def _prepare(self, wanted: str | None) -> restore.Restored | None:
    if wanted is not None:
      number = None if wanted == LAST else int(wanted)
      torn = self._known is not None
      why = "the ends of its tapes are lost" if torn else f"--cut={wanted}"
      return self._go_back(number, why)
    why = self._damage()
    return self._go_back(None, why) if why else None

  def _damage(self) -> str:
    """Why the run must be set back; empty if it need not be."""
    try:
      cut = self._store.perform(restore.unfinished())
    except errors.CorruptSnapshotError as error:
      return f"the epoch is not known: {error}"
    if cut:
      return f"the restore of cut {cut} was not finished"
    return self._verifier.damage(begun=bool(begun(self._run_dir)))

  def _choose(
    self, number: int | None, why: str
  ) -> tuple[cut_parts.Parts, restore.Choice]:
    check = self._verifier
    choice = self._store.perform(
      restore.choose(
        check.check_cut, check.check_contribution, number, self._token
      )
    )
    if choice.parts is None:
      raise self._refusal(why, choice)
    return choice.parts, choice

  def _go_back(self, number: int | None, why: str) -> restore.Restored:
    while True:
      try:
        restored = self._finish_one(number, why)
      except restore.ChangedError:
        continue
      if number in (None, restored.cut):
        return restored
      # That one was begun before; now the one that was asked for.

  def _finish_one(self, number: int | None, why: str) -> restore.Restored:
    parts, choice = self._choose(number, why)
    if self._end_roles():
      # They may have gone on meanwhile, and deleted an old cut.
      parts, choice = self._choose(number, why)
    tape = recorder.Recorder(self._run_dir, "controller", self._incarnation)
    try:
      if self._known is None:
        self._tell_last_merges(tape, len(parts.heads))
      for sent, reason in choice.left_out:
        tape.discarded(sent.key, f"corrupt: {reason}", sent)
      restored = self._store.perform(
        restore.restore(
          choice,
          lambda name, record: self._tell_old(tape, name, record),
          lambda facts: tape.record(
            events.RESTORED,
            cut=facts.cut,
            epoch=facts.epoch,
            version_from=facts.version_from,
            version_to=facts.version_to,
            reinjected=facts.reinjected,
            steps={str(m): step for m, step in facts.steps.items()},
            why=why,
            torn=self._known is not None,
            passed_over=[
              {"cut": cut, "reason": text} for cut, text in choice.passed_over
            ],
          ),
        )
      )
      waits = {*restored.reinjected, *(sent.key for sent, _ in choice.left_out)}
      for name, item in (self._known or {}).items():
        if name not in waits:
          tape.discarded(name, _BEFORE, item)
    finally:
      tape.close()
    print(_line(restored, why, choice), file=sys.stderr)
    return restored

  def _tell_old(
    self,
    tape: recorder.Recorder,
    name: str,
    record: records.Contribution | None,
  ) -> None:
    if self._known is None:
      tape.discarded(name, _BEFORE, record)

  def _tell_last_merges(
    self, tape: recorder.Recorder, num_fragments: int
  ) -> None:
    """A syncer that was killed may not have; the heads are about to go."""
    for fragment in range(num_fragments):
      try:
        head = self._store.read(keys.head_key(fragment), records.Head)
      except errors.CorruptSnapshotError:
        continue
      if head is not None and head.merged:
        tape.record(events.MERGED, **head.merged)

  def _refusal(self, why: str, choice: restore.Choice) -> errors.UserError:
    """Says what is wrong with every cut there is."""
    reasons = [
      f"no cut {cut} exists"
      if reason == restore.NOT_THERE
      else f"cut {cut}: {reason}"
      for cut, reason in choice.passed_over
    ]
    asked = why.startswith("--cut")
    what = why if asked else f"the run in {self._run_dir}"
    problem = "" if asked else f"{why}; and no cut can be restored: "
    remedy = "put back the files of the run from a copy, or start anew"
    if asked:
      remedy = "leave --cut out, or name another cut"
    return errors.UserError(
      what, problem + ("; ".join(reasons) or "the run has no cut"), remedy
    )


def _line(restored: restore.Restored, why: str, choice: restore.Choice) -> str:
  steps = ", ".join(f"{m}: {s}" for m, s in sorted(restored.steps.items()))
  over = "".join(f"; cut {c} passed over: {r}" for c, r in choice.passed_over)
  over += "".join(f"; {s.key} left out: {r}" for s, r in choice.left_out)
  text = (
    f"restored cut {restored.cut} ({why}); islands go on after steps"
    f" {{{steps}}}{over}"
  )
  return " ".join(text.split())
