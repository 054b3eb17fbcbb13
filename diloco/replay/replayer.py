"""A replay: the run again, one life at a time, every version compared."""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from diloco import config as config_lib
from diloco import errors, process
from diloco.fragments import partition
from diloco.islands import surroundings
from diloco.replay import order, script, weights, worker
from diloco.replay import plan as plan_lib
from diloco.replay import scratch as scratch_lib
from diloco.report import liveness
from diloco.snapshots import digest, keys, operations, records, store
from diloco.snapshots import layout as layouts
from diloco.syncer import protocol, round_merge, weighting
from diloco.tape import reader

_TELL_EVERY = 100  # versions


@dataclasses.dataclass(frozen=True)
class Difference:
  """The first version that is not what the run had.

  Attributes:
    fragment: whose.
    version: which.
    expected: digest on the tape, or in the store's head.
    found: digest of the replay.
    contributions: those whose norm differs; with none, the merge does.
    weights: what the tape says of its contributions and should not, in words;
      values may be equal nevertheless.
  """

  fragment: int
  version: int
  expected: str
  found: str
  contributions: tuple[str, ...] = ()
  weights: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Replayed:
  """What a replay found."""

  compared: int  # versions; a copy of an earlier one only with its values
  equal: int
  arrays_compared: int  # newest versions, whose values are in the run's store
  difference: Difference | None
  lives: int
  steps: int  # inner steps executed
  wall_secs: float

  def to_json(self) -> dict[str, Any]:
    """Returns plain values."""
    return dataclasses.asdict(self)


class Replayer:
  """Carries a plan out."""

  def __init__(
    self,
    run_dir: pathlib.Path,
    config: config_lib.RunConfig,
    plan: order.Plan,
    folder: pathlib.Path,
    told: Callable[[str], None] = lambda text: None,
  ):
    """Starts nothing yet.

    Args:
      run_dir: of the run; only read.
      config: the run's.
      plan: what to do.
      folder: an empty directory for what is made on the way.
      told: hears of progress, a line at a time.

    Raises:
      UserError: the run has no fragment plan.
    """
    self._run_dir = run_dir
    self._plan = plan
    self._folder = folder
    self._told = told
    self._scratch = scratch_lib.Scratch(folder)
    self._original = _open_store(run_dir)
    fragments = self._original.read_plan()
    if fragments is None:
      raise errors.UserError(
        f"the run directory {run_dir}",
        "its store has no fragment plan",
        "restore the directory snapshots/",
      )
    self._fragments: partition.FragmentPlan = fragments
    self._weighting = weighting.Weighting.of(config.sync)
    self._merger = round_merge.RoundMerger.of(
      self._scratch.snapshots, fragments, config
    )
    self._workers: dict[Hashable, worker.Worker] = {}  # by kind
    self._norms: dict[str, float] = {}
    self._steps = 0
    self._at: dict[script.LifeId, int] = {}
    self._digests: dict[script.VersionId, str] = {}
    self._copied: set[script.VersionId] = set()  # no tape has their digests

  def run(self) -> Replayed:
    """Replays until the first difference, or to the end.

    Raises:
      UserError: the tape contradicts itself, or a life cannot be replayed here.
    """
    started = time.monotonic()
    difference, stored = None, set[script.VersionId]()
    try:
      for task, free in self._plan.tasks:
        if (difference := self._do(task)) is not None:
          break
        for name in free:
          self._scratch.forget(name)
    finally:
      for one in self._workers.values():
        one.close()
    compared = set(self._digests) - self._copied
    if difference is None:
      difference, stored = self._compare_arrays()
      compared |= stored
    else:  # one that could not be made has no digest
      compared.add(script.VersionId(difference.fragment, difference.version))
    return Replayed(
      compared=len(compared),
      equal=len(compared) - (difference is not None),
      arrays_compared=len(stored),
      difference=difference,
      lives=len(self._at),
      steps=self._steps,
      wall_secs=time.monotonic() - started,
    )

  def _do(self, task: order.Task) -> Difference | None:
    match task:
      case order.Begin(life):
        self._begin(life)
      case order.Advance():
        self._advance(task)
      case order.Make(making):
        return self._make(making)
    return None

  def _ask(self, life: script.LifeId, do: str, *args: Any) -> Any:
    """Has the worker of a life do something for it."""
    settings = self._plan.lives[life].settings
    kind = worker.kind(settings)
    if kind not in self._workers:
      self._workers[kind] = worker.Worker(
        life, settings, self._run_dir, self._folder
      )
    return self._workers[kind].ask(life, do, *args)

  def _begin(self, life: script.LifeId) -> None:
    beginning = self._plan.lives[life].beginning
    self._told(f"{life} begins after step {beginning.step}")
    self._ask(life, "begin", beginning)
    self._at[life] = beginning.step

  def _advance(self, task: order.Advance) -> None:
    self._norms |= self._ask(task.life, "advance", task.operations)
    end = task.operations[-1].step
    self._steps += end - self._at[task.life]
    self._at[task.life] = end
    if task.last:
      self._ask(task.life, "close")

  def _make(self, making: script.Making) -> Difference | None:
    """Makes a version; returns what is wrong with it."""
    match making:
      case script.Initial(version, life, expected):
        self._ask(self._stand_in(life), "initial", version.fragment)
        found = self._scratch.read_head(*version).digest
      case script.Return(version, of):
        self._scratch.copy_version(of, version)
        self._digests[version] = self._digests[of]
        self._copied.add(version)
        return None
      case script.Merge():
        return self._merge(making)
    return self._compare(version, expected, found)

  def _stand_in(self, life: script.LifeId) -> script.LifeId:
    """A life to make initial parameters; the very one if it can be.

    One that was killed before it was on the tape left nothing else.
    """
    lives = list(self._plan.lives)  # none of which has begun
    same = [one for one in lives if one.island == life.island]
    return life if life in lives else (same or lives)[0]

  def _merge(self, merge: script.Merge) -> Difference | None:
    shares = merge.shares
    before = self._scratch.read_head(*merge.before)
    contributions = tuple(
      self._scratch.read_contribution(share.key) for share in shares
    )
    verdict = weights.check(
      merge, self._plan.makings, contributions, self._weighting
    )
    payload = keys.global_prefix(*merge.id, "r")
    self._merger.set_learning_rate(merge.learning_rate)
    try:
      merged = self._merger.merge(
        operations.Merge(before, payload, contributions, verdict.weights)
      )
    except protocol.RefusedError as refused:
      keys_refused = tuple(sorted(refused.reasons))
      return Difference(*merge.id, merge.digest, str(refused), keys_refused)
    self._scratch.write_head(
      records.Head(
        fragment=merge.id.fragment,
        version=merge.id.version,
        token=0,
        payload=payload,
        chunks=self._merger.chunks(merge.id.fragment),
        clock={},
        merged={},
        digest=merged.digest,
        codec=self._merger.params_codec,
      )
    )
    others = tuple(s.key for s in shares if self._norms.get(s.key) != s.norm)
    return self._compare(
      merge.id, merge.digest, merged.digest, others, verdict.wrong
    )

  def _compare(
    self,
    version: script.VersionId,
    expected: str,
    found: str,
    contributions: tuple[str, ...] = (),
    wrong: tuple[str, ...] = (),
  ) -> Difference | None:
    if not digest.alike(found, expected):
      # A run of an earlier version, which took other digests.
      head = self._scratch.read_head(*version)
      found = self._digest_of(self._scratch.snapshots, head, expected)
    self._digests[version] = found
    if found == expected and not wrong:
      if not len(self._digests) % _TELL_EVERY:
        num_versions = len(self._plan.makings)
        self._told(f"{len(self._digests)} of {num_versions} versions are equal")
      return None
    return Difference(*version, expected, found, contributions, wrong)

  def _compare_arrays(self) -> tuple[Difference | None, set[script.VersionId]]:
    """Compares the newest versions with the values in the run's store."""
    compared = set[script.VersionId]()
    for fragment in range(self._fragments.num_fragments):
      head = self._original.read(keys.head_key(fragment), records.Head)
      if head is None:
        continue
      version = script.VersionId(fragment, head.version)
      if version not in self._digests:
        continue  # left out of this replay
      compared.add(version)
      found = self._digests[version]
      stored = self._digest_of(self._original, head, found)
      if stored != found:
        return Difference(*version, stored, found), compared
    return None, compared

  def _digest_of(
    self, snapshots: store.SnapshotStore, head: records.Head, like: str
  ) -> str:
    def read(index: int, spec: partition.Tensor) -> np.ndarray:
      chunk_shape = tuple(head.chunks[index])
      layout = layouts.of_record(head.codec, spec.shape, chunk_shape)
      prefix = f"{head.payload}/{keys.PARAMS}"
      found = snapshots.arrays.open(prefix, spec.name, layout).read()
      return found.astype(np.float32, copy=False)

    tensors = self._fragments.fragments[head.fragment]
    return digest.tensors(
      ((spec.name, read(i, spec)) for i, spec in enumerate(tensors)), like
    )


def _open_store(run_dir: pathlib.Path) -> store.SnapshotStore:
  return store.SnapshotStore(process.store_url(run_dir))


def head_facts(run_dir: pathlib.Path) -> list[Mapping[str, Any]]:
  """The newest versions of a run, and what the heads say of their merges."""
  snapshots = _open_store(run_dir)
  facts: list[Mapping[str, Any]] = []
  for name in snapshots.names("heads"):
    if name.isdecimal():
      head = snapshots.read(keys.head_key(int(name)), records.Head)
      if head is not None:
        place = {"fragment": head.fragment, "version": head.version}
        facts.append(place | dict(head.merged))
  return facts


def run(
  run_dir: pathlib.Path,
  until_version: int | None = None,
  task: str | None = None,
  told: Callable[[str], None] = lambda text: None,
) -> Replayed:
  """Replays a run.

  Args:
    run_dir: of a run that has ended, in whatever way; only read.
    until_version: leave out later versions.
    task: its task, see `process.check_task`.
    told: hears of progress, a line at a time.

  Raises:
    UserError: no run, a live one, or a tape that does not tell enough.
  """
  config = process.read_config(run_dir)
  process.check_task(config, run_dir, task)
  if liveness.controller_alive(run_dir):
    raise errors.UserError(
      f"the run directory {run_dir}",
      "a controller of this run is alive",
      "stop it first",
    )
  if config.loop:
    raise errors.UserError(
      f"the run in {run_dir}",
      f"its steps are those of config.loop = {config.loop!r}, and no tape tells"
      " what such a loop reads and draws",
      "replay runs of a task's own steps",
    )
  record = reader.read(run_dir, strict=True)
  planned = plan_lib.make(record, head_facts(run_dir), until_version)
  with tempfile.TemporaryDirectory(prefix="diloco-replay-") as folder:
    replay = Replayer(
      run_dir.absolute(), config, planned, pathlib.Path(folder), told
    )
    for text in _warnings(planned):
      told(f"warning: {text}")
    return replay.run()


def _warnings(planned: order.Plan) -> list[str]:
  """What is not as it was: bits may differ."""
  changed, left_out = set(), set()
  for life in planned.lives.values():
    changed |= set(surroundings.changes(life.settings.software))
    left_out |= set(surroundings.left_out(life.settings.environ))
  return [f"the run had {text}" for text in sorted(changed)] + [
    f"the run had {text} in its environment, which is not taken over"
    for text in sorted(left_out)
  ]


def describe(outcome: Replayed) -> str:
  """Returns the outcome in words."""
  first = outcome.difference
  lines = [
    f"{outcome.equal} of {outcome.compared} versions are equal to the bit,"
    f" {outcome.arrays_compared} of them compared with the stored values too",
    f"replayed {outcome.lives} lives, {outcome.steps:,} inner steps in"
    f" {outcome.wall_secs:.1f} s",
  ]
  if first is not None:
    lines += [
      f"first difference: version {first.version} of fragment {first.fragment}",
      f"  the run has {first.expected}, the replay {first.found}",
      f"  contributions of another norm: {', '.join(first.contributions)}"
      if first.contributions
      else "  all its contributions have the norms they had",
      *(f"  {text}" for text in first.weights),
    ]
  return "\n".join(lines)
