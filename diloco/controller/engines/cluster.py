"""The Ray cluster that the `ray` engine places roles on."""

import collections
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from diloco import config as config_lib
from diloco import errors

Need = Mapping[str, float]  # resources of one role, by Ray's names

_CONNECT_SECS = 5.0
# Read when Ray is imported. It would print on stdout what befalls its nodes,
# between the lines that a command promises; the tape tells it too.
_ENV = {
  "RAY_USAGE_STATS_ENABLED": "0",
  "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
  "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",
}


def load() -> Any:
  """Returns Ray's module.

  Raises:
    UserError: it is not installed.
  """
  for name, value in _ENV.items():
    os.environ.setdefault(name, value)
  return errors.needed("ray", "config.engine = 'ray'", "ray")


def connect(address: str) -> bool:
  """Connects this process, unless its owner has done so; says whether it did.

  An `address` is "HOST:PORT"; "" for RAY_ADDRESS, or else what runs here
  ("auto").

  Raises:
    UserError: no cluster can be reached.
  """
  ray = load()
  if ray.is_initialized():
    return False
  where = address or os.environ.get("RAY_ADDRESS") or "auto"
  try:
    _check_listens(where)
    ray.init(where, log_to_driver=False, logging_level="ERROR")
  except (OSError, RuntimeError, ValueError) as error:
    why = " ".join(str(error).split())
    raise errors.UserError(
      f"config.ray_address = {where!r}",
      f"no Ray cluster can be reached there ({why})",
      "start one with 'ray start --head' here, or join one with 'ray start"
      " --address=HOST:PORT': this machine must be one of its nodes",
    ) from error
  return True


def _check_listens(where: str) -> None:
  """Raises `OSError` at once where Ray would try for long."""
  if "://" in where:
    raise ValueError("it must be 'auto' or HOST:PORT")
  host, colon, port = where.rpartition(":")
  if colon:
    socket.create_connection((host, int(port)), _CONNECT_SECS).close()


def check(config: config_lib.RunConfig) -> None:
  """Raises `UserError` if the run could not be placed."""
  mine = connect(config.ray_address)
  try:
    check_fits(config)
  finally:
    if mine:
      load().shutdown()


def of_slice(hardware: config_lib.SliceConfig, kinds: Sequence[str]) -> Need:
  """What an island on a slice asks Ray for.

  A node that has a custom resource of the slice's `kind` gives as many of it
  as the slice has devices, and one core. Where no node has, devices are
  emulated, on a core each.
  """
  count = float(hardware.num_devices)
  if hardware.kind in kinds:
    return {"CPU": 1.0, hardware.kind: count}
  return {"CPU": count}


def nodes() -> list[dict[str, float]]:
  """Resources of each living node, in use or not."""
  return [n["Resources"] for n in load().nodes() if n["Alive"]]


def kinds() -> set[str]:
  """Custom resources of the cluster; Ray's own can be no kind of slice."""
  own = {"CPU", "GPU", "memory", "object_store_memory"}
  return {name for node in nodes() for name in node} - own


def check_fits(config: config_lib.RunConfig) -> None:
  """Raises `UserError` if the cluster could not hold the run's islands.

  Others ask for nothing, or where they are placed, which is first, might be the
  only room that an island has.
  """
  left, there_are = [dict(node) for node in nodes()], sorted(kinds())
  slices = config.fleet.slices[: config.fleet.islands]
  wanted = {
    f"island-{m}": of_slice(hardware, there_are)
    for m, hardware in enumerate(slices)
  }
  total = _text(
    sum(map(collections.Counter, wanted.values()), collections.Counter())
  )
  there = "; ".join(_text(_own(node)) for node in left)
  for role, need in sorted(
    wanted.items(), key=lambda item: -sum(item[1].values())
  ):
    for node in left:
      if all(node.get(name, 0.0) >= n for name, n in need.items()):
        for name, n in need.items():
          node[name] -= n
        break
    else:
      raise errors.UserError(
        "config.engine = 'ray'",
        f"the run needs {total}, and the cluster's nodes have {there}: there"
        f" is no room for {role}, which needs {_text(need)}",
        "add nodes, or name fewer islands or smaller topologies in"
        " config.fleet.slices",
      )


def _own(node: Need) -> Need:
  """Without what Ray adds to every node."""
  hidden = ("node:", "memory", "object_store")
  return {k: v for k, v in node.items() if not k.startswith(hidden)}


def _text(need: Need) -> str:
  return ", ".join(f"{name} {n:g}" for name, n in sorted(need.items()))
