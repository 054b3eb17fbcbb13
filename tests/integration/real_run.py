"""Real runs: `diloco train` in a process, real islands, a real store."""

import collections
import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil

from diloco import cli
from diloco.chaos import campaign
from diloco.report import roster, summary
from diloco.tape import reader

_COMMAND = (sys.executable, "-m", "diloco.cli")
ENDLESS = 10_000_000  # tokens; such a run ends because a test ends it
CONFIG = """
import ml_collections


def get_config(variant=""):
  return ml_collections.ConfigDict({values!r})
"""


def command(*words):
  """Does a command in this process; returns (exit code, stdout, stderr)."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    code = cli.main([*map(str, words)])
  return code, out.getvalue(), err.getvalue()


class Run:
  """A run directory and the command that trains in it."""

  def __init__(self, tmp_path: pathlib.Path, **overrides):
    self.dir = tmp_path / "run"
    self.config = tmp_path / "config.py"
    self.values = _VALUES | overrides
    self.write_config()
    self.process = None
    self._follower = reader.Follower(self.dir)
    # By event and role. To read all tapes again at every look would take a
    # fifth of a core from the run.
    self._lines = collections.defaultdict(lambda: collections.defaultdict(list))

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    left = self.alive()
    self.kill_everything()
    assert kind or not left, f"processes were left behind: {left}"

  def write_config(self):
    self.config.write_text(CONFIG.format(values=self.values))

  def start(self, *flags):
    config, workdir = f"--config={self.config}", f"--workdir={self.dir}"
    return self.start_command("train", config, workdir, *flags)

  def command(self, name, *flags):
    """Does something with the run, to the end; see `command`."""
    return command(name, self.dir, *flags)

  def start_command(self, *words):
    """Starts a command that takes the run over, in the way of `start`."""
    self.process = subprocess.Popen(
      [*_COMMAND, *words],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    return self

  def finish(self, secs=240):
    """Waits for the end; returns (exit code, stdout, stderr)."""
    try:
      out, err = self.process.communicate(timeout=secs)
    except subprocess.TimeoutExpired:
      self.kill_everything()
      raise
    return self.process.returncode, out, err

  def kill_everything(self):
    """The controller first, or it would start the others again."""
    if self.process is not None:
      self.process.kill()
      self.process.communicate()
    while left := self.alive():
      for pid in left:
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)
      time.sleep(0.01)

  def alive(self):
    """Processes of this run's roles."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
      words = process.info["cmdline"] or []  # None of a zombie
      if "--run_dir" in words and str(self.dir) in words:
        found.append(process.pid)
    return found

  def pid(self, role):
    """Process number of a role, as it has signed in."""
    return roster.look(self.dir)[role]["pid"]

  def steps(self, island):
    path = self.dir / "metrics" / f"island-{island}.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0

  def wait_for(self, condition, secs=120):
    deadline = time.monotonic() + secs
    while not condition():
      if time.monotonic() > deadline:
        logs = sorted((self.dir / "logs").glob("*.log"))
        tails = {p.name: p.read_text()[-2000:] for p in logs}
        self.kill_everything()
        *_, err = self.finish()
        raise AssertionError(f"timed out; {err[-2000:]}; logs: {tails}")
      time.sleep(0.2)

  def summary(self):
    return json.loads((self.dir / "summary.json").read_text())

  def events(self, name):
    for line in self._follower.poll().events:
      self._lines[line["event"]][line["role"]].append(line)
    return list(reader.interleave(self._lines[name].values()))

  def losses(self):
    """Held-out losses of the global parameters, in nats, as they were found."""
    found = [e for e in self.events("evaluated") if e["target"] == "global"]
    return [e["loss"] for e in sorted(found, key=lambda e: e["wall_secs"])]

  def check_books(self):
    """The summary's tokens, against counts that know nothing of the ledger."""
    facts = summary.summarise(self.dir)
    assert facts["violations"] == []
    assert facts["tokens_unaccounted"] == 0
    assert facts["ledger"]["balanced"]
    logged = {
      (island, line["incarnation"], line["step"]): line["tokens"]
      for island, lines in reader.read(self.dir).metrics.items()
      for line in lines
    }
    assert sum(logged.values()) <= facts["tokens_trained"]
    lives, ends = (
      {(e["role"], e["incarnation"]) for e in self.events(name)}
      for name in ("started", "stopped")
    )
    if lives <= ends:  # the last steps of who is killed may reach no log
      assert sum(logged.values()) == facts["tokens_trained"]
    if self.events("restored"):
      return  # what was merged after the cut was undone
    versions = {
      (e["fragment"], e["version"]): sum(
        c["c_tokens"] for c in e["contributions"]
      )
      for e in self.events("merged")
    }
    merged = sum(versions.values()) / self.values["sync"]["num_fragments"]
    assert abs(merged - facts["tokens_merged"]) <= 1


def fleet(pace_step_secs):
  """Two islands, one half as fast.

  What a test waits for besides steps costs less where steps are far apart.
  """
  return {
    "slices": (
      {"kind": "v6e", "topology": "1", "relative_speed": 1.0},
      {"kind": "v5p", "topology": "1", "relative_speed": 0.5},
    ),
    "pace_step_secs": pace_step_secs,
  }


def language_model(folder):
  """The task of a run whose model matters, with a corpus in this folder."""
  corpus = folder / "corpus"
  corpus.mkdir(exist_ok=True)
  for i in range(40):
    text = f"file {i}: the quick brown fox jumps over the lazy dog\n" * 60
    (corpus / f"{i}.txt").write_text(text)
  read = {"data_glob": str(corpus / "*.txt"), "heldout_fraction": 0.2}
  # That of campaigns, so that what is compiled serves both.
  return {"name": "language_model", "options": campaign.MODEL | read}


_VALUES = {
  "total_tokens": 32_000,
  "task": {"name": "tests.integration.bowl:make", "options": {}},
  "fleet": fleet(0.08),
  "sync": {"num_fragments": 4, "every": 8},
  "outer": {"learning_rate": 1.0, "momentum": 0.0},
  "programs": {
    "window_steps": 8,
    "eval_every_tokens": 10_000,
    "eval_batches": 1,
    "final_eval_batches": 4,
    "checkpoint_every_steps": 40,
  },
  "controller": {"restart_base_secs": 0.1},
}
