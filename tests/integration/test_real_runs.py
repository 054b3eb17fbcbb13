"""A run in real processes that several controllers lead, one after another.

One run is made, struck, and led again; each test looks at its own part of what
was seen on the way.
"""

import dataclasses
import os
import signal
from typing import Any

import pytest
import real_run

from diloco import process
from diloco.report import summary

ROLES = ("island-0", "island-1", "syncer", "standby")


@dataclasses.dataclass
class Session:
  """What one controller came upon and left behind."""

  reattached: list[dict[str, Any]]  # lines of the tape, of this session alone
  started: list[dict[str, Any]]
  facts: dict[str, Any]  # the run's, at its end
  code: int
  err: str

  def lives(self):
    return {e["role"]: e["incarnation"] for e in self.started}


class Story:
  """The run, and its sessions so far."""

  def __init__(self, run):
    self.run = run
    self.sessions = []
    self._seen = {"reattached": 0, "started": 0}

  def start(self, *, started, reattached=0):
    """Starts a controller and waits for its roles, and for some training."""
    run, before = self.run.start(), self.run.steps(0)
    run.wait_for(
      lambda: (
        len(run.events("started")) >= self._seen["started"] + started
        and len(run.events("reattached"))
        >= self._seen["reattached"] + reattached
        and run.steps(0) > before + 5
      )
    )

  def end(self, number=None):
    """Ends the controller, by a signal or as it will."""
    if number is not None:
      self.run.process.send_signal(number)
    code, _, err = self.run.finish()
    lines = {name: self.run.events(name) for name in self._seen}
    self.sessions.append(
      Session(
        **{name: lines[name][n:] for name, n in self._seen.items()},
        facts=summary.summarise(self.run.dir),
        code=code,
        err=err,
      )
    )
    self._seen = {name: len(found) for name, found in lines.items()}

  def seats(self):
    """(who leads, who waits)."""
    leases = self.run.events("lease_acquired")
    leader = max(leases, key=lambda e: e["token"])["role"]
    return leader, *({"syncer", "standby"} - {leader})


@pytest.fixture(scope="module")
def story(tmp_path_factory):
  with real_run.Run(
    tmp_path_factory.mktemp("story"),
    total_tokens=real_run.ENDLESS,
    fleet=real_run.fleet(0.12),
    # A busy machine silences no leader for as long as its lease then lasts.
    controller={"restart_base_secs": 0.1, "takeover_secs": 3.0},
  ) as run:
    story = Story(run)
    story.start(started=2)
    first = run.process
    story.refused = run.start().finish()
    run.process = first
    story.pids = {role: run.pid(role) for role in ROLES}
    story.end(signal.SIGKILL)
    steps, versions = run.steps(0), len(run.events("merged"))
    run.wait_for(
      lambda: (
        run.steps(0) > steps + 5 and len(run.events("merged")) > versions + 1
      )
    )
    story.alone = steps
    story.start(started=0, reattached=4)
    story.taken_up = run.alive()
    # Who waits is told to stop before the leader, and holds up the end.
    stopped, (_, waiting) = len(run.events("stopped")), story.seats()
    os.kill(run.pid(waiting), signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: len(run.events("stopped")) == stopped + 2)
    story.end(signal.SIGKILL)
    os.kill(run.pid(waiting), signal.SIGCONT)
    story.start(started=2)
    story.end(signal.SIGKILL)
    for role in ("island-1", "syncer"):
      os.kill(run.pid(role), signal.SIGKILL)
    story.start(started=1, reattached=2)
    story.end(signal.SIGKILL)
    run.values["total_tokens"] += 1
    run.write_config()
    story.start(started=2)
    story.end(signal.SIGINT)
    yield story


def test_second_controller_is_refused(story):
  code, out, err = story.refused
  assert (code, out) == (2, "")
  assert err.count("\n") == 1 and "alive" in err


def test_roles_that_outlive_their_controller_are_not_started_again(story):
  before, after = story.sessions[:2]
  assert sorted(story.pids.values()) == sorted(story.taken_up)
  taken_up = {e["peer"]: e for e in after.reattached}
  assert {role: e["pid"] for role, e in taken_up.items()} == story.pids
  assert taken_up["island-0"]["peer_incarnation"] == 1
  assert taken_up["island-0"]["step"] >= story.alone  # it trained meanwhile
  assert after.started == []
  for name in ("starts", "takeovers"):
    assert after.facts["syncer"][name] == before.facts["syncer"][name]
  dispatched = story.run.events("program_dispatched")
  numbers = [(e["island"], e["seq"]) for e in dispatched]
  assert len(set(numbers)) == len(numbers)


def test_syncer_that_was_draining_does_not_train_on_in_the_next_session(story):
  before, after = story.sessions[1:3]
  assert "draining_seat_ended" in after.err
  for facts, takeovers in ((before.facts, 0), (after.facts, 1)):
    assert facts["syncer"]["takeovers"] == takeovers


def test_interrupted_islands_drain_save_and_go_on_from_there(story):
  before, after = story.sessions[1:3]
  assert after.lives() == {"island-0": 2, "island-1": 2}
  for event in after.started:
    island = event["role"].removeprefix("island-")
    assert event["step"] == before.facts["islands"][island]["steps"]
    assert "checkpoint" in event["restored_from"]
  assert after.facts["tokens_trained"] > before.facts["tokens_trained"]


def test_what_died_with_its_controller_is_started_and_the_rest_taken_up(story):
  after = story.sessions[3]
  assert {e["peer"] for e in after.reattached} == {"island-0", "standby"}
  assert after.lives() == {"island-1": 3}


def test_roles_that_were_told_another_configuration_are_started_again(story):
  after = story.sessions[4]
  assert "config_changed" in after.err
  assert after.reattached == []
  told = process.read_config(story.run.dir).total_tokens
  assert told == story.run.values["total_tokens"] == real_run.ENDLESS + 1
  assert after.lives() == {"island-0": 3, "island-1": 4}


def test_run_that_many_controllers_led_stops_with_balanced_books(story):
  assert story.sessions[-1].code == 0, story.sessions[-1].err
  facts = story.run.summary()
  assert facts["status"] == "stopped" and facts["sessions"] == 5
  assert story.run.alive() == []
  story.run.check_books()
