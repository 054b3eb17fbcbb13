"""The tape of a run written by hand, as a replay needs it."""

from diloco.replay import plan
from diloco.snapshots import keys
from diloco.tape import events, reader


class RunTape:
  """Islands with one fragment unless told otherwise."""

  def __init__(self, num_fragments=1):
    self.lines = []
    self.num_fragments = num_fragments

  def _line(self, role, event, incarnation, **fields):
    line = {"event": event, "role": role, "incarnation": incarnation}
    self.lines.append({**line, "wall_secs": float(len(self.lines)), **fields})

  def _island(self, life, event, **fields):
    self._line(f"island-{life[0]}", event, life[1], **fields)

  def start(self, life, step=0, versions=None, **fields):
    bases = versions or [0] * self.num_fragments
    told = {
      "step": step,
      "tokens_per_step": 10,
      "topology": "1",
      "cores": [0],
      "environ": {},
      "software": {},
      "total_tokens": 1000,
      "base_versions": bases,
      "base_digests": ["d0" if v == 0 else "later" for v in bases],
      "initial_by": [[0, 1] if v == 0 else None for v in bases],
      "unsent_from_step": [step] * self.num_fragments,
      "checkpoint": None,
      "peer": None,
      "answers": [[0, []]] * self.num_fragments,
    }
    self._island(life, events.STARTED, **told | fields)

  def submit(self, life, step, base=0, first=0, fragment=0):
    self._island(
      life,
      events.SUBMITTED,
      fragment=fragment,
      base_version=base,
      first_step=first,
      step=step,
    )
    return keys.contribution_name(fragment, *life, step)

  def adopt(self, life, step, version, kept_from=0, fragment=0, **fields):
    self._island(
      life,
      events.ADOPTED,
      fragment=fragment,
      version=version,
      step=step,
      kept_from_step=kept_from,
      **fields,
    )

  def save(self, life, step, serial):
    self._island(life, events.SAVING, step=step, serial=serial, cut=0)

  def island(self, life, event, **fields):
    self._island(life, event, **fields)

  def merge(self, version, *shares, fragment=0, incarnation=1, **fields):
    told = {
      "fragment": fragment,
      "version": version,
      "contributions": [_share(key, weight) for key, weight in shares],
      "digest": f"d{version}",
      "learning_rate": 1.0,
    }
    self._line("syncer", events.MERGED, incarnation, **told | fields)

  def restore(self, old, new):
    self._line(
      "controller",
      events.RESTORED,
      1,
      cut=1,
      epoch=1,
      version_from=[old],
      version_to=[new],
      reinjected=[],
    )

  def record(self):
    return reader.Record(self.lines, {}, [])

  def plan(self, heads=(), until_version=None):
    return plan.make(self.record(), heads, until_version)


def _share(key, weight):
  numbers = key.split(".") if key.count(".") == 3 else ["0", "0", "1", "8"]
  _, island, incarnation, step = map(int, numbers)
  return {
    "key": key,
    "island": island,
    "incarnation": incarnation,
    "first_step": 0,
    "step": step,
    "weight": weight,
    "norm": 1.0,
    "c_tokens": 80,
    "staleness": 0,
  }


A, B = (0, 1), (1, 1)


def two_islands():
  """Island 0 and 1 contribute to version 1; 0 alone to version 2."""
  tape = RunTape()
  tape.start(A)
  tape.start(B)
  a1 = tape.submit(A, 8)
  b1 = tape.submit(B, 4)
  tape.merge(1, (a1, 3.0), (b1, 1.0))
  tape.adopt(A, 10, 1, kept_from=8)
  tape.adopt(B, 5, 1, kept_from=4)
  a2 = tape.submit(A, 16, base=1, first=10)
  tape.merge(2, (a2, 1.0))
  return tape
