"""A fleet that exists only here: engine, channels and clock of a controller.

Roles start, train, answer and die in virtual time, which moves when the
controller waits for messages. Nothing sleeps.
"""

import collections
import json
import queue

from diloco import channel, timing
from diloco import config as config_lib
from diloco.controller import controller as controller_lib
from diloco.controller import tenure
from diloco.controller.engines import base
from diloco.tape import reader

START_SECS = 3.0
BEAT_SECS = 1.0
LIMIT_SECS = 3000.0  # no session here lasts so long


class Role:
  """A process that is none; also the controller's handle to it."""

  def __init__(self, fleet, launch, pid):
    self.fleet, self.name, self.launch, self.pid = (
      fleet,
      launch.role,
      launch,
      pid,
    )
    self.cause = None
    self.ready_at = fleet.now + fleet.start_secs.get(self.name, START_SECS)
    self.beat_at = fleet.now
    self.ready = False
    self.step = fleet.steps.get(self.name, 0)
    self.programs = collections.deque()

  def cause_of_death(self):
    return self.cause

  def signal(self, number):
    if number == 9 and self.cause is None:
      self.fleet.killed.append(self.name)
      self.die("SIGKILL")

  def wait(self, timeout_secs):
    return self.cause is not None

  def die(self, cause):
    self.cause = cause
    self.fleet.living.pop(self.name, None)

  def live(self, now):
    """Does what is due at `now`."""
    self.fleet.hook(self)
    if self.cause is not None:
      return
    if not self.ready and now >= self.ready_at:
      self.ready = True
      self._say("ready", token=self._token())
    if now >= self.beat_at:
      self.beat_at = now + BEAT_SECS
      merges = self.fleet.merges.get(self.name, 0)
      told = {"merges": merges, "damaged": self.fleet.damaged}
      self._say("status", progress=now, extra_secs=0.0, **told)
    if self.ready and self.programs:
      self._work(self.programs[0])

  def _token(self):
    return int(self.name == "syncer")

  def _say(self, kind, **fields):
    self.fleet.say(self.name, type=kind, step=self.step, **fields)

  def _work(self, program):
    if program["name"] == "train":
      self.step += 1
      self.fleet.steps[self.name] = self.step
      program["left"] = program.get("left", program["args"]["num_steps"]) - 1
      if program["left"]:
        return
    self.programs.popleft()
    result = {"step": self.step, "loss": 1.0, "newest_version": 1, "idle": True}
    if program["name"] == "evaluate" and self.name in self.fleet.blind:
      result = {"error": "OSError: unreachable"}
    self._say("done", seq=program["seq"], result=result)
    if program["name"] == "stop":
      self.die("exit 0")


class Fleet:
  """All of it: what `controller.Outside` asks for."""

  apart = binds = True

  def __init__(self):
    self.now = 0.0
    self.living = {}
    self.launches = []
    self.killed = []
    self.steps = {}  # of each island, as its last life saved it
    self.start_secs = {}  # of roles that are slower or faster than others
    self.merges = {}  # of each syncer's life, as it will tell
    self.hook = lambda role: None  # called for every role, every moment
    self.refusals = []  # errors of the next starts; None for a good one
    self.blind = set()  # islands that cannot read what they are to evaluate
    self.said = collections.deque()
    self.sent = []  # (role, message)
    self.addresses_told = 0
    self.damaged = []  # fragments
    self.set_back = lambda end: False  # what the run does about it
    self.closed = False

  # The engine.

  def start(self, launch):
    error = self.refusals.pop(0) if self.refusals else None
    if error is not None:
      raise error
    self.launches.append(launch)
    role = Role(self, launch, 100 + len(self.launches))
    self.living[launch.role] = role
    return role

  def survivors(self):
    return {
      name: base.Survivor(role, json.loads(json.dumps(role.launch.facts)))
      for name, role in self.living.items()
    }

  def kill_leftovers(self):
    names = list(self.living)
    for role in list(self.living.values()):
      role.signal(9)
    return names

  def kill_stray(self, pid):
    pass

  def tell_address(self):
    self.addresses_told += 1

  # The server; it is its own inbox.

  @property
  def inbox(self):
    return self

  def say(self, name, **message):
    self.said.append((name, message))

  def get(self, timeout):
    if not self.said:
      self.now += timeout
      assert self.now < LIMIT_SECS, "the session does not end"
      for role in list(self.living.values()):
        role.live(self.now)
    return self.get_nowait()

  def get_nowait(self):
    if not self.said:
      raise queue.Empty
    return self.said.popleft()

  def send(self, name, message):
    self.sent.append((name, message))
    role = self.living.get(name)
    if role is not None:
      if message["preempt"]:
        role.programs.clear()
      role.programs.append(message)
    return role is not None

  def announce(self, run_dir, facts):
    path = channel.address_path(run_dir)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(facts))

  def close(self):
    self.closed = True


class Session:
  """A controller of a run in a fleet; a second one is a resume."""

  def __init__(
    self, run_dir, world, incarnation=1, on_tick=None, hold=None, **values
  ):
    self.run_dir, self.fleet = run_dir, world
    config = make_config(**values)
    self.controller = controller_lib.Controller(
      config,
      run_dir,
      controller_lib.Outside(
        world,
        world,
        lambda: world.now,
        on_tick or (lambda: None),
        lambda end: world.set_back(end),
        hold or tenure.Unopposed(),
      ),
      10,  # tokens of a step
      timing.derive(config.controller, 0.0),
      incarnation=incarnation,
    )

  def open(self):
    """Begins without running to the end; `run` then goes on from there."""
    self.controller.open()
    self.controller.open = lambda: None

  def run(self):
    return self.controller.run()

  def turn_until(self, holds, secs=LIMIT_SECS):
    """Turns until something holds; the time is the fleet's."""
    deadline = self.fleet.now + secs
    while not holds():
      assert self.fleet.now < deadline
      self.controller.turn()

  def events(self, name):
    return [e for e in reader.read(self.run_dir).events if e["event"] == name]


def make_config(**values):
  base_values = {
    "total_tokens": 1000,
    "fleet": {"slices": [{}, {}]},
    "programs": {"window_steps": 8, "cut_every_secs": 0.0},
    "sync": {"num_fragments": 2, "every": 8},
    "controller": {"max_islands_per_core": 64},
  }
  for name, value in values.items():
    nested = isinstance(value, dict)
    base_values[name] = base_values.get(name, {}) | value if nested else value
  return config_lib.from_mapping(base_values)
