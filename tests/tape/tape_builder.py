"""Builds the record of a run by hand, line by line, in memory."""

import collections

from diloco.tape import events, reader

TOKENS_PER_STEP = 10


class Tapes:
  """Lines as the roles would write them; steps are ranges (first, step]."""

  def __init__(self):
    self.lines = []
    self.metrics = collections.defaultdict(list)
    self._incarnation = collections.Counter()
    self._serial = 0

  def _line(self, role, event, incarnation, **fields):
    line = {"event": event, "role": role, "incarnation": incarnation}
    self.lines.append({**line, "wall_secs": float(len(self.lines)), **fields})

  def _island(self, island, event, **fields):
    incarnation = self._incarnation[island]
    self._line(f"island-{island}", event, incarnation, **fields)

  def start(self, island=0, step=0, **fields):
    self._incarnation[island] += 1
    fields = {"tokens_per_step": TOKENS_PER_STEP, **fields}
    self._island(island, events.STARTED, step=step, **fields)

  def train(self, first, last, island=0, incarnation=None):
    for step in range(first + 1, last + 1):
      line = {"step": step, "tokens": TOKENS_PER_STEP, "wall_secs": 0.0}
      line["incarnation"] = incarnation or self._incarnation[island]
      self.metrics[island].append(line)

  def contribution(self, first, step, island=0, fragment=0, **fields):
    self._serial += 1
    return {
      "key": f"key-{self._serial}",
      "island": island,
      "incarnation": self._incarnation[island],
      "fragment": fragment,
      "first_step": first,
      "step": step,
      "c_tokens": (step - first) * TOKENS_PER_STEP,
      **fields,
    }

  def submit(self, first, step, island=0, fragment=0):
    fields = {"fragment": fragment, "first_step": first, "step": step}
    self._island(island, events.SUBMITTED, **fields)

  def publish(self, first, step, island=0, fragment=0):
    item = self.contribution(first, step, island, fragment)
    told = {k: item[k] for k in ("key", "first_step", "step", "c_tokens")}
    self._island(island, events.PUBLISHED, fragment=fragment, **told)
    return item

  def merge(self, version, *items):
    fragment = items[0]["fragment"]
    inner = [
      {k: v for k, v in item.items() if k != "fragment"} for item in items
    ]
    self._line(
      "syncer",
      events.MERGED,
      1,
      fragment=fragment,
      version=version,
      contributions=inner,
    )

  def discard(self, item, reason):
    told = dict(item)
    told["island_incarnation"] = told.pop("incarnation")
    self._line("syncer", events.DISCARDED, 1, reason=reason, **told)

  def adopt(self, lost_from, lost_to, island=0, fragment=0, **fields):
    self._island(
      island,
      events.ADOPTED,
      fragment=fragment,
      lost_from_step=lost_from,
      lost_to_step=lost_to,
      **fields,
    )

  def resync(self, step, *fragments, island=0):
    self._island(
      island, events.RESYNCED, step=step, offences=1, fragments=fragments
    )

  def restore(self, version_from, version_to, reinjected=(), **fields):
    fields = {"cut": 1, "epoch": 1, **fields}
    self._line(
      "controller",
      events.RESTORED,
      1,
      version_from=version_from,
      version_to=version_to,
      reinjected=list(reinjected),
      **fields,
    )

  def drop(self, first, step, island=0, fragment=0):
    self._island(
      island,
      events.PUBLISH_DROPPED,
      fragment=fragment,
      first_step=first,
      step=step,
      reason="queue_full",
    )

  def die(self, island=0):
    self._line(
      "controller",
      events.ISLAND_DIED,
      1,
      island=island,
      island_incarnation=self._incarnation[island],
      cause="killed",
    )

  def stop(self, step, island=0):
    self._island(island, events.STOPPED, step=step, reason="done")

  def record(self):
    return reader.Record(self.lines, dict(self.metrics), [])
