"""A real Ray cluster of several nodes on this machine, in a process of its own.

Ray forks, which a process that has JAX in it must not.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# A dead node refuses and is found in two seconds; one that is only slow, as on
# a busy machine, has nine.
_SYSTEM = {
  "worker_niceness": 0,
  "health_check_initial_delay_ms": 0,
  "health_check_period_ms": 500,
  "health_check_timeout_ms": 4000,
  "health_check_failure_threshold": 2,
}
_SMALL = {
  "object_store_memory": 80 << 20,
  "include_dashboard": False,
  "include_log_monitor": False,
}


class Cluster:
  """What tests do with it; nodes are numbered from 0, the head.

  Attributes:
    address: of the cluster.
    daemons: process numbers of the nodes' raylets.
  """

  def __init__(self, nodes: Iterable[Mapping[str, Any]]):
    """Starts it; resources of each node, as `ray start` takes them."""
    # Not below pytest's: the paths of sockets are short.
    self._folder = tempfile.mkdtemp(prefix="ray-")
    env = {
      **os.environ,
      "RAY_TMPDIR": self._folder,
      "RAY_USAGE_STATS_ENABLED": "0",
    }
    self._process = subprocess.Popen(
      [sys.executable, __file__],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=env,
      text=True,
    )
    for node in nodes:
      self.do("add", **node)

  def do(self, what: str, **args: Any) -> None:
    """Has it add, remove or abandon a node.

    One that is added with `hidden=DIR` sees nothing in that directory, as on
    another machine.
    """
    asked, answers = self._process.stdin, self._process.stdout
    assert asked is not None and answers is not None
    asked.write(json.dumps([what, args]) + "\n")
    asked.flush()
    self.address, self.daemons = json.loads(answers.readline())

  def close(self) -> None:
    """Leaves no process and no file behind."""
    self._process.communicate()
    deadline = time.monotonic() + 30
    while _alive(self.address) and time.monotonic() < deadline:
      time.sleep(0.1)
    assert not _alive(self.address)
    shutil.rmtree(self._folder)


_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000  # of unshare(2)


def can_hide() -> bool:
  """Whether nodes can be started that do not see a directory."""
  if shutil.which("unshare") is None:
    return False
  asked = subprocess.run(
    ["unshare", "--mount", "true"], stderr=subprocess.DEVNULL
  )
  return asked.returncode == 0


def _alive(address: str) -> list[bytes]:
  found = subprocess.run(["pgrep", "-f", address], stdout=subprocess.PIPE)
  return found.stdout.split()


@contextlib.contextmanager
def running(*nodes: Mapping[str, Any]) -> Iterator[Cluster]:
  """A cluster; runs find it."""
  cluster = Cluster(nodes)
  before = os.environ.get("RAY_ADDRESS")
  os.environ["RAY_ADDRESS"] = cluster.address
  try:
    yield cluster
  finally:
    del os.environ["RAY_ADDRESS"]
    if before is not None:
      os.environ["RAY_ADDRESS"] = before
    cluster.close()


@contextlib.contextmanager
def _without(folder: str) -> Iterator[None]:
  """Starts processes to which a directory is empty, if one is named."""
  if not folder:
    yield
    return
  libc = ctypes.CDLL(None, use_errno=True)
  with open("/proc/self/ns/mnt") as home:
    if libc.unshare(_CLONE_NEWNS):
      raise OSError(ctypes.get_errno(), "unshare")
    try:
      subprocess.run(["mount", "--make-rprivate", "/"], check=True)
      subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
      yield
    finally:
      libc.unshare(_CLONE_FS)  # with threads that were started meanwhile
      if libc.setns(home.fileno(), _CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "setns")


def _serve() -> None:
  from ray import cluster_utils

  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # Ray prints
  cluster = cluster_utils.Cluster()
  nodes: list[Any] = []
  daemons: list[int] = []
  for line in sys.stdin:
    what, args = json.loads(line)
    if what == "add":
      system = {} if nodes else {"_system_config": _SYSTEM}
      with _without(args.pop("hidden", "")):
        nodes.append(cluster.add_node(**_SMALL, **args, **system))
      (raylet,) = nodes[-1].all_processes["raylet"]
      daemons.append(raylet.process.pid)
    elif what == "remove":
      cluster.remove_node(nodes[args["node"]], allow_graceful=False)
    elif what == "abandon":  # its daemon dies, and nobody takes note
      os.kill(daemons[args["node"]], signal.SIGKILL)
    print(json.dumps([cluster.address, daemons]), file=answers, flush=True)
  cluster.shutdown()


if __name__ == "__main__":
  _serve()
