import json
import signal
import subprocess
import sys
import time

import exhaustive
import plants
import psutil
import pytest
from observing import refused

from diloco import cli
from diloco.verification import campaign, faults


def run(capsys, *flags):
  code = cli.main(["simulate-protocol", *flags])
  out, err = capsys.readouterr()
  return code, out, err


def test_campaign_prints_one_json_object(capsys):
  code, out, err = run(capsys, "--schedules=20", "--jobs=1", "--json")
  facts = json.loads(out)
  assert code == 0
  assert err == "20/20 schedules, 0 violations\n"
  assert facts["schedules"] == 20 and facts["violations"] == 0
  assert facts["rounds_per_schedule"] >= 19
  assert facts["schedules_per_sec_per_core"] > 0
  assert sum(facts["faults"].values()) > 0


def test_two_processes_count_the_same_as_one(capsys, monkeypatch):
  monkeypatch.setattr(campaign, "_CHUNK", 20)
  found = []
  for jobs in (1, 2):
    _, out, _ = run(capsys, "--schedules=50", f"--jobs={jobs}", "--json")
    facts = json.loads(out)
    for name in ("cpu_secs", "schedules_per_sec_per_core", "virtual_secs"):
      del facts[name]  # time, and a sum whose order may differ
    found.append(facts)
  assert found[0] == found[1]


@pytest.mark.parametrize(
  "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
)
def test_killed_campaign_leaves_no_process_behind(number):
  command = [sys.executable, "-m", "diloco.cli", "simulate-protocol"]
  # Whoever runs this in the background may have it ignored, and a child
  # inherits that (a `preexec_fn` would fork this process, JAX's threads in it).
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    campaign = subprocess.Popen(
      [*command, "--schedules=1000000", "--jobs=2"],
      stderr=subprocess.DEVNULL,
    )
  finally:
    signal.signal(signal.SIGINT, before)
  deadline = time.monotonic() + 60
  try:
    running = psutil.Process(campaign.pid)
    while len(children := running.children()) < 3:  # pool and tracker
      assert time.monotonic() < deadline
      time.sleep(0.05)
  finally:
    campaign.send_signal(number)
    campaign.wait(60)
  _, left = psutil.wait_procs(children, 60)
  for child in left:
    child.kill()
  assert not left


def test_failure_prints_seed_reason_and_a_small_schedule(capsys):
  with plants.bug("head_before_payload"):
    code, _, err = run(capsys, "--schedules=3", "--jobs=1")
  assert code == 1
  assert "seed 0: the head of fragment" in err
  line = next(x for x in err.splitlines() if "--schedule=" in x)
  small = line.partition("--schedule='")[2].rstrip("'")
  with plants.bug("head_before_payload"):
    code, out, _ = run(capsys, f"--schedule={small}")
  assert code == 1 and "which is not there" in out
  code, out, _ = run(capsys, f"--schedule={small}")
  assert code == 0


def test_trace_tells_what_happens(capsys):
  code, out, _ = run(capsys, "--seed=1", "--trace")
  assert code == 0
  assert "calm: no more faults" in out
  assert "CompareAndSet heads/0000 Head(" in out
  assert out.splitlines()[-1].startswith("no violation in ")


def test_trace_of_a_spoiled_version_names_it(capsys):
  schedule = exhaustive.tiny(1).replace(
    rounds=40,
    cuts=1.5,
    set_back=True,
    faults=(faults.Fault(faults.GLOBAL_LOST, "fragment-0", 6.0, 12.0),),
  )
  code, out, _ = run(capsys, f"--schedule={schedule.to_json()}", "--trace")
  assert code == 0
  assert "fault: global_lost fragment-0 at t=6.000 for 12.000 s" in out
  assert "everything is killed" in out


@pytest.mark.parametrize(
  "flags",
  [
    ["--schedule={}"],
    ['--schedule={"seed":1,"set_back":-1,"faults":[]}'],
    ['--schedule={"seed":1,"set_back":"often","faults":[]}'],
    ['--schedule={"seed":1,"faults":[["nonesuch","",1,0]]}'],
    ['--schedule={"seed":1,"faults":[["head_lost","fragment-0",1,0]]}'],
    ['--schedule={"seed":1,"faults":[["kill","fragment-0",1,0]]}'],
    ["--jobs=0"],
  ],
)
def test_bad_flags_are_refused_in_one_line(capsys, flags):
  refused(capsys, ["simulate-protocol", *flags])
