"""Values of a configuration that cannot work, or not together.

Every refusal names the field and its value, the rule, and what to do about it.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from typing import TYPE_CHECKING

from diloco import errors, typed
from diloco.fragments import codec as codec_lib

if TYPE_CHECKING:  # it imports this module, to be checked
  from diloco import config as config_lib

_LEAST_WEIGHT = 1e-200  # of a stale contribution against a fresh one
_TOPOLOGY = re.compile("[0-9]{1,6}(x[0-9]{1,6}){0,3}")


def check(config: config_lib.RunConfig) -> None:
  """Refuses a configuration that cannot work.

  Raises:
    UserError: a value out of its range, or values that contradict each other.
  """
  _check_ranges(config)
  _check_fleet(config.fleet)
  _check_codec(config.sync)
  _check_sync(config)
  _check_outer(config.outer)
  _check_sync_with_outer(config)
  _check_loop(config)
  _check_virtual(config)
  _check_times(config)
  _check_evaluator(config)
  _check_open_ends(config)
  _check_one_job(config)
  _check_faults(config)


def _check_sync_with_outer(config: config_lib.RunConfig) -> None:
  sync, outer = config.sync, config.outer
  errors.require(
    sync.adoption != "eager" or outer.optimizer != "delayed_nesterov",
    "config.sync.adoption = 'eager'",
    "an island cannot make its share of the outer steps of"
    " config.outer.optimizer = 'delayed_nesterov', which are not all alike",
    "choose another outer optimizer, such as 'nesterov'",
  )
  errors.require(
    not (outer.count_absent and config.needs_equal_steps),
    "config.outer.count_absent = True",
    "outer steps are then of many lengths, and those of"
    f" config.outer.momentum = {outer.momentum} with config.sync.adoption ="
    f" {sync.adoption!r} must be of one",
    "leave config.outer.count_absent out; or have no momentum, and another"
    " adoption than 'eager'",
  )


def _check_faults(config: config_lib.RunConfig) -> None:
  for i, fault in enumerate(config.faults):
    targets = [f"island-{m}" for m in range(config.fleet.islands)] + ["syncer"]
    targets += ["standby"] if config.controller.standbys else []
    errors.require(
      0 <= fault.at_fraction <= 1,
      f"config.faults[{i}].at_fraction = {fault.at_fraction}",
      "it is a share of the token budget",
      "give a number from 0 to 1",
    )
    errors.require(
      fault.target in targets,
      f"config.faults[{i}].target = {typed.show(fault.target)}",
      f"the run has {', '.join(targets)}",
      "name one of them",
    )
    errors.require(
      config.engine != "inline" or fault.kind != "sigstop",
      f"config.faults[{i}].kind = 'sigstop'",
      "config.engine = 'inline' has threads, which cannot be stopped",
      "choose sigkill or poison, or config.engine = 'process'",
    )
    errors.require(
      config.engine != "virtual"
      or (fault.kind != "sigstop" and fault.target != "standby"),
      f"config.faults[{i}] = {typed.show(dataclasses.asdict(fault))}",
      "in virtual time processes are killed and not stopped, and no syncer"
      " waits",
      "choose sigkill or poison, for an island or the syncer",
    )
    errors.require(
      fault.kind != "poison" or fault.target.startswith("island-"),
      f"config.faults[{i}].kind = 'poison'",
      f"{fault.target} has no values that could be spoilt",
      "name an island as its target",
    )


def _check_loop(config: config_lib.RunConfig) -> None:
  errors.require(
    not config.loop or (config.engine != "virtual" and config.replicas == 1),
    f"config.loop = {config.loop!r}",
    "islands in virtual time take turns in one thread, and one job divides its"
    " batches among all slices; a loop of one's own does neither",
    "choose another config.engine or config.method, or leave config.loop out",
  )
  for field in ("task.name", "loop"):
    place = operator.attrgetter(field)(config)
    errors.require(
      not place.startswith("__main__:")
      or config.engine in ("inline", "virtual"),
      f"config.{field} = {place!r}",
      "islands are processes, and __main__ is another module there",
      "write it into a file and name that, FILE.py:NAME, or set config.engine"
      " to 'inline'",
    )


# Besides, nothing is below 0.
_RANGES: tuple[tuple[str, float, float], ...] = (
  ("seed", 0, 2**32 - 1),
  ("total_tokens", 1, math.inf),
  ("sync.num_fragments", 1, math.inf),
  ("sync.every", 1, math.inf),
  ("sync.overlap_steps", 1, math.inf),
  ("sync.quorum", 1, math.inf),
  ("sync.grace_gamma", 0, 1),
  ("sync.suspend_after", 1, math.inf),
  ("sync.staleness_decay", 0, 1),
  ("sync.blend_alpha", 0, 1),
  ("sync.merge_trim", 0, 0.5),
  ("outer.momentum", 0, 1),
  ("fleet.jitter", 0, 2),
  ("virtual.latency_secs", 0, 60),
  ("programs.window_steps", 1, math.inf),
  ("programs.windows_ahead", 1, math.inf),
  ("programs.final_eval_batches", 1, math.inf),
  ("controller.takeover_secs", 0, 600),
  ("controller.standbys", 0, 8),
  ("controller.port", 0, 65535),
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


def _check_ranges(config: config_lib.RunConfig) -> None:
  for name, low in _OVERRIDES:
    value = operator.attrgetter(name)(config)
    errors.require(
      value == 0 or value >= low,
      f"config.{name} = {value}",
      f"it must be at least {low}",
      f"change config.{name}, or set it to 0 to derive it",
    )
  for field in dataclasses.fields(config):
    if dataclasses.is_dataclass(group := getattr(config, field.name)):
      errors.check_amounts(group, f"config.{field.name}.")
  for name, low, high in _RANGES:
    value = operator.attrgetter(name)(config)
    errors.require(
      low <= value <= high,
      f"config.{name} = {value}",
      f"it must be at least {low}"
      + (f" and at most {high}" if high < math.inf else ""),
      f"change config.{name}",
    )


def _check_fleet(fleet: config_lib.FleetConfig) -> None:
  errors.require(
    bool(fleet.slices),
    "config.fleet.slices = ()",
    "a run needs at least one slice",
    "add a slice",
  )
  for i, hardware in enumerate(fleet.slices):
    where = f"config.fleet.slices[{i}]"
    errors.require(
      _TOPOLOGY.fullmatch(hardware.topology) is not None
      and hardware.num_devices > 0,
      f"{where}.topology = {typed.show(hardware.topology)}",
      "a topology is device counts along one to four axes",
      "write it like '4' or '2x4'",
    )
    errors.require(
      0 < hardware.relative_speed <= 1,
      f"{where}.relative_speed = {hardware.relative_speed}",
      "speeds are relative to the fleet's fastest slice",
      "give a number above 0 and at most 1",
    )
  errors.require(
    fleet.num_islands <= len(fleet.slices),
    f"config.fleet.num_islands = {fleet.num_islands}",
    f"the fleet has {len(fleet.slices)} slices and an island needs one",
    "add slices or lower config.fleet.num_islands",
  )


def _check_open_ends(config: config_lib.RunConfig) -> None:
  """Ranges whose ends are not in them."""
  stale = "it must be above 0; config.sync.max_staleness = 0 refuses stale ones"
  for name, end, rule in (
    ("sync.staleness_decay", 0, stale),
    ("outer.learning_rate", 0, "it must be above 0, or nothing is learned"),
    ("outer.momentum", 1, "it must be below 1, or steps never fade"),
  ):
    value = operator.attrgetter(name)(config)
    what = f"config.{name} = {value}"
    errors.require(value != end, what, rule, f"change config.{name}")


def _check_evaluator(config: config_lib.RunConfig) -> None:
  if not config.programs.evaluator:
    return
  errors.require(
    config.programs.eval_every_tokens > 0,
    "config.programs.evaluator = True",
    "it would have nothing to do: config.programs.eval_every_tokens = 0 leaves"
    " only the last evaluation, which an island does",
    "set eval_every_tokens to the tokens between two evaluations",
  )
  errors.require(
    config.engine not in ("inline", "virtual"),
    "config.programs.evaluator = True",
    f"config.engine = {config.engine!r} has one process for all, so its work"
    " would be done in the islands' time",
    "set config.engine to 'process', or leave evaluator at False",
  )


def _check_virtual(config: config_lib.RunConfig) -> None:
  links, deaths = "set it to 0", "use config.faults"
  for field, instead in (
    *(("latency_secs", links), ("bytes_per_sec", links)),
    *(("reconfigure_secs", links), ("mtbi_secs", deaths), ("trace", deaths)),
  ):
    value = getattr(config.virtual, field)
    errors.require(
      not value or config.engine == "virtual",
      f"config.virtual.{field} = {typed.show(value)}",
      f"config.engine = {config.engine!r} is no virtual time, and nothing would"
      f" {'die' if instead == deaths else 'come'} of it",
      f"set config.engine to 'virtual', or {instead}",
    )
  errors.require(
    not config.virtual.reconfigure_secs or config.elastic,
    f"config.virtual.reconfigure_secs = {config.virtual.reconfigure_secs}",
    f"config.method = {config.method!r} is no elastic job, which alone goes on"
    " with other slices",
    "set config.method to 'elastic_data_parallel', or leave it at 0",
  )


def _check_times(config: config_lib.RunConfig) -> None:
  times = config.controller
  errors.require(
    config.engine != "virtual" or config.fleet.pace_step_secs > 0,
    "config.engine = 'virtual'",
    "in virtual time a step takes config.fleet.pace_step_secs, which is 0",
    "set it to the seconds of an inner step",
  )
  errors.require(
    times.hang_limit_secs >= 2 * times.heartbeat_secs,
    f"config.controller.hang_secs = {times.hang_limit_secs}",
    "progress is reported every config.controller.heartbeat_secs ="
    f" {times.heartbeat_secs}, so every island would count as hung",
    "raise hang_secs to twice heartbeat_secs or more",
  )
  used = max(config.fleet.islands, config.replicas)
  slowest = min(s.relative_speed for s in config.fleet.slices[:used])
  step_secs = config.fleet.pace_step_secs / slowest
  errors.require(
    step_secs < times.hang_limit_secs,
    f"config.fleet.pace_step_secs = {config.fleet.pace_step_secs}",
    f"the slowest slice would take {step_secs:g} s a step and be killed"
    f" after config.controller.hang_secs = {times.hang_limit_secs}",
    "lower pace_step_secs or raise hang_secs",
  )
  mtbi_secs = config.virtual.mtbi_secs
  errors.require(
    mtbi_secs == 0 or mtbi_secs >= step_secs,
    f"config.virtual.mtbi_secs = {mtbi_secs:g}",
    f"a step of the slowest slice takes {step_secs:g} s, so hardly any would"
    " be done before its island dies",
    "raise it to many steps, or set it to 0 for no deaths",
  )


def _check_codec(sync: config_lib.SyncConfig) -> None:
  errors.require(
    codec_lib.is_block(sync.codec_block),
    f"config.sync.codec_block = {sync.codec_block}",
    "a block is a multiple of 4 values, at least 4 and at most 65536, so that"
    " it fills whole bytes; it need not divide a tensor",
    f"set config.sync.codec_block to {codec_lib.BLOCK}",
  )
  errors.require(
    sync.codec != "f32" or sync.codec_rounding == "nearest",
    "config.sync.codec_rounding = 'stochastic'",
    "config.sync.codec = 'f32' rounds nothing",
    "choose another codec, or leave codec_rounding at 'nearest'",
  )
  errors.require(
    sync.codec != "f32" or not sync.error_feedback,
    "config.sync.error_feedback = True",
    "config.sync.codec = 'f32' leaves nothing out that could be sent later",
    "choose another codec, or leave error_feedback at False",
  )
  errors.require(
    sync.codec != "int2"
    or sync.codec_rounding == "nearest"
    or not sync.error_feedback,
    "config.sync.codec_rounding = 'stochastic'",
    "with three levels it can leave out more than there is, and"
    " config.sync.error_feedback would send that again and again",
    "leave codec_rounding at 'nearest', or error_feedback at False",
  )


def _check_sync(config: config_lib.RunConfig) -> None:
  sync, num_islands = config.sync, config.fleet.islands
  errors.require(
    sync.quorum <= num_islands,
    f"config.sync.quorum = {sync.quorum}",
    f"the run has {num_islands} islands, so no round could ever close",
    f"set config.sync.quorum to at most {num_islands}",
  )
  errors.require(
    sync.num_fragments <= sync.every,
    f"config.sync.num_fragments = {sync.num_fragments}",
    f"P must not exceed H, config.sync.every = {sync.every}, or several"
    " fragments would be due at every step",
    f"set config.sync.num_fragments to at most {sync.every}",
  )
  errors.require(
    sync.overlap_steps <= max(1, sync.every - 1),
    f"config.sync.overlap_steps = {sync.overlap_steps}",
    f"a fragment must be back before it leaves again, config.sync.every ="
    f" {sync.every}",
    "lower config.sync.overlap_steps or raise config.sync.every",
  )
  errors.require(
    sync.staleness_kind != "exponential"
    or sync.staleness_decay**sync.max_staleness > _LEAST_WEIGHT,
    f"config.sync.staleness_decay = {sync.staleness_decay}",
    f"to the power of config.sync.max_staleness = {sync.max_staleness} nothing"
    " of it is left: a merge of such contributions alone would weigh nothing",
    "raise staleness_decay or lower max_staleness",
  )
  errors.require(
    sync.merge_clip == 0 or sync.merge_clip >= 1,
    f"config.sync.merge_clip = {sync.merge_clip}",
    "below 1 even contributions of one length would be shortened",
    "set it to at least 1, or to 0 for any length",
  )
  errors.require(
    sync.grace == "adaptive" or sync.fixed_grace_secs is not None,
    f"config.sync.grace = {typed.show(sync.grace)}",
    "it is 'adaptive' or a number of seconds",
    "write 'adaptive', or for instance '0.5'",
  )
  errors.require(
    sync.wait_secs > 0 or sync.wait_after == 0,
    f"config.sync.wait_after = {sync.wait_after}",
    "with config.sync.wait_secs = 0 islands wait for nothing",
    "leave it out, or say by config.sync.wait_secs how long they wait at most",
  )
  if sync.adoption == "blend":
    errors.require(
      sync.wait_secs == 0 or sync.wait_after > 0,
      "config.sync.adoption = 'blend' without overlap",
      "islands wait for the answer before they do another step, so there is"
      " nothing newer of their own to blend it with",
      "set config.sync.wait_after to the steps that they do meanwhile, or"
      " config.sync.adoption = 'overwrite'",
    )
    errors.require(
      sync.blend_alpha < 1,
      f"config.sync.blend_alpha = {sync.blend_alpha:g}",
      "islands would keep all of their own, and adopt nothing",
      "set it below 1",
    )
  least = min(map(config.sync_every, range(config.fleet.islands)))
  errors.require(
    sync.wait_after < least,
    f"config.sync.wait_after = {sync.wait_after}",
    "a fragment must be answered before it leaves again, which the slowest"
    f" island does after {least} steps",
    "lower config.sync.wait_after or raise config.sync.every",
  )


def _check_outer(outer: config_lib.OuterConfig) -> None:
  errors.require(
    outer.nesterov or outer.optimizer != "nesterov",
    "config.outer.nesterov = False",
    "config.outer.optimizer = 'nesterov' looks ahead",
    "set config.outer.optimizer to 'heavy_ball' or 'sgd'",
  )
  errors.require(
    outer.optimizer == "sgd" or outer.momentum > 0,
    f"config.outer.momentum = {outer.momentum}",
    f"config.outer.optimizer = {outer.optimizer!r} is there for its momentum,"
    " and without one it is plain SGD",
    "set it above 0, or config.outer.optimizer to 'sgd'",
  )
  errors.require(
    outer.delay >= 1,
    f"config.outer.delay = {outer.delay}",
    "delayed Nesterov moves its momentum at every so many-th merge, so never",
    "set it to at least 1, for instance to the number of islands",
  )
  errors.require(
    outer.delay_c <= 1 / outer.delay,
    f"config.outer.delay_c = {outer.delay_c}",
    f"with config.outer.delay = {outer.delay} it must be from 0 to"
    f" {1 / outer.delay:g}, or steps with the momentum would turn back",
    f"set config.outer.delay_c to at most {1 / outer.delay:g}",
  )


def _check_one_job(config: config_lib.RunConfig) -> None:
  if config.replicas > 1:
    shapes = dict.fromkeys(one.topology for one in config.fleet.slices)
    errors.require(
      len(shapes) == 1,
      f"config.method = {config.method!r}",
      f"config.fleet.slices have the topologies {', '.join(shapes)}, and one"
      " job divides its batch alike among all slices",
      "give all one topology, or choose another method",
    )
  if not config.elastic:
    return
  errors.require(
    config.replicas > 1,
    f"config.method = {config.method!r}",
    "config.fleet.slices has one, so the job has a single replica and nothing"
    " to go on with without it",
    "add slices, or choose 'data_parallel'",
  )
  errors.require(
    config.engine == "virtual",
    f"config.method = {config.method!r}",
    f"config.engine = {config.engine!r} cannot take slices from a job, or give"
    " them back, while it is on",
    "set config.engine to 'virtual', or choose 'data_parallel'",
  )
