"""Writes the record of a long run, of realistic shape and any length.

Islands with one fragment due at every step, each publication merged and
adopted, some progress given up by each adoption, a checkpoint now and then, a
death and a cut every so often. Written as text, for there are many lines.
"""

import json

from diloco.tape import recorder

EPOCH = 1_790_000_000.0
_STEP_SECS = 1.3
_TOKENS = 100


class _Tape:
  """One tape that is written as fast as can be."""

  def __init__(self, run_dir, role, incarnation=1):
    path = recorder.tape_path(run_dir, role, incarnation)
    path.parent.mkdir(parents=True, exist_ok=True)
    self._head = {"role": role, "incarnation": incarnation}
    self._file = path.open("a", buffering=1 << 20)

  def tell(self, event, wall, **fields):
    line = {"event": event, **self._head, "wall_secs": wall, **fields}
    self._file.write(json.dumps(line) + "\n")

  def close(self):
    self._file.close()


class _Island:
  def __init__(self, run, number):
    self.run, self.number, self.life, self.step = run, number, 0, 0
    self.first = [0] * run.fragments
    path = recorder.metrics_path(run.run_dir, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    self.log = path.open("a", buffering=1 << 20)

  def start(self, wall):
    self.life += 1
    self.tape = _Tape(self.run.run_dir, f"island-{self.number}", self.life)
    self.tape.tell(
      "started",
      wall,
      step=self.step,
      tokens_per_step=_TOKENS,
      unsent_from_step=self.first,
    )

  def die(self, wall):
    self.tape.close()
    told = {"island": self.number, "island_incarnation": self.life}
    self.run.control.tell("island_died", wall, cause="SIGKILL", **told)
    self.step = max(self.first)  # each fragment has it but the muted ones
    self.first = [self.step] * self.run.fragments

  def train(self, wall):
    self.step += 1
    told = {
      "step": self.step,
      "loss": 2.0,
      "tokens": _TOKENS,
      "step_secs": 1.2,
      "gap_secs": _STEP_SECS,
      "incarnation": self.life,
      "wall_secs": wall,
    }
    self.log.write(json.dumps(told) + "\n")

  def publish(self, fragment, wall):
    """Hands progress out; returns what the syncer will say of it."""
    item = {"first_step": self.first[fragment], "step": self.step}
    base = {"fragment": fragment, "base_version": self.run.versions[fragment]}
    self.tape.tell("submitted", wall, **base, **item)
    key = f"{fragment:04d}.{self.number:04d}.{self.life:04d}.{self.step:09d}"
    item["key"], steps = key, self.step - self.first[fragment]
    item["c_tokens"] = steps * _TOKENS
    told = {**base, **item, "bytes": 40_000, "codec": "bf16", "secs": 0.01}
    self.tape.tell("published", wall, trigger="schedule", **told)
    self.first[fragment] = self.step
    return {"island": self.number, "incarnation": self.life, **item}

  def adopt(self, fragment, wall):
    """As in overwrite mode: one step is given up."""
    version = self.run.versions[fragment]
    told = {"fragment": fragment, "version": version, "step": self.step}
    lost = {"lost_from_step": self.first[fragment], "lost_to_step": self.step}
    self.tape.tell("adopted", wall, bytes=40_000, secs=0.02, **told, **lost)
    self.first[fragment] = self.step


class Month:
  """A run; `write` may be called again to go on with it."""

  def __init__(self, run_dir, islands=8, fragments=4):
    self.run_dir, self.fragments = run_dir, fragments
    self.control = _Tape(run_dir, "controller")
    self.syncer = _Tape(run_dir, "syncer")
    self.versions = [0] * fragments
    self.step = 0
    started = {"method": "decoupled", "islands": islands}
    self.control.tell("run_started", EPOCH, total_tokens=10**12, **started)
    self.islands = [_Island(self, m) for m in range(islands)]
    for island in self.islands:
      island.start(EPOCH)

  def write(self, steps, deaths_every=5_000):
    """Trains each island for so many steps."""
    for _ in range(steps):
      self.step += 1
      wall = EPOCH + self.step * _STEP_SECS
      for island in self.islands:
        island.train(wall)
      fragment = self.step % self.fragments
      items = [i.publish(fragment, wall) for i in self.islands]
      if self.step > self.fragments:
        for island in self.islands:  # a version is adopted a step later
          island.adopt((self.step - 1) % self.fragments, wall)
      self._merge(fragment, items, wall)
      if not self.step % deaths_every:
        hit = self.islands[(self.step // deaths_every) % len(self.islands)]
        hit.die(wall + 0.1)
        hit.start(wall + 1.0)
      if not self.step % 1000:
        self._cut(wall)
    for file in (self.control, self.syncer, *(i.tape for i in self.islands)):
      file._file.flush()
    for island in self.islands:
      island.log.flush()

  def _merge(self, fragment, items, wall):
    self.versions[fragment] += 1
    told = {"fragment": fragment, "version": self.versions[fragment]}
    inner = [{**i, "staleness": 0, "weight": 1.0, "norm": 1.0} for i in items]
    self.syncer.tell(
      "merged", wall, contributions=inner, token=1, absent=[], **told
    )

  def _cut(self, wall):
    number = self.step // 1000
    self.control.tell("cut_completed", wall, cut=number, versions=self.versions)
    for island in self.islands:
      island.tape.tell("checkpointed", wall, step=island.step, secs=0.1)

  def close(self):
    self.control.close()
    self.syncer.close()
    for island in self.islands:
      island.tape.close()
      island.log.close()
