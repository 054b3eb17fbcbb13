"""The run's configuration: typed, validated, and the only reader of dicts.

Experiments write a `ConfigDict`; everything behind this module sees frozen
dataclasses. Every refusal names the field and its value, the rule, and what to
do about it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from diloco import errors, methods, typed
from diloco.fragments import codec as codec_lib
from diloco.fragments import partition

_LEAST_WEIGHT = 1e-200  # of a stale contribution against a fresh one
_TOPOLOGY = re.compile("[0-9]{1,6}(x[0-9]{1,6}){0,3}")


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


MergeMethod = Literal["rda", "mean", "iso", "median", "trimmed_mean"]
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
  codec: str = "bf16"
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
  merge_align: bool = False  # correct contributions by the outer momentum


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
  count_absent: bool = False  # as if islands not in a round had sent zeros

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


TAKEOVER_SECS = 1.5  # unless it is chosen, or the store needs more


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


# A resumed run may change these; anything else would make it another run.
RESUMABLE = (
  "total_tokens",
  "programs",
  "controller",
  "faults",
  "ray_address",
)


def from_mapping(values: Mapping[str, Any]) -> RunConfig:
  """Builds and validates a configuration.

  Args:
    values: nested mappings, such as a `ConfigDict`.

  Returns:
    The typed configuration.

  Raises:
    UserError: an unknown field (names the nearest), a wrong type, or values
      that cannot work together.
  """
  whole = methods.completed(values)
  config = _with_rate_of_islands(typed.build(RunConfig, whole, "config"))
  _validate(config)
  return config


def _with_rate_of_islands(config: RunConfig) -> RunConfig:
  """Looks the outer learning rate up, where it is given by M."""
  rates, islands = config.outer.learning_rate_by_islands, config.fleet.islands
  if not rates:
    return config
  name = "config.outer.learning_rate_by_islands"
  rate = rates.get(str(islands))
  _require(
    isinstance(rate, int | float) and not isinstance(rate, bool),
    f"{name}[{str(islands)!r}] = {typed.show(rate)}",
    f"the run has {islands} islands, and the rate for them must be a number",
    f"give one for '{islands}', or set config.outer.learning_rate alone",
  )
  assert isinstance(rate, int | float)
  outer = dataclasses.replace(
    config.outer, learning_rate=float(rate), learning_rate_by_islands={}
  )
  return dataclasses.replace(config, outer=outer)


# These may change while it is on: they decide when and how far, and nothing
# that was computed before depends on them.
LIVE = (
  "outer.learning_rate",
  "sync.every",
  "sync.grace",
  "sync.grace_gamma",
  "sync.quorum",
)


def live(config: RunConfig) -> dict[str, Any]:
  """The fields in `LIVE`, by their dotted names."""
  return {name: _value(config, name) for name in LIVE}


def with_live(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
  """The configuration with other values of fields in `LIVE`."""
  for name in LIVE:
    group, _, field = name.partition(".")
    changed = dataclasses.replace(
      getattr(config, group), **{field: values[name]}
    )
    config = dataclasses.replace(config, **{group: changed})
  return config


def check_live(old: RunConfig, new: RunConfig) -> None:
  """Refuses to change more of a run that is on than can be."""
  for name, (_, value) in changes(old, new).items():
    _require(
      name != "outer.learning_rate" or new.sync.adoption != "eager",
      f"config.{name} = {typed.show(value)}",
      "islands make outer steps themselves, config.sync.adoption = 'eager', by"
      " the rate that they began with",
      "stop the run, and go on with it by `diloco resume`",
    )
    if name not in LIVE:
      raise errors.UserError(
        f"config.{name} = {typed.show(value)}",
        "this field cannot change while the run is on",
        "stop the run first, or change only "
        + ", ".join(f"config.{n}" for n in LIVE),
      )


def check_resumable(old: RunConfig, new: RunConfig) -> None:
  """Refuses to continue a run under an incompatible configuration."""
  for name, (old_value, new_value) in changes(old, new).items():
    if name.split(".")[0] not in RESUMABLE and name not in LIVE:
      raise errors.UserError(
        f"config.{name} = {typed.show(new_value)}",
        f"the run in this directory has {typed.show(old_value)}, and this field"
        " cannot change within a run",
        f"set config.{name} back to that, or use a new --workdir",
      )


def changes(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
  """Fields that differ, by name: what was and what is, as plain values."""
  return dict(_differences(old, new, ""))


def _differences(
  old: Any, new: Any, prefix: str
) -> Iterator[tuple[str, tuple[Any, Any]]]:
  for field in dataclasses.fields(old):
    a, b = getattr(old, field.name), getattr(new, field.name)
    name = prefix + field.name
    if dataclasses.is_dataclass(a):
      yield from _differences(a, b, name + ".")
    elif typed.plain(a) != typed.plain(b):
      yield name, (typed.plain(a), typed.plain(b))


def _require(holds: bool, what: str, why: str, remedy: str) -> None:
  if not holds:
    raise errors.UserError(what, why, remedy)


def _validate(config: RunConfig) -> None:
  _validate_ranges(config)
  _validate_fleet(config.fleet)
  _validate_sync(config.sync, config.fleet.islands)
  least = min(map(config.sync_every, range(config.fleet.islands)))
  _require(
    config.sync.wait_after < least,
    f"config.sync.wait_after = {config.sync.wait_after}",
    "a fragment must be answered before it leaves again, which the slowest"
    f" island does after {least} steps",
    "lower config.sync.wait_after or raise config.sync.every",
  )
  _validate_outer(config.outer)
  _require(
    not config.sync.merge_align or bool(config.outer.buffers),
    "config.sync.merge_align = True",
    "contributions are corrected by the outer momentum, and"
    f" config.outer.momentum = {config.outer.momentum} leaves none",
    "set config.outer.momentum above 0, or merge_align to False",
  )
  _require(
    config.sync.adoption != "eager"
    or config.outer.optimizer != "delayed_nesterov",
    "config.sync.adoption = 'eager'",
    "an island cannot make its share of the outer steps of"
    " config.outer.optimizer = 'delayed_nesterov', which are not all alike",
    "choose another outer optimizer, such as 'nesterov'",
  )
  _require(
    not config.outer.count_absent
    or not (config.outer.momentum or config.sync.adoption == "eager"),
    "config.outer.count_absent = True",
    "outer steps are then of many lengths, and neither a momentum nor islands"
    " that make outer steps themselves (config.sync.adoption = 'eager') know",
    "set config.outer.momentum to 0, and sync.adoption to another, such as"
    " 'carry'",
  )
  _validate_loop(config)
  _validate_times(config)
  _validate_evaluator(config)
  _validate_open_ends(config)
  _validate_elastic(config)
  for i, fault in enumerate(config.faults):
    targets = [f"island-{m}" for m in range(config.fleet.islands)] + ["syncer"]
    targets += ["standby"] if config.controller.standbys else []
    _require(
      fault.target in targets,
      f"config.faults[{i}].target = {typed.show(fault.target)}",
      f"the run has {', '.join(targets)}",
      "name one of them",
    )
    _require(
      config.engine != "inline" or fault.kind != "sigstop",
      f"config.faults[{i}].kind = 'sigstop'",
      "config.engine = 'inline' has threads, which cannot be stopped",
      "choose sigkill or poison, or config.engine = 'process'",
    )
    _require(
      config.engine != "virtual"
      or (fault.kind != "sigstop" and fault.target != "standby"),
      f"config.faults[{i}] = {typed.show(dataclasses.asdict(fault))}",
      "in virtual time processes are killed and not stopped, and no syncer"
      " waits",
      "choose sigkill or poison, for an island or the syncer",
    )
    _require(
      fault.kind != "poison" or fault.target.startswith("island-"),
      f"config.faults[{i}].kind = 'poison'",
      f"{fault.target} has no values that could be spoilt",
      "name an island as its target",
    )


def _validate_loop(config: RunConfig) -> None:
  _require(
    not config.loop or (config.engine != "virtual" and config.replicas == 1),
    f"config.loop = {config.loop!r}",
    "islands in virtual time take turns in one thread, and one job divides its"
    " batches among all slices; a loop of one's own does neither",
    "choose another config.engine or config.method, or leave config.loop out",
  )


_RANGES: tuple[tuple[str, float, float], ...] = (
  ("seed", 0, 2**32 - 1),
  ("total_tokens", 1, math.inf),
  ("sync.num_fragments", 1, math.inf),
  ("sync.every", 1, math.inf),
  ("sync.overlap_steps", 1, math.inf),
  ("sync.quorum", 1, math.inf),
  ("sync.grace_gamma", 0, 1),
  ("sync.max_staleness", 0, math.inf),
  ("sync.gate_factor", 0, math.inf),
  ("sync.suspend_after", 1, math.inf),
  ("sync.wait_secs", 0, math.inf),
  ("sync.wait_after", 0, math.inf),
  ("sync.staleness_decay", 0, 1),
  ("sync.blend_alpha", 0, 1),
  ("sync.merge_trim", 0, 0.5),
  ("sync.merge_clip", 0, math.inf),
  ("outer.learning_rate", 0, math.inf),
  ("outer.momentum", 0, 1),
  ("fleet.num_islands", 0, math.inf),
  ("fleet.pace_step_secs", 0, math.inf),
  ("fleet.jitter", 0, 2),
  ("virtual.latency_secs", 0, 60),
  ("virtual.bytes_per_sec", 0, math.inf),
  ("virtual.mtbi_secs", 0, math.inf),
  ("virtual.repair_secs", 0, math.inf),
  ("virtual.reconfigure_secs", 0, math.inf),
  ("programs.window_steps", 1, math.inf),
  ("programs.windows_ahead", 1, math.inf),
  ("programs.eval_every_tokens", 0, math.inf),
  ("programs.eval_batches", 0, math.inf),
  ("programs.final_eval_batches", 1, math.inf),
  ("programs.checkpoint_every_steps", 0, math.inf),
  ("programs.cut_every_secs", 0, math.inf),
  ("controller.takeover_secs", 0, 600),
  ("controller.standbys", 0, 8),
  ("controller.port", 0, 65535),
  ("controller.gather_secs", 0, math.inf),
  ("controller.openmetrics_secs", 0, math.inf),
  ("controller.restart_base_secs", 0, math.inf),
  ("controller.restart_max_secs", 0, math.inf),
  ("controller.max_restarts", 0, math.inf),
  ("controller.max_islands_per_core", 1, math.inf),
)

# Zero derives these.
_OVERRIDES: tuple[tuple[str, float], ...] = (
  ("controller.takeover_secs", 0.1),
  ("controller.heartbeat_secs", 0.05),
  ("controller.start_secs", 1),
  ("controller.hang_secs", 1),
  ("controller.drain_secs", 1),
  ("controller.orphan_secs", 1),
)


def _value(config: RunConfig, name: str) -> Any:
  value: Any = config
  for part in name.split("."):
    value = getattr(value, part)
  return value


def _validate_ranges(config: RunConfig) -> None:
  for name, low in _OVERRIDES:
    value = _value(config, name)
    _require(
      value == 0 or value >= low,
      f"config.{name} = {value}",
      f"it must be at least {low}",
      f"change config.{name}, or set it to 0 to derive it",
    )
  for name, low, high in _RANGES:
    value = _value(config, name)
    _require(
      low <= value <= high,
      f"config.{name} = {value}",
      f"it must be at least {low}"
      + (f" and at most {high}" if high < math.inf else ""),
      f"change config.{name}",
    )
  for i, fault in enumerate(config.faults):
    _require(
      0 <= fault.at_fraction <= 1,
      f"config.faults[{i}].at_fraction = {fault.at_fraction}",
      "it is a share of the token budget",
      "give a number from 0 to 1",
    )


def _validate_fleet(fleet: FleetConfig) -> None:
  _require(
    bool(fleet.slices),
    "config.fleet.slices = ()",
    "a run needs at least one slice",
    "add a slice",
  )
  for i, hardware in enumerate(fleet.slices):
    where = f"config.fleet.slices[{i}]"
    _require(
      _TOPOLOGY.fullmatch(hardware.topology) is not None
      and hardware.num_devices > 0,
      f"{where}.topology = {typed.show(hardware.topology)}",
      "a topology is device counts along one to four axes",
      "write it like '4' or '2x4'",
    )
    _require(
      0 < hardware.relative_speed <= 1,
      f"{where}.relative_speed = {hardware.relative_speed}",
      "speeds are relative to the fleet's fastest slice",
      "give a number above 0 and at most 1",
    )
  _require(
    fleet.num_islands <= len(fleet.slices),
    f"config.fleet.num_islands = {fleet.num_islands}",
    f"the fleet has {len(fleet.slices)} slices and an island needs one",
    "add slices or lower config.fleet.num_islands",
  )


def _validate_open_ends(config: RunConfig) -> None:
  """Ranges whose ends are not in them."""
  for name, value, holds, rule in (
    (
      "sync.staleness_decay",
      config.sync.staleness_decay,
      config.sync.staleness_decay > 0,
      "it must be above 0; config.sync.max_staleness = 0 refuses stale ones",
    ),
    (
      "outer.learning_rate",
      config.outer.learning_rate,
      config.outer.learning_rate > 0,
      "it must be above 0, or nothing is learned",
    ),
    (
      "outer.momentum",
      config.outer.momentum,
      config.outer.momentum < 1,
      "it must be below 1, or steps never fade",
    ),
  ):
    _require(holds, f"config.{name} = {value}", rule, f"change config.{name}")


def _validate_evaluator(config: RunConfig) -> None:
  if not config.programs.evaluator:
    return
  _require(
    config.programs.eval_every_tokens > 0,
    "config.programs.evaluator = True",
    "it would have nothing to do: config.programs.eval_every_tokens = 0 leaves"
    " only the last evaluation, which an island does",
    "set eval_every_tokens to the tokens between two evaluations",
  )
  _require(
    config.engine not in ("inline", "virtual"),
    "config.programs.evaluator = True",
    f"config.engine = {config.engine!r} has one process for all, so its work"
    " would be done in the islands' time",
    "set config.engine to 'process', or leave evaluator at False",
  )


def _validate_times(config: RunConfig) -> None:
  times = config.controller
  _require(
    config.engine != "virtual" or config.fleet.pace_step_secs > 0,
    "config.engine = 'virtual'",
    "in virtual time a step takes config.fleet.pace_step_secs, which is 0",
    "set it to the seconds of an inner step",
  )
  _require(
    times.hang_limit_secs >= 2 * times.heartbeat_secs,
    f"config.controller.hang_secs = {times.hang_limit_secs}",
    "progress is reported every config.controller.heartbeat_secs ="
    f" {times.heartbeat_secs}, so every island would count as hung",
    "raise hang_secs to twice heartbeat_secs or more",
  )
  used = max(config.fleet.islands, config.replicas)
  slowest = min(s.relative_speed for s in config.fleet.slices[:used])
  step_secs = config.fleet.pace_step_secs / slowest
  _require(
    step_secs < times.hang_limit_secs,
    f"config.fleet.pace_step_secs = {config.fleet.pace_step_secs}",
    f"the slowest slice would take {step_secs:g} s a step and be killed"
    f" after config.controller.hang_secs = {times.hang_limit_secs}",
    "lower pace_step_secs or raise hang_secs",
  )


def _validate_sync(sync: SyncConfig, num_islands: int) -> None:
  codec_lib.of(sync.codec)
  _require(
    codec_lib.is_block(sync.codec_block),
    f"config.sync.codec_block = {sync.codec_block}",
    "a block is a multiple of 4 values, at least 4 and at most 65536, so that"
    " it fills whole bytes; it need not divide a tensor",
    f"set config.sync.codec_block to {codec_lib.BLOCK}",
  )
  _require(
    sync.codec != "f32" or sync.codec_rounding == "nearest",
    "config.sync.codec_rounding = 'stochastic'",
    "config.sync.codec = 'f32' rounds nothing",
    "choose another codec, or leave codec_rounding at 'nearest'",
  )
  _require(
    sync.codec != "f32" or not sync.error_feedback,
    "config.sync.error_feedback = True",
    "config.sync.codec = 'f32' leaves nothing out that could be sent later",
    "choose another codec, or leave error_feedback at False",
  )
  _require(
    sync.codec != "int2"
    or sync.codec_rounding == "nearest"
    or not sync.error_feedback,
    "config.sync.codec_rounding = 'stochastic'",
    "with three levels it can leave out more than there is, and"
    " config.sync.error_feedback would send that again and again",
    "leave codec_rounding at 'nearest', or error_feedback at False",
  )
  _require(
    sync.quorum <= num_islands,
    f"config.sync.quorum = {sync.quorum}",
    f"the run has {num_islands} islands, so no round could ever close",
    f"set config.sync.quorum to at most {num_islands}",
  )
  _require(
    sync.num_fragments <= sync.every,
    f"config.sync.num_fragments = {sync.num_fragments}",
    f"P must not exceed H, config.sync.every = {sync.every}, or several"
    " fragments would be due at every step",
    f"set config.sync.num_fragments to at most {sync.every}",
  )
  _require(
    sync.overlap_steps <= max(1, sync.every - 1),
    f"config.sync.overlap_steps = {sync.overlap_steps}",
    f"a fragment must be back before it leaves again, config.sync.every ="
    f" {sync.every}",
    "lower config.sync.overlap_steps or raise config.sync.every",
  )
  _require(
    sync.staleness_kind != "exponential"
    or sync.staleness_decay**sync.max_staleness > _LEAST_WEIGHT,
    f"config.sync.staleness_decay = {sync.staleness_decay}",
    f"to the power of config.sync.max_staleness = {sync.max_staleness} nothing"
    " of it is left: a merge of such contributions alone would weigh nothing",
    "raise staleness_decay or lower max_staleness",
  )
  _require(
    sync.merge_clip == 0 or sync.merge_clip >= 1,
    f"config.sync.merge_clip = {sync.merge_clip}",
    "below 1 even contributions of one length would be shortened",
    "set it to at least 1, or to 0 for any length",
  )
  _require(
    sync.grace == "adaptive" or fixed_grace_secs(sync.grace) is not None,
    f"config.sync.grace = {typed.show(sync.grace)}",
    "it is 'adaptive' or a number of seconds",
    "write 'adaptive', or for instance '0.5'",
  )


def _validate_outer(outer: OuterConfig) -> None:
  _require(
    outer.nesterov or outer.optimizer != "nesterov",
    "config.outer.nesterov = False",
    "config.outer.optimizer = 'nesterov' looks ahead",
    "set config.outer.optimizer to 'heavy_ball' or 'sgd'",
  )
  _require(
    outer.optimizer == "sgd" or outer.momentum > 0,
    f"config.outer.momentum = {outer.momentum}",
    f"config.outer.optimizer = {outer.optimizer!r} is there for its momentum,"
    " and without one it is plain SGD",
    "set it above 0, or config.outer.optimizer to 'sgd'",
  )
  _require(
    outer.delay >= 1,
    f"config.outer.delay = {outer.delay}",
    "delayed Nesterov moves its momentum at every so many-th merge, so never",
    "set it to at least 1, for instance to the number of islands",
  )
  _require(
    0 <= outer.delay_c <= 1 / outer.delay,
    f"config.outer.delay_c = {outer.delay_c}",
    f"with config.outer.delay = {outer.delay} it must be from 0 to"
    f" {1 / outer.delay:g}, or steps with the momentum would turn back",
    f"set config.outer.delay_c to at most {1 / outer.delay:g}",
  )


def _validate_elastic(config: RunConfig) -> None:
  if not config.elastic:
    return
  _require(
    config.replicas > 1,
    f"config.method = {config.method!r}",
    "config.fleet.slices has one, so the job has a single replica and nothing"
    " to go on with without it",
    "add slices, or choose 'data_parallel'",
  )
  _require(
    config.engine == "virtual",
    f"config.method = {config.method!r}",
    f"config.engine = {config.engine!r} cannot take slices from a job, or give"
    " them back, while it is on",
    "set config.engine to 'virtual', or choose 'data_parallel'",
  )


def fixed_grace_secs(grace: str) -> float | None:
  """Seconds of a fixed grace window; None when it is not a number."""
  try:
    secs = float(grace)
  except ValueError:
    return None
  return secs if math.isfinite(secs) and secs >= 0 else None
