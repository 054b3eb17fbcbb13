"""Methods of the DiLoCo family, as policies: each is some fields of a config.

No method has a loop of its own. It says when to publish, whom to wait for, how
to weigh, merge and adopt; what it leaves open is the configuration's.

    decoupled         whatever the configuration says
    diloco            all islands, the whole model, everybody waits
    streaming         fragments; the next step waits only `overlap_steps` later
    eager             streaming, and an island that publishes goes on at once
                      with its own outer step and the others' of the round
                      before; it waits for these as late as can be
    async_local_sgd   every arrival is merged at once, those found together one
                      after another, each an outer step of its own, and its
                      island waits for it; slower islands do fewer steps
                      between two
    data_parallel     one synchronous job: an island whose batch is that of all
                      slices together, as slow as the slowest of them, which
                      dies with any of them
    elastic_data_parallel
                      the same, and it goes on with the slices that are left

References: DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512; eager
updates, arXiv 2502.12996;
Asynchronous Local-SGD, arXiv 2401.09135; Decoupled DiLoCo, arXiv 2604.21428.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco import errors, typed

# Those of which all slices are one island.
ONE_JOB = ("data_parallel", "elastic_data_parallel")

_ONE_JOB_FIXED: Mapping[str, Any] = {
  "fleet.num_islands": 1,
  "sync.num_fragments": 1,
  "sync.quorum": 1,
  "sync.adoption": "carry",
  "sync.wait_secs": 0.0,
  "sync.wait_after": 0,
  "sync.merge_clip": 0.0,
  "sync.down_codec": "f32",
  "outer.optimizer": "sgd",
  "outer.learning_rate": 1.0,
  "outer.learning_rate_by_islands": {},
  "outer.momentum": 0.0,
}
# Rounding would make of the job what it is measured against.
_ONE_JOB_USUAL = {"sync.merge": "mean", "sync.codec": "f32"}
GROUPS = ("fleet", "sync", "outer")
_FOR_EVER_SECS = 3600.0  # that an answer is waited for, unless it is lost
_ANY_STALENESS = 1_000_000
_WAITS = {
  "sync.wait_secs": _FOR_EVER_SECS,
  "sync.grace": "0",
  "sync.follow": False,
}
# What a method is: another value makes it another method.
_FIXED: Mapping[str, Mapping[str, Any]] = {
  "decoupled": {},
  "diloco": {
    **_WAITS,
    "sync.wait_after": 0,
    "sync.num_fragments": 1,
    "sync.adoption": "overwrite",
  },
  "streaming": _WAITS,
  "eager": {**_WAITS, "sync.adoption": "eager"},
  "async_local_sgd": {
    **_WAITS,
    "sync.wait_after": 0,
    "sync.num_fragments": 1,
    "sync.adoption": "overwrite",
    "sync.quorum": 1,
  },
  **dict.fromkeys(ONE_JOB, _ONE_JOB_FIXED),
}
METHODS = tuple(_FIXED)
# The same, of as many as there are islands.
_BY_FLEET = dict.fromkeys(("diloco", "streaming", "eager"), ("sync.quorum",))
# What its paper does, and a configuration may change.
_USUAL: Mapping[str, Mapping[str, Any]] = {
  "decoupled": {},
  "diloco": {
    "sync.merge": "mean",
    "outer.learning_rate": 0.7,
    "outer.momentum": 0.9,
  },
  "streaming": {
    "sync.merge": "mean",
    "sync.adoption": "blend",
    "outer.learning_rate": 0.4,
    "outer.momentum": 0.9,
  },
  "eager": {
    "sync.merge": "mean",
    "outer.learning_rate": 0.4,
    "outer.momentum": 0.9,
  },
  "async_local_sgd": {
    "sync.merge": "mean",
    "sync.every_by_speed": True,
    "sync.max_staleness": _ANY_STALENESS,
    "sync.staleness_kind": "none",
    "outer.optimizer": "delayed_nesterov",
    "outer.count_absent": False,
    "outer.learning_rate": 0.7,
    "outer.momentum": 0.9,
  },
  **dict.fromkeys(ONE_JOB, _ONE_JOB_USUAL),
}


def completed(values: Mapping[str, Any]) -> Mapping[str, Any]:
  """A configuration with what its method says and it leaves out.

  Raises:
    UserError: the method is unknown, or a given field contradicts it.
  """
  if typed.is_config_dict(values):
    values = {name: values[name] for name in values}
  if not isinstance(values, Mapping) or "method" not in values:
    return values  # whether it is a configuration at all, others say
  method = values["method"]
  if method not in METHODS:
    raise errors.UserError(
      f"config.method = {typed.show(method)}",
      "there is no such method",
      f"choose one of {', '.join(METHODS)}",
    )
  found: dict[str, Any] = typed.plain(values)
  if not all(isinstance(found.setdefault(g, {}), dict) for g in GROUPS):
    return values
  fixed, usual = dict(_FIXED[method]), dict(_USUAL[method])
  for name in _BY_FLEET.get(method, ()):
    fixed[name] = _num_islands(found["fleet"])
  if method == "streaming":
    usual["sync.wait_after"] = found["sync"].get("overlap_steps", 2)
  if method == "eager":
    every = found["sync"].get("every", 24)
    if isinstance(every, int):  # what else it may be is refused later
      usual["sync.wait_after"] = every - 1
  for name, value in fixed.items():
    given = _of(found, name, value)
    if given != value:
      raise errors.UserError(
        f"config.{name} = {typed.show(given)}",
        f"config.method = {method!r} has {typed.show(value)}",
        "leave it out, or choose another method",
      )
  for name, value in (usual | fixed).items():
    _of(found, name, value)
  return found


def exchanged(values: Mapping[str, Any], method: Any) -> dict[str, Any]:
  """A configuration for another method than it was written for.

  What the other one fixes is left to it: those fields said what the method was.

  Args:
    values: plain, without what it leaves out.
    method: that takes the place of its own.
  """
  found = {**values, "method": method}
  if method == values.get("method", METHODS[0]) or method not in METHODS:
    return found
  fixed = {*_FIXED[method], *_BY_FLEET.get(method, ())}
  for group in GROUPS:
    if isinstance(given := found.get(group), Mapping):
      found[group] = {
        name: value
        for name, value in given.items()
        if f"{group}.{name}" not in fixed
      }
  return found


def _of(values: dict[str, Any], name: str, default: Any) -> Any:
  """A field's value, which is set unless it is there."""
  group, _, field = name.partition(".")
  return values[group].setdefault(field, default)


def _num_islands(fleet: Mapping[str, Any]) -> Any:
  slices = fleet.get("slices") or [{}]
  if not isinstance(slices, Sequence):
    return 1  # it is refused by its own name
  return fleet.get("num_islands") or len(slices)
