"""Writes run directories as a real run would, on a clock of its own.

`simulate` plays islands, a syncer and a controller in virtual time: every
fragment is published in turn, merged a moment later and adopted with a small
loss. It is a stand-in with the right shape, not the protocol.
"""

import dataclasses
import heapq
import json
import math
import pathlib
import random

from diloco.tape import events, recorder

EPOCH = 1_790_000_000.0


@dataclasses.dataclass(frozen=True)
class Island:
  """An island of the simulated fleet."""

  step_secs: float = 0.1
  kind: str = "cpu"
  relative_speed: float = 1.0
  paced: bool = False
  asked_secs: float = 0.0  # pace that was asked for; 0: what it keeps


@dataclasses.dataclass(frozen=True)
class Plan:
  """What to simulate; faults are (island or None for the syncer, at_secs)."""

  islands: tuple[Island, ...] = (Island(), Island())
  secs: float = 20.0
  num_fragments: int = 4
  every: int = 8
  tokens_per_step: int = 100
  faults: tuple[tuple[int | None, float], ...] = ()
  restart_secs: float = 3.0
  eval_every_secs: float = 4.0
  finish: bool = True  # False: everything stops in the middle
  seed: int = 0


class Clock:
  """Virtual wall time, set by hand."""

  def __init__(self):
    self.now = EPOCH

  def __call__(self):
    return self.now


class _Player:
  """State of one island while it is simulated."""

  def __init__(self, run, number):
    self.run, self.number = run, number
    self.spec = run.plan.islands[number]
    self.step, self.incarnation = 0, 0
    self.first = [0] * run.plan.num_fragments
    self.base = [0] * run.plan.num_fragments
    self.tape, self.alive = None, False
    self.log = recorder.MetricLog(run.run_dir, number, run.clock)
    self.previous = None

  def launch(self):
    self.incarnation += 1
    self.run.control(
      events.ISLAND_STARTED,
      island=self.number,
      island_incarnation=self.incarnation,
      pid=100,
      cores=[self.number],
    )

  def start(self):
    run, spec = self.run, self.spec
    name = f"island-{self.number}"
    self.tape = recorder.Recorder(
      run.run_dir, name, self.incarnation, run.clock
    )
    self.tape.record(
      events.STARTED,
      step=self.step,
      restored_from="global" if self.step else "init",
      tokens_per_step=run.plan.tokens_per_step,
      kind=spec.kind,
      topology="1",
      devices=1,
      relative_speed=spec.relative_speed,
      paced_step_secs=(
        (spec.asked_secs or spec.step_secs) if spec.paced else 0.0
      ),
      share=[self.number, len(run.plan.islands)],
    )
    self.first = [self.step] * run.plan.num_fragments
    self.alive, self.previous = True, None

  def train(self):
    run, now = self.run, self.run.clock.now
    self.step += 1
    seen = sum(p.step for p in run.players)
    noise = run.random.gauss(0, 0.06)
    compute = self.spec.step_secs * (0.4 if self.spec.paced else 0.97)
    self.log.record(
      step=self.step,
      loss=1.5 + 4 * math.exp(-seen / 150) + noise,
      tokens=run.plan.tokens_per_step,
      step_secs=compute,
      gap_secs=None if self.previous is None else now - self.previous,
      incarnation=self.incarnation,
    )
    self.previous = now
    for fragment in range(run.plan.num_fragments):
      offset = fragment * run.plan.every // run.plan.num_fragments
      if self.step % run.plan.every == offset:
        self.publish(fragment)

  def publish(self, fragment):
    first, run = self.first[fragment], self.run
    if first == self.step:
      return
    item = {
      "key": f"{fragment}.{self.number}.{self.incarnation}.{self.step}",
      "first_step": first,
      "step": self.step,
      "c_tokens": (self.step - first) * run.plan.tokens_per_step,
    }
    self.tape.record(
      events.PUBLISHED,
      fragment=fragment,
      base_version=self.base[fragment],
      bytes=40_000,
      codec="bf16",
      secs=0.01,
      trigger="schedule",
      **item,
    )
    inner = {"island": self.number, "incarnation": self.incarnation, **item}
    inner["base"] = self.base[fragment]
    self.first[fragment] = self.step
    run.waiting[fragment].append(inner)

  def adopt(self, fragment, contributed):
    lost = self.first[fragment], self.step
    if not contributed:  # carry: the progress goes on
      if self.run.random.random() < 0.5:
        return
      lost = self.step, self.step
    self.tape.record(
      events.ADOPTED,
      fragment=fragment,
      version=self.run.versions[fragment],
      step=self.step,
      mode="overwrite",
      bytes=40_000,
      secs=0.01,
      lost_from_step=lost[0],
      lost_to_step=lost[1],
    )
    if contributed:
      self.first[fragment] = self.step
    self.base[fragment] = self.run.versions[fragment]

  def die(self):
    self.alive = False
    self.tape.close()


class _Run:
  """The simulated run: a queue of moments and what happens then."""

  def __init__(self, run_dir, plan):
    self.run_dir, self.plan = pathlib.Path(run_dir), plan
    self.clock, self.random = Clock(), random.Random(plan.seed)
    self.controller = recorder.Recorder(run_dir, "controller", 1, self.clock)
    self.syncer = recorder.Recorder(run_dir, "syncer", 1, self.clock)
    self.syncer_alive = True
    self.waiting = [[] for _ in range(plan.num_fragments)]
    self.versions = [0] * plan.num_fragments
    self.players = [_Player(self, m) for m in range(len(plan.islands))]
    self.queue, self.serial = [], 0

  def control(self, event, **fields):
    self.controller.record(event, **fields)

  def at(self, delay, action, *args):
    self.serial += 1
    moment = self.clock.now + delay
    heapq.heappush(self.queue, (moment, self.serial, action, args))

  def play(self):
    plan = self.plan
    tokens = int(plan.secs * plan.tokens_per_step / plan.islands[0].step_secs)
    self.control(
      events.RUN_STARTED,
      method="decoupled_diloco",
      islands=len(plan.islands),
      total_tokens=tokens * len(plan.islands),
    )
    self.control(events.SYNCER_STARTED, pid=99)
    self.syncer.record(events.LEASE_ACQUIRED, token=1)
    for player in self.players:
      player.launch()
      self.at(1.0, self.begin, player)
    self.at(1.5, self.merge)
    self.at(plan.eval_every_secs, self.evaluate)
    for target, moment in plan.faults:
      self.at(moment, self.fault, target)
    while self.queue and self.queue[0][0] < EPOCH + plan.secs:
      self.clock.now, _, action, args = heapq.heappop(self.queue)
      action(*args)
    self.clock.now = EPOCH + plan.secs
    if plan.finish:
      self.finish()

  def begin(self, player):
    player.start()
    self.at(player.spec.step_secs, self.step, player, player.incarnation)

  def step(self, player, incarnation):
    if player.alive and player.incarnation == incarnation:
      player.train()
      jitter = 1 + abs(self.random.gauss(0, 0.03))
      delay = player.spec.step_secs * jitter
      self.at(delay, self.step, player, incarnation)

  def merge(self):
    self.at(0.2, self.merge)
    if not self.syncer_alive:
      return
    for fragment, items in enumerate(self.waiting):
      fresh = [i for i in items if self.versions[fragment] - i["base"] <= 2]
      for item in items:
        if item not in fresh:
          self.discard(fragment, item)
      if fresh:
        self.commit(fragment, fresh)
      items.clear()

  def discard(self, fragment, item):
    told = {k: v for k, v in item.items() if k != "base"}
    told["island_incarnation"] = told.pop("incarnation")
    self.syncer.record(
      events.DISCARDED, fragment=fragment, reason="too_stale", **told
    )

  def commit(self, fragment, items):
    version = self.versions[fragment]
    self.versions[fragment] += 1
    inner = []
    for item in items:
      told = {k: v for k, v in item.items() if k != "base"}
      told |= {"staleness": version - item["base"], "weight": 1.0}
      inner.append(told)
    self.syncer.record(
      events.MERGED,
      fragment=fragment,
      version=version + 1,
      contributions=inner,
      absent=[],
      bytes=80_000,
      cosine=0.3 + self.random.gauss(0, 0.05) if len(items) > 1 else None,
    )
    islands = {item["island"] for item in items}
    for player in self.players:
      if player.alive:
        player.adopt(fragment, player.number in islands)

  def evaluate(self):
    self.at(self.plan.eval_every_secs, self.evaluate)
    player = next((p for p in self.players if p.alive), None)
    if player:
      self.evaluated(player)

  def evaluated(self, player):
    loss = 1.45 + 4 * math.exp(-sum(p.step for p in self.players) / 150)
    player.tape.record(
      events.EVALUATED,
      target="global",
      step=player.step,
      loss=loss,
      tokens=8192,
      bits_per_token=loss / math.log(2),
      secs=0.1,
    )
    player.tape.record(events.CHECKPOINTED, step=player.step, secs=0.02)

  def fault(self, target):
    done = sum(p.step for p in self.players) * self.plan.tokens_per_step
    name = "syncer" if target is None else f"island-{target}"
    self.control(
      events.FAULT_INJECTED, kind="sigkill", target=name, at_tokens=done
    )
    self.clock.now += 0.05
    if target is None:
      self.syncer_alive = False
      self.syncer.close()
      self.control(events.SYNCER_DIED, cause="signal SIGKILL")
      self.at(1.5, self.syncer_back)
      return
    player = self.players[target]
    player.die()
    self.control(
      events.ISLAND_DIED,
      island=target,
      island_incarnation=player.incarnation,
      cause="signal SIGKILL",
    )
    self.control(
      events.ISLAND_RESTART, island=target, attempt=1, delay_secs=0.5
    )
    self.at(0.5, player.launch)
    self.at(self.plan.restart_secs, self.begin, player)

  def syncer_back(self):
    self.syncer = recorder.Recorder(self.run_dir, "syncer", 2, self.clock)
    self.control(events.SYNCER_STARTED, pid=98)
    self.syncer.record(events.LEASE_ACQUIRED, token=2)
    self.syncer_alive = True

  def finish(self):
    self.control(events.RUN_STOPPING, reason="token budget trained")
    living = [p for p in self.players if p.alive]
    self.evaluated(living[0])
    for player in living:
      self.clock.now += 0.05
      player.tape.record(events.STOPPED, step=player.step, reason="run ended")
    self.control(
      events.RUN_FINISHED, status="finished", reason="token budget trained"
    )


def simulate(run_dir, plan=None):
  """Writes the directory of a whole run and returns its path."""
  plan = plan or Plan()
  run_dir = pathlib.Path(run_dir)
  run_dir.mkdir(parents=True, exist_ok=True)
  slices = [
    {"kind": i.kind, "topology": "1", "relative_speed": i.relative_speed}
    for i in plan.islands
  ]
  config = {
    "name": "simulated",
    "fleet": {"slices": slices, "pace_step_secs": 0.0},
    "sync": {"num_fragments": plan.num_fragments, "every": plan.every},
  }
  content = {"format": "diloco-run-2", "config": config}
  (run_dir / "config.json").write_text(json.dumps(content))
  _Run(run_dir, plan).play()
  return run_dir
