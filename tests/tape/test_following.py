"""A history that follows the tapes, and is kept now and then, equals a reading.

The tapes are those of the ledger's model. A follower sees them in pieces, each
of which ends for every role at another moment.
"""

import collections
import json
import random

import pytest
import test_ledger_model as model_lib

from diloco.report import totals
from diloco.tape import folding, history, ledger, reader

_STEPS = 250


class Run:
  """A random history, and how long each file was after each of its moments."""

  def __init__(self, seed, more):
    self.rng = random.Random(seed)
    self.model = model_lib.Model()
    self.lengths = [self._lengths()]
    names = [*model_lib._NAMES, *more]
    while len(self.lengths) < _STEPS:
      name, island = self.rng.choice(names), self.rng.randrange(2)
      if name == "kill" and not self.model.alive[island]:
        continue
      fragment, number = self.rng.randrange(3), self.rng.randint(1, 5)
      flag = self.rng.random() < 0.5
      getattr(self.model, name)(island, fragment, number, flag)
      self.lengths.append(self._lengths())

  def _files(self):
    tapes = self.model.tapes
    files = collections.defaultdict(list)
    for line in tapes.lines:
      files[line["role"]].append(line)
    return files | tapes.metrics

  def _lengths(self):
    return {name: len(lines) for name, lines in self._files().items()}

  def pieces(self, number):
    """Yields what polls return, and all files as they were read by then."""
    files = self._files()
    read = dict.fromkeys(files, 0)
    moments = sorted(self.rng.sample(range(_STEPS), number))
    for moment in [*moments, _STEPS]:
      piece, whole = {}, {}
      for name, lines in files.items():
        at = min(moment + self.rng.randint(0, 3), _STEPS - 1)
        end = max(read[name], self.lengths[at].get(name, 0))
        if moment == _STEPS:
          end = len(lines)
        piece[name], read[name] = lines[read[name] : end], end
        whole[name] = lines[:end]
      yield _record(piece), _record(whole)


def _record(files):
  logs = {name: lines for name, lines in files.items() if isinstance(name, int)}
  tapes = [lines for name, lines in files.items() if name not in logs]
  return reader.Record(list(reader.interleave(tapes)), logs, [])


def _kept(past):
  """A history as it comes back from a file."""
  return totals._decoded(json.loads(json.dumps(totals._encoded(past))))


def _facts(book):
  """What a ledger says, however much of it is summed up."""
  rows = collections.Counter(book.folded_rows)
  for fragments in book.rows.values():
    for spans_by_fate in fragments:
      for fate, spans in spans_by_fate.items():
        rows[fate] += sum(last - first for first, last in spans)
  lost = {
    island: collections.Counter(
      (span.incarnation, row)
      for span in spans
      for row in range(span.first, span.last)
    )
    for island, spans in book.lost_spans.items()
  }
  counts = book.merged, book.pending, book.discarded, book.unaccounted
  told = sorted(book.violations), sorted(book.silent)
  return counts, book.islands, lost, +rows, told


@pytest.mark.parametrize("more", [[], ["cut", "restore"]])
def test_history_that_follows_equals_one_that_reads_all(more, monkeypatch):
  monkeypatch.setattr(folding, "_AGAIN", 1.0)
  monkeypatch.setattr(history, "_WAITING", 1)
  reopened = polls = summed_up = 0
  for seed in range(25):
    run, past = Run(seed, more), history.History()
    for piece, whole in run.pieces(12):
      monkeypatch.setattr(folding, "LIMIT", 6)
      for line, island in reader.together(piece):
        past.take(line, island)
      polls += 1
      if past.reopened:
        reopened += 1
        past = history.read(whole)
      past = _kept(past)
      book = ledger.balance(past, 3, every=4)
      monkeypatch.setattr(folding, "LIMIT", 1 << 30)
      assert _facts(book) == _facts(ledger.compute(whole, 3, every=4)), seed
      summed_up += sum(book.folded_rows.values())
  assert summed_up > 1000
  assert 0 < reopened < polls / 10


def test_history_is_reopened_by_what_was_summed_up():
  """Each of these reaches below what is settled."""
  tapes = model_lib.Tapes()
  tapes.start()
  tapes.train(0, 4000)
  items = [tapes.publish(n, n + 2) for n in range(0, 4000, 2)]
  for version, item in enumerate(items, 1):
    tapes.merge(version, item)
  begun = len(tapes.lines)
  tapes.start(step=40)
  tapes.start(step=4000, unsent_from_step=[40])
  tapes.publish(40, 44)
  tapes.submit(40, 44)
  tapes.discard({**items[20], "key": "unknown"}, "passed_over")
  tapes.merge(9000, {**items[20], "key": "another"})
  tapes.restore([30], [9001])
  tapes.merge(3, tapes.contribution(4000, 4002))  # older than all known
  for line in tapes.lines[begun:]:
    past = history.History()
    for each, island in reader.together(_record({"a": tapes.lines[:begun]})):
      past.take(each, island)
    assert not past.reopened
    past.take(line)
    assert past.reopened, line


def test_progress_that_a_later_life_restores_is_not_summed_up(monkeypatch):
  tapes = model_lib.Tapes()
  tapes.start()
  for version, first in enumerate([*range(0, 400, 2), *range(402, 2000, 2)]):
    tapes.merge(version + 1, tapes.publish(first, first + 2))
    if first == 398:
      tapes.adopt(400, 402)  # this life gives it up, and the next one has it
  tapes.start(step=2000, unsent_from_step=[100])
  book = ledger.compute(tapes.record())
  assert book.folded_rows == {"merged": 100} and book.pending == 20
  monkeypatch.setattr(folding, "LIMIT", 1 << 30)
  assert _facts(book) == _facts(ledger.compute(tapes.record()))


def test_fragment_keeps_its_own_keys_that_wait_until_they_are_summed_up():
  tapes = model_lib.Tapes()
  tapes.start()
  tapes.start(island=1)
  waiting = [tapes.publish(0, 2, island=n, fragment=n) for n in range(2)]
  for version, item in zip((2, 3), waiting, strict=True):
    tapes.merge(version, item)
  late = tapes.publish(2, 4)
  tapes.restore([1] * 2, [9] * 2, [item["key"] for item in (*waiting, late)])
  tapes.merge(4, late)  # told late
  past = history.History()
  for line in tapes.lines:
    past.take(line)
  own = {at: facts.reinjected for at, facts in past.fragments.items()}
  keys = [item["key"] for item in waiting]
  assert own == {(0, 0): {keys[0], late["key"]}, (1, 1): {keys[1]}}
  past.fragments[0, 0].keep_above(2, past.lives_of(0))
  assert past.fragments[0, 0].reinjected == {late["key"]}


def test_rows_wait_for_the_last_cuts_that_a_run_can_be_set_back_to():
  past = history.History()
  for number, cut, kept in [
    *((1, None, [1]), (2, None, [1, 2]), (3, None, [2, 3])),
    *((None, 2, [2]), (4, None, [2, 4]), (5, None, [4, 5])),
    (None, None, [4, 5]),  # told by an earlier version: to one unknown
  ]:
    tapes = model_lib.Tapes()
    if number:
      tapes._line(
        "controller", "cut_completed", 1, cut=number, versions=[number]
      )
    else:
      tapes.restore([0], [9 + (cut or 0)])
      tapes.lines[0]["cut"] = cut
    past.take(tapes.lines[0])
    assert past._cuts == {n: [n] for n in kept}


def test_keys_that_a_return_put_back_are_let_go_of_once_they_are_summed_up():
  tapes = model_lib.Tapes()
  tapes.start()
  back, last = [], 0
  for number in range(2000):
    item = tapes.publish(2 * number, 2 * number + 2)
    last += 1
    tapes.merge(last, item)
    if number % 100 == 99:  # goes back by one version, whose part waits again
      tapes.restore([last - 1], [last + 1], [item["key"]])
      back.append(item["key"])
      last += 2
      tapes.merge(last, item)
  past = history.History()
  for line in tapes.lines:
    past.take(line)
  assert not past.reopened and not past.violations
  facts = past.fragments[0, 0]
  assert facts.folded.row > 3000
  assert past._reinjected == {key for key in back if key in facts.keys}
  assert len(past._reinjected) < len(back) / 2


def test_life_that_logged_more_than_its_tape_tells_reopens_the_history():
  tapes = model_lib.Tapes()
  tapes.start()
  items = [tapes.publish(0, 2)]
  tapes.start(step=2)
  items += [tapes.publish(n, n + 2) for n in range(2, 4000, 2)]
  for version, item in enumerate(items, 1):
    tapes.merge(version, item)
  past = history.History()
  for line in tapes.lines:
    past.take(line)
  past.take({"incarnation": 1, "step": 2}, 0)
  past.take({"incarnation": 2, "step": 5000}, 0)
  assert not past.reopened
  past.take({"incarnation": 1, "step": 9}, 0)
  assert past.reopened
