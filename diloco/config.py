"""The run's configuration: typed, validated, and the only reader of dicts.

Experiments write a `ConfigDict`; everything behind this module sees frozen
dataclasses. `diloco.config_checks` refuses what cannot work, and
`diloco.config_changes` says what may change in a run that has begun.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from diloco import config_checks, errors, methods, typed
from diloco.fragments import codec as codec_lib
from diloco.fragments import partition


@dataclasses.dataclass(frozen=True)
class TaskConfig:
  """Which task to train; see `diloco.tasks.registry`."""

  name: str = "language_model"
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class SliceConfig:
  """Devices joined by fast links: one unit of hardware."""

  kind: str = "cpu"
  topology: str = "1"  # devices along each axis, "2x4"
  relative_speed: float = 1.0  # inner steps against the fleet's fastest

  @property
  def shape(self) -> tuple[int, ...]:
    """The topology as integers."""
    return tuple(int(n) for n in self.topology.split("x"))

  @property
  def num_devices(self) -> int:
    """Chips of the slice."""
    return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class FleetConfig:
  """All slices known to the run, and how many become islands."""

  slices: tuple[SliceConfig, ...] = (SliceConfig(),)
  num_islands: int = 0  # M; 0 takes every slice, fewer leaves spares
  pace_step_secs: float = 0.0  # emulated step time at relative speed 1; 0: off
  jitter: float = 0.0  # of the emulated step time: deviation of its logarithm

  @property
  def islands(self) -> int:
    """M."""
    return self.num_islands or len(self.slices)

  def device_indices(self, slice_index: int) -> range:
    """A slice's own devices, among all that a host has for the fleet."""
    before = sum(s.num_devices for s in self.slices[:slice_index])
    return range(before, before + self.slices[slice_index].num_devices)


MergeMethod = Literal["rda", "mean", "median", "trimmed_mean"]
StalenessKind = Literal["exponential", "hyperbolic", "none"]


@dataclasses.dataclass(frozen=True)
class SyncConfig:
  """Fragments, rounds and their merging."""

  num_fragments: int = 24  # P
  split_tensors: bool = False  # large leaves are cut, so that P are balanced
  fragments_by: partition.Grouping = "balanced"
  embeddings_apart: bool = False  # in a fragment of their own, the last
  every: int = 24  # H, inner steps
  overlap_steps: int = 2  # tau
  quorum: int = 1  # K
  grace: str = "adaptive"  # or a fixed number of seconds
  grace_gamma: float = 0.8  # share of the slack the adaptive grace may spend
  max_staleness: int = 2
  staleness_decay: float = 0.7
  staleness_kind: StalenessKind = "exponential"
  gate_factor: float = 20.0  # times the median norm: an outlier; 0: no gate
  suspend_after: int = 3  # refusals of an island in a row
  follow: bool = True
  every_by_speed: bool = False  # islands do H times their relative speed steps
  wait_secs: float = 0.0  # for an answer, at most, before the next step
  wait_after: int = 0  # steps that may be done before that
  codec: Literal["f32", "bf16", "int8", "int4", "int2"] = "bf16"
  codec_block: int = codec_lib.BLOCK  # values that share a scale
  codec_rounding: Literal["nearest", "stochastic"] = "nearest"
  down_codec: Literal["f32", "bf16", "int4"] = "f32"  # of global versions
  error_feedback: bool = False  # what a codec leaves out is sent later
  adoption: Literal["overwrite", "blend", "carry", "eager"] = "carry"
  blend_alpha: float = 0.5  # share of the local value kept by "blend"
  merge: MergeMethod = "rda"  # of what is no embedding
  merge_embeddings: Literal["rda", "mean", "median", "trimmed_mean"] = "mean"
  merge_trim: float = 0.25  # weight left out at either end by "trimmed_mean"
  merge_clip: float = 0.0  # times the median norm of a round, at most; 0: any

  @property
  def fixed_grace_secs(self) -> float | None:
    """Seconds of a fixed grace window; None when it is not a number."""
    try:
      secs = float(self.grace)
    except ValueError:
      return None
    return secs if math.isfinite(secs) and secs >= 0 else None


@dataclasses.dataclass(frozen=True)
class OuterConfig:
  """The outer optimizer; `diloco.syncer.outer_optimizer` has the formulas."""

  learning_rate: float = 1.0
  momentum: float = 0.0
  nesterov: bool = True  # of "sgd"; the others say it by their names
  optimizer: Literal[
    "sgd", "nesterov", "heavy_ball", "ema", "delayed_nesterov"
  ] = "sgd"
  delay: int = 4  # N, merges between two steps of a delayed momentum
  delay_c: float = 0.0  # c, share of the momentum in a step without its own
  learning_rate_by_islands: Mapping[str, Any] = dataclasses.field(
    default_factory=dict
  )  # M as text to a learning rate, which takes the place of the one above
  # As if islands not in a round had sent zeros. None, while nobody has said:
  # if outer steps may be of many lengths (`needs_equal_steps`).
  count_absent: bool | None = None

  @property
  def buffers(self) -> tuple[str, ...]:
    """What is kept beside each tensor of a version, by name in the store."""
    if not self.momentum:
      return ()
    delayed = self.optimizer == "delayed_nesterov"
    return ("momentum", "delayed") if delayed else ("momentum",)

  @property
  def looks_ahead(self) -> bool:
    """Whether a step goes along the momentum that the next one will have."""
    if self.optimizer == "sgd":
      return self.nesterov
    return self.optimizer == "nesterov"

  @property
  def gain(self) -> float:
    """G, what a step grows to, over an outer gradient that stays the same."""
    gain = self.learning_rate
    if self.optimizer != "ema":
      gain /= 1 - self.momentum
    return gain / self.delay if self.optimizer == "delayed_nesterov" else gain


@dataclasses.dataclass(frozen=True)
class ProgramConfig:
  """What the controller dispatches."""

  window_steps: int = 24
  windows_ahead: int = 2
  eval_every_tokens: int = 0  # 0: only at the end
  evaluator: bool = False  # a process of its own does so, and no island
  eval_batches: int = 0  # 0: those of the last, so that all compare
  final_eval_batches: int = 64
  checkpoint_every_steps: int = 200  # 0: only when the run stops
  cut_every_secs: float = 300.0  # 0: only on demand


TAKEOVER_SECS = 1.35  # unless it is chosen, or the store needs more


@dataclasses.dataclass(frozen=True)
class ControllerConfig:
  """Supervision. Figures that are 0 are derived by `diloco.timing`."""

  takeover_secs: float = 0.0  # how soon a dead syncer is replaced
  standbys: int = 1  # syncers that wait for the leading one to die
  heartbeat_secs: float = 0.0
  port: int = 0  # 0 lets the system choose
  start_secs: float = 0.0  # to import, compile and report ready
  gather_secs: float = 30.0  # the first island ready waits for the others
  hang_secs: float = 0.0  # without a sign of life or progress
  restart_base_secs: float = 0.5
  restart_max_secs: float = 60.0
  max_restarts: int = 20  # per island, then it is given up
  drain_secs: float = 0.0
  orphan_secs: float = 0.0  # an island or syncer lives without controller
  max_islands_per_core: int = 4
  openmetrics_secs: float = 0.0  # between two writes of the run's figures

  @property
  def patience_secs(self) -> float:
    """Of waits for work done; compiling takes its time whatever is chosen."""
    return max(60.0, 40 * (self.takeover_secs or TAKEOVER_SECS))

  @property
  def hang_limit_secs(self) -> float:
    """`hang_secs`, chosen or derived."""
    return self.hang_secs or self.patience_secs


@dataclasses.dataclass(frozen=True)
class VirtualConfig:
  """The world of a run with `engine` "virtual"."""

  latency_secs: float = 0.0  # of an island's operation of the store
  bytes_per_sec: float = 0.0  # between an island and the store; 0: no limit
  mtbi_secs: float = 0.0  # mean time between deaths of an island; 0: never
  repair_secs: float = 30.0  # mean time until it is back
  reconfigure_secs: float = 0.0  # that an elastic job stands still
  trace: str = ""  # file of deaths, besides those that are drawn


@dataclasses.dataclass(frozen=True)
class FaultConfig:
  """A fault to inject: a real signal to a real process, or bad values."""

  target: str  # "island-<m>", "syncer" (who leads) or "standby" (who waits)
  at_fraction: float  # of the token budget trained
  kind: Literal["sigkill", "sigstop", "poison"] = "sigkill"


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """One run, whole."""

  name: str = "run"
  seed: int = 0
  total_tokens: int = 1_000_000  # trained by all islands together
  init_from: str = ""  # file of the initial parameters; else from the seed
  store: str = ""  # URL of the snapshot store; else in the run directory
  engine: Literal["process", "inline", "ray", "virtual"] = "process"  # of roles
  ray_address: str = ""  # of a cluster; "" is RAY_ADDRESS, or the one here
  method: str = "decoupled"  # see `diloco.methods`
  loop: str = ""  # "FILE.py:NAME" of a training loop; else the task's steps
  task: TaskConfig = TaskConfig()
  fleet: FleetConfig = FleetConfig()
  sync: SyncConfig = SyncConfig()
  outer: OuterConfig = OuterConfig()
  programs: ProgramConfig = ProgramConfig()
  controller: ControllerConfig = ControllerConfig()
  virtual: VirtualConfig = VirtualConfig()
  faults: tuple[FaultConfig, ...] = ()

  def to_dict(self) -> dict[str, Any]:
    """Returns plain JSON values."""
    return typed.plain(dataclasses.asdict(self))

  @property
  def replicas(self) -> int:
    """Slices that an island's batch is for."""
    one_job = self.method in methods.ONE_JOB
    return len(self.fleet.slices) if one_job else 1

  @property
  def elastic(self) -> bool:
    """Whether its one job goes on without slices that die."""
    return self.method == "elastic_data_parallel"

  @property
  def needs_equal_steps(self) -> bool:
    """Whether outer steps must all be of one length.

    A momentum would mix steps of many lengths, and islands that make outer
    steps themselves do not know who is in a round.
    """
    return self.outer.momentum > 0 or self.sync.adoption == "eager"

  @property
  def own_answers(self) -> bool:
    """Whether islands adopt only versions with all that they published.

    Where they wait, others would cost them the steps since, and are merged
    without them.
    """
    gives_up = self.sync.adoption in ("overwrite", "blend")
    alone = self.sync.quorum < self.fleet.islands
    return gives_up and alone and self.sync.wait_secs > 0

  def sync_every(self, island: int) -> int:
    """Steps of an island between two publications of a fragment."""
    speeds = [s.relative_speed for s in self.fleet.slices][: self.fleet.islands]
    share = speeds[island] / max(speeds) if self.sync.every_by_speed else 1.0
    steps = int(self.sync.every * share + 1e-9)  # 100 * 0.29 is 29
    return max(self.sync.num_fragments, steps)

  def speed_share(self, island: int) -> float:
    """Share of the run's tokens an island of this speed should train."""
    speeds = [s.relative_speed for s in self.fleet.slices][: self.fleet.islands]
    return speeds[island] / sum(speeds)


def from_mapping(values: Mapping[str, Any]) -> RunConfig:
  """Builds and validates a configuration of nested mappings.

  Raises:
    UserError: an unknown field (names the nearest), a wrong type, or values
      that cannot work together.
  """
  whole = methods.completed(values)
  config = typed.build(RunConfig, whole, "config")
  config = _with_absent_islands(_with_rate_of_islands(config))
  config_checks.check(config)
  return config


def of_run(fields: Mapping[str, Any]) -> RunConfig:
  """The configuration of a run, which a version with other fields wrote.

  A field that came later means by default what was done before it came; but for
  one, and a run goes on as it was begun. One that is gone may say that what it
  was for was not asked for. What nothing came of, and was once not refused, is
  left out.

  Raises:
    UserError: as `from_mapping`.
  """
  whole = {**fields, "outer": fields.get("outer") or {}}
  if isinstance(whole["outer"], Mapping):
    whole["outer"] = {"count_absent": False, **whole["outer"]}
  sync = fields.get("sync")
  if isinstance(sync, Mapping) and sync.get("merge_align") is False:
    whole["sync"] = {k: v for k, v in sync.items() if k != "merge_align"}
  virtual, idle = fields.get("virtual"), set[str]()
  if fields.get("engine") != "virtual":
    idle = {"latency_secs", "bytes_per_sec", "reconfigure_secs"}
  elif fields.get("method") != "elastic_data_parallel":
    idle = {"reconfigure_secs"}
  if isinstance(virtual, Mapping):
    whole["virtual"] = {k: v for k, v in virtual.items() if k not in idle}
  return from_mapping(whole)


def _with_absent_islands(config: RunConfig) -> RunConfig:
  """Says whether absent islands count, if nobody has."""
  if config.outer.count_absent is not None:
    return config
  counted = not config.needs_equal_steps
  outer = dataclasses.replace(config.outer, count_absent=counted)
  return dataclasses.replace(config, outer=outer)


def _with_rate_of_islands(config: RunConfig) -> RunConfig:
  """Looks the outer learning rate up, where it is given by M."""
  rates, islands = config.outer.learning_rate_by_islands, config.fleet.islands
  if not rates:
    return config
  name = "config.outer.learning_rate_by_islands"
  rate = rates.get(str(islands))
  if not isinstance(rate, int | float) or isinstance(rate, bool):
    raise errors.UserError(
      f"{name}[{str(islands)!r}] = {typed.show(rate)}",
      f"the run has {islands} islands, and the rate for them must be a number",
      f"give one for '{islands}', or set config.outer.learning_rate alone",
    )
  outer = dataclasses.replace(
    config.outer, learning_rate=float(rate), learning_rate_by_islands={}
  )
  return dataclasses.replace(config, outer=outer)
