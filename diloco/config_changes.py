"""What may change in a run that has begun: while it is on, or as it goes on."""

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

from diloco import config as config_lib
from diloco import errors, typed

# A resumed run may change these; anything else would make it another run.
RESUMABLE = ("total_tokens", "programs", "controller", "faults", "ray_address")


# These may change while it is on: they decide when and how far, and nothing
# that was computed before depends on them.
LIVE = (
  "outer.learning_rate",
  "sync.every",
  "sync.grace",
  "sync.grace_gamma",
  "sync.quorum",
)


def live(config: config_lib.RunConfig) -> dict[str, Any]:
  """The fields in `LIVE`, by their dotted names."""
  return {name: operator.attrgetter(name)(config) for name in LIVE}


def with_live(
  config: config_lib.RunConfig, values: Mapping[str, Any]
) -> config_lib.RunConfig:
  """The configuration with other values of fields in `LIVE`."""
  for name in LIVE:
    group, _, field = name.partition(".")
    changed = dataclasses.replace(
      getattr(config, group), **{field: values[name]}
    )
    config = dataclasses.replace(config, **{group: changed})
  return config


def check_live(old: config_lib.RunConfig, new: config_lib.RunConfig) -> None:
  """Refuses to change more of a run that is on than can be."""
  for name, (_, value) in changes(old, new).items():
    if name == "outer.learning_rate" and new.sync.adoption == "eager":
      raise errors.UserError(
        f"config.{name} = {typed.show(value)}",
        "islands make outer steps themselves, config.sync.adoption = 'eager',"
        " by the rate that they began with",
        "stop the run, and go on with it by `diloco resume`",
      )
    if name not in LIVE:
      raise errors.UserError(
        f"config.{name} = {typed.show(value)}",
        "this field cannot change while the run is on",
        "stop the run first, or change only "
        + ", ".join(f"config.{n}" for n in LIVE),
      )


def check_resumable(
  old: config_lib.RunConfig, new: config_lib.RunConfig
) -> None:
  """Refuses to continue a run under an incompatible configuration."""
  for name, (old_value, new_value) in changes(old, new).items():
    if name.split(".")[0] not in RESUMABLE and name not in LIVE:
      raise errors.UserError(
        f"config.{name} = {typed.show(new_value)}",
        f"the run in this directory has {typed.show(old_value)}, and this field"
        " cannot change within a run",
        f"set config.{name} back to that, go on by 'diloco resume', which takes"
        " the run's own settings, or use a new --workdir",
      )


def changes(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
  """Fields that differ, by name: what was and what is, as plain values."""
  found: dict[str, tuple[Any, Any]] = {}
  for field in dataclasses.fields(old):
    a, b = getattr(old, field.name), getattr(new, field.name)
    name = prefix + field.name
    if dataclasses.is_dataclass(a):
      found |= changes(a, b, name + ".")
    elif typed.plain(a) != typed.plain(b):
      found[name] = (typed.plain(a), typed.plain(b))
  return found
