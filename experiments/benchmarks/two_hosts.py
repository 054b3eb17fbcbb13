"""Two hosts: one freezes and is given up, the other goes on, the first is back.

Question: can a run whose machine does not answer be gone on with on another,
and does it do harm when the first machine comes back, with all its processes?

Command: `python -m experiments.benchmarks.two_hosts`, as root, on Linux. Three
minutes on two cores. Each host is a set of namespaces of this machine, with a
name, process numbers and a run directory of its own; they share S3, which is
served here, and the network. Expected: a run that is alive is refused; nothing
that the first host does after its return is merged; it ends by itself and says
why; the books of the whole run balance.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

import diloco
from diloco.tape import reader
from experiments.benchmarks import s3_server

_APART = ("--fork", "--pid", "--mount-proc", "--uts", "--ipc", "--kill-child")
_DILOCO = str(pathlib.Path(sys.executable).with_name("diloco"))
_PATIENCE_SECS = 180.0  # ten times as much for a run to end
_CUT_SECS = 15.0


class Host:
  """A machine, as far as the processes on it can tell."""

  def __init__(self, name: str, folder: pathlib.Path):
    self.name = name
    self.log = folder / f"{name}.log"
    self._folder = folder
    self._main: subprocess.Popen[bytes] | None = None

  @property
  def processes(self) -> list[psutil.Process]:
    """All that live on it."""
    with contextlib.suppress(psutil.NoSuchProcess):
      if self._main is not None:
        return psutil.Process(self._main.pid).children(recursive=True)
    return []

  def start(self, *args: str) -> None:
    """Gives a command of `diloco`, and does not wait for it."""
    with self.log.open("ab") as log:
      self._main = subprocess.Popen(self._command(args), stderr=log)

  def wait(self) -> int:
    """Waits for that command; returns its exit code."""
    assert self._main is not None
    return self._main.wait(10 * _PATIENCE_SECS)

  def refused(self, *args: str) -> dict[str, Any]:
    """Gives a command that is to be refused."""
    done = subprocess.run(
      self._command(args), stderr=subprocess.PIPE, text=True, check=False
    )
    return {"code": done.returncode, "says": done.stderr.splitlines()[-1]}

  def signal(self, number: int) -> None:
    """Sends a signal to all that live on it."""
    for one in self.processes:
      one.send_signal(number)

  def close(self) -> None:
    """Ends all that lives on it."""
    if self._main is not None:
      self._main.kill()
      self._main.wait()

  def _command(self, args: tuple[str, ...]) -> list[str]:
    script = 'hostname "$0" && exec "$@"'
    return [
      *("unshare", *_APART, "sh", "-c", script, self.name),
      *(_DILOCO, *args),
    ]


def _until(what: str, condition: Callable[[], object]) -> float:
  """Waits; returns the seconds that it took."""
  began = time.monotonic()
  while not condition():
    if time.monotonic() - began > _PATIENCE_SECS:
      raise SystemExit(f"{what}: not within {_PATIENCE_SECS:g} s")
    time.sleep(1.0)
  return time.monotonic() - began


def _status(url: str) -> dict[str, Any]:
  """What a third machine sees."""
  done = subprocess.run(
    [_DILOCO, "status", url, "--json"], capture_output=True, check=False
  )
  found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
  return found


def story(
  first: Host, second: Host, url: str, places: tuple[str, str], tokens: int
) -> Iterator[tuple[str, Any]]:
  """Does one thing after another; yields what came of each."""
  first.start(
    *("train", "--config=experiments/configs/quickstart.py:smoke"),
    *(f"--workdir={places[0]}", f"--config.store={url}"),
    *(f"--config.total_tokens={tokens}", "--config.faults=()"),
    f"--config.programs.cut_every_secs={_CUT_SECS}",
  )
  _until("two cuts", lambda: (_status(url).get("last_cut") or 0) >= 2)
  again = ("resume", url, f"--workdir={places[1]}")
  yield "while_it_lives", second.refused(*again)
  first.signal(signal.SIGSTOP)
  second.start(*again)
  folder = pathlib.Path(places[1])
  frozen = time.time()
  merged = _until("it goes on", lambda: len(_merged(folder, frozen)) >= 8)
  yield "gone_on_with", {"eight_merges_secs": merged}
  first.signal(signal.SIGCONT)
  back = time.time()
  code = first.wait()
  yield (
    "back_again",
    {
      "ended_after_secs": time.time() - back,
      "code": code,
      "says": first.log.read_text().splitlines()[-1],
      "left": len(first.processes),
    },
  )
  yield "its_own_directory", first.refused("resume", places[0])
  yield "second_host_ends_with", second.wait()


def _merged(folder: pathlib.Path, since: float) -> list[dict[str, Any]]:
  """Merges since a time by the wall's clock."""
  events = reader.Follower(folder).poll().events
  names = [e for e in events if e["event"] == "merged"]
  return [e for e in names if e["wall_secs"] > since]


def judge(folder: pathlib.Path) -> dict[str, Any]:
  """The books, and what became of what the first host did too late."""
  events = reader.Follower(folder).poll().events
  (back,) = (e for e in events if e["event"] == "restored")
  old = {
    (e["role"], e["incarnation"])
    for e in events
    if e["event"] == "started" and (e.get("epoch") or 0) < back["epoch"]
  }
  summary = diloco.Run(folder).summary
  return {
    "merged_of_the_first_host": [
      c["key"]
      for e in _merged(folder, back["wall_secs"])
      for c in e["contributions"]
      if (f"island-{c['island']}", c["incarnation"]) in old
      and c["key"] not in back["reinjected"]
    ],
    "discarded_of_it": sum(
      (f"island-{e['island']}", e["island_incarnation"]) in old
      for e in events
      if e["event"] == "discarded" and e["wall_secs"] > back["wall_secs"]
    ),
    **{
      name: summary[name]
      for name in ("status", "violations", "problems", "tokens_trained")
    },
    "tokens_merged": summary["tokens_merged"],
    "tokens_unaccounted": summary["tokens_unaccounted"],
  }


def main() -> None:
  """Prints one JSON object."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--tokens", type=int, default=1_500_000)
  args = parser.parse_args()
  if os.geteuid() != 0:
    raise SystemExit("two_hosts: namespaces are for root; run it as root")
  with contextlib.ExitStack() as ending:
    folder = pathlib.Path(ending.enter_context(tempfile.TemporaryDirectory()))
    server = ending.enter_context(s3_server.serving())
    first, second = Host("host-a", folder), Host("host-b", folder)
    for host in (first, second):
      ending.callback(host.close)
    places = str(folder / "first"), str(folder / "second")
    found: dict[str, Any] = {}
    url = server.place("run")
    for name, facts in story(first, second, url, places, args.tokens):
      print(name, facts, file=sys.stderr, flush=True)
      found[name] = facts
    found |= judge(folder / "second")
  print(json.dumps(found, indent=2))


if __name__ == "__main__":
  main()
