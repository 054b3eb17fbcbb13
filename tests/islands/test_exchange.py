"""What happens between two steps, with stand-ins for the threads around it."""

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic
from quadratic import FRAGMENT, anchor, held

from diloco import errors, heartbeat, workers
from diloco.islands import (
  adopter,
  comeback,
  core,
  exchange,
  peers,
  protocol,
  publisher,
  saver,
  saving,
  watching,
)
from diloco.snapshots import checkpoint, operations, records


class Thread:
  """A background thread of an island, or what is left of it."""

  def __init__(self, failure=None):
    self.failure = failure

  def check(self):
    if self.failure:
      raise workers.WorkerError(self.failure)


@pytest.mark.parametrize("dead", ["_publisher", "_saver", "_adopter"])
def test_no_step_follows_the_end_of_a_thread(dead):
  island = types.SimpleNamespace(
    _publisher=Thread(), _saver=Thread(), _adopter=Thread()
  )
  setattr(island, dead, Thread("the thread has ended: KeyError: 'w'"))
  with pytest.raises(workers.WorkerError, match="KeyError"):
    exchange.Exchange.between_steps(island)


class Saves:
  """An exchange that saves, and a saver that is told how it ends."""

  def __init__(self):
    self.core = types.SimpleNamespace(positions=(core.Position(0, 0, 0),))
    self._learner = types.SimpleNamespace(step=4)
    self._saver = self
    self._saves, self._last_save = 0, None
    self.failed = set()

  def may_count(self, serial):
    return serial not in self.failed

  def _save(self, positions, *, part):
    self._saves += 1
    self._last_save = self._learner.step, positions


def test_state_is_saved_again_only_if_its_save_failed():
  saves = Saves()
  assert exchange.Exchange.save(saves) == 1
  assert exchange.Exchange.save(saves) == 1
  saves.failed.add(1)
  assert exchange.Exchange.save(saves) == 2
  assert exchange.Exchange.save(saves) == 2
  saves._learner.step = 5
  assert exchange.Exchange.save(saves) == 3


def test_peer_is_answered_on_a_thread_of_its_own(monkeypatch):
  writing, go_on, threads = threading.Event(), threading.Event(), []

  def answer(snapshots, request, *offer):
    threads.append(threading.current_thread().name)
    writing.set()
    assert go_on.wait(20)
    raise RuntimeError("RESOURCE_EXHAUSTED")  # costs only the answer

  monkeypatch.setattr(peers, "answer", answer)
  island = types.SimpleNamespace(
    _setting=types.SimpleNamespace(
      identity=types.SimpleNamespace(island=0, incarnation=1),
      snapshots=None,
      threads=workers.Threads(),
    ),
    _learner=types.SimpleNamespace(step=9, opt_state_copy=dict),
    _answerer=None,
  )
  request = records.PeerRequest(1, 2, [3])
  exchange.Exchange.answer(island, request, [3])
  assert writing.wait(20)
  exchange.Exchange.answer(island, request, [3])  # still at the first one
  go_on.set()
  island._answerer.join()
  assert threads == ["answerer"]
  exchange.Exchange.answer(island, request, [3])
  island._answerer.join()
  assert len(threads) == 2


class Writing:
  """A saver that writes nothing, and fails or waits as it is told."""

  def __init__(self, monkeypatch, tmp_path):
    self.may_end, self.begun = threading.Event(), threading.Event()
    self.failures = []

    def save(_, job):
      return (yield operations.Compute(lambda: self.write(job)))

    monkeypatch.setattr(saver.Saver, "_save", save)
    tape = types.SimpleNamespace(record=lambda *_, **__: None)
    disk = types.SimpleNamespace(url="memory://", execute=lambda operation: [])
    who = publisher.Identity(0, 1, 10)
    self.saver = saver.Saver(
      quadratic.setting(
        run_dir=tmp_path,
        identity=who,
        snapshots=disk,
        learner=types.SimpleNamespace(plan=None),
        tape=tape,
      )
    )

  def write(self, job):
    self.begun.set()
    assert self.may_end.wait(20)
    if job.serial in self.failures:
      raise OSError("no space left on device")
    return checkpoint.Checkpoint(0, 1, job.serial, 4, 0, 0, [], {}, {}, 1)

  def job(self, serial):
    state = types.SimpleNamespace(step=4)
    return saving.Job(serial, state, (), 0, None)


def test_saver_knows_which_saves_may_still_count(monkeypatch, tmp_path):
  writing = Writing(monkeypatch, tmp_path)
  writing.failures = [1]
  for serial in (1, 2, 3):
    writing.saver.save(writing.job(serial))
    assert writing.begun.wait(20)
  assert [writing.saver.may_count(n) for n in (1, 2, 3, 4)] == [
    *(True, False, True),  # the second was pushed out by the third
    False,
  ]
  writing.may_end.set()
  assert writing.saver.wait(3, 20)
  assert [writing.saver.may_count(n) for n in (1, 2, 3)] == [False, False, True]
  writing.saver.close()


@pytest.mark.parametrize("damaged", range(4))
def test_optimizer_is_that_of_the_newest_state_that_is_sound(
  tmp_path, monkeypatch, damaged
):
  monkeypatch.setattr(checkpoint, "completed", lambda folder: [0, 1, 2])

  def restore(path, learner):
    if path < damaged and path != 1:
      raise errors.CorruptSnapshotError("torn")
    moments = [np.zeros(2), np.full(2, np.nan if path < damaged else path)]
    marker = checkpoint.Checkpoint(0, 3, path, 4, 0, 0, [], {}, {}, 1)
    return marker, types.SimpleNamespace(opt_state=moments)

  monkeypatch.setattr(exchange.checkpoints, "restore", restore)
  island = types.SimpleNamespace(
    _setting=types.SimpleNamespace(
      identity=publisher.Identity(0, 1, 10), run_dir=tmp_path
    ),
    _learner=None,
  )
  found, source = exchange.Exchange._saved_optimizer(island)
  if damaged == 3:
    assert found is source is None
  else:
    assert found[1].tolist() == [damaged, damaged]
    assert source == {"incarnation": 3, "serial": damaged, "step": 4}


def test_checkpoint_read_to_mend_an_optimizer_may_take_as_long_as_a_start():
  progress, seen = heartbeat.Progress(), []

  def saved_optimizer():
    seen.append(progress.standing)
    return None, None

  island = types.SimpleNamespace(
    _setting=types.SimpleNamespace(
      progress=progress, times=types.SimpleNamespace(start_secs=60.0)
    ),
    _learner=types.SimpleNamespace(
      optimizer_is_finite=lambda: False, mend_optimizer=lambda healthy: 3
    ),
    _tape=types.SimpleNamespace(record=lambda *_, **__: None),
    core=types.SimpleNamespace(step=9),
    _offences=1,
    _saved_optimizer=saved_optimizer,
  )
  exchange.Exchange.mend(island, [])
  ((count, extra_secs),) = seen
  assert (count, extra_secs) == (1, 60.0)
  assert progress.standing == (2, 0.0)


class Idle:
  """A thread of an exchange that never runs, and what it was told."""

  def __init__(self, log, name):
    self.log, self.name = log, name
    self.given = []

  def check(self):
    pass

  def close(self):
    self.log.append(f"{self.name} closed")

  # Publisher

  def submit(self, action, outer_grads=None):
    self.log.append(("publish", action.fragment))
    self.given.append((action, outer_grads))

  def ticket(self, positions):
    return ("ticket", positions, len(self.given))

  def flush(self, timeout_secs):
    return timeout_secs > 1

  # Saver

  def save(self, job):
    self.log.append(("save", job.serial))
    self.given.append(job)

  def may_count(self, serial):
    return True

  # Adopter

  news = adopter.News(None, [], watching.Notices())
  fetched_anew = 0

  def take(self):
    news, self.news = self.news, Idle.news
    return news

  def fetch_all_anew(self):
    self.fetched_anew += 1


class Island:
  """An exchange of a tiny trainer, without its threads."""

  def __init__(self, monkeypatch, tmp_path, **sync):
    self.log, self.tape = [], []
    self.trainer = quadratic.make_trainer(quadratic.Task(0.5), **sync)
    for module, name in ((publisher, "Publisher"), (saver, "Saver")):
      self._replace(monkeypatch, module, name)
    self._replace(monkeypatch, adopter, "Adopter")
    known = comeback.Known((0, 0), (0, 0), (0, 0))
    plan = comeback.decide(None, known, 4)
    life = types.SimpleNamespace(
      run_dir=tmp_path,
      identity=publisher.Identity(0, 1, 10),
      config=quadratic.config(**sync),
      snapshots=None,
      learner=self.trainer,
      tape=types.SimpleNamespace(record=self._record),
      times=types.SimpleNamespace(
        heartbeat_secs=1.0, start_secs=60.0, round_trip_secs=0.0
      ),
      progress=heartbeat.Progress(),
      threads=workers.Threads(),
    )
    basis = protocol.Basis(plan, protocol.Standing(0, None, 0, known, []))
    self.exchange = exchange.Exchange(life, basis, lambda: 1.0)

  def _replace(self, monkeypatch, module, name):
    thread = Idle(self.log, name.lower())
    setattr(self, name.lower(), thread)
    monkeypatch.setattr(module, name, lambda *args: thread)

  def _record(self, event, **fields):
    self.tape.append({"event": event, **fields})

  def events(self, name):
    return [e for e in self.tape if e["event"] == name]

  def step(self, count=1, **news):
    for _ in range(count):
      quadratic.step(self.trainer)
      self.hear(**news)

  def hear(self, *fetched, board=None, **notice):
    notice = watching.Notices(**notice)
    self.adopter.news = adopter.News(board, list(fetched), notice)
    self.exchange.between_steps()

  def values(self):
    return held(self.trainer.state.params)


@pytest.fixture
def make(monkeypatch, tmp_path):
  return lambda **sync: Island(monkeypatch, tmp_path, **sync)


def fetched(leaf, version, value, *, merged_step=0, cut=0):
  head = records.Head(
    *(FRAGMENT[leaf], version, 0, "", [], {"0": merged_step}, {}),
    cut=cut,
    digest=f"digest of {value}",
  )
  return adopter.Placed(head, anchor(leaf, value), 12, 0.5)


def test_what_is_due_is_published_as_what_it_learned(make):
  island = make()
  island.step(2)
  ((sent, values),) = island.publisher.given
  assert sent == core.Publish(FRAGMENT["a"], 0, 0, 2, "schedule")
  assert held(values) == {"a": -quadratic.moved(0, 2, 0.5)[0]}
  (told,) = island.events("submitted")
  assert told == {
    "event": "submitted",
    "fragment": FRAGMENT["a"],
    "base_version": 0,
    "first_step": 0,
    "step": 2,
  }
  assert island.exchange.core.in_flight == [FRAGMENT["a"]]
  island.step(2)
  fragments = [action.fragment for action, _ in island.publisher.given]
  assert fragments == [FRAGMENT["a"], FRAGMENT["b"]]
  assert island.exchange.core.step == 4


def test_open_round_is_followed(make):
  island = make()
  board = records.Board([0, 0], {str(FRAGMENT["b"]): [3]})
  island.step(board=board)
  ((sent, _),) = island.publisher.given
  assert sent == core.Publish(FRAGMENT["b"], 0, 0, 1, "follow")


def test_version_at_hand_is_adopted_and_told(make):
  island = make(adoption="overwrite")
  island.step(3)
  island.hear(fetched("a", 1, 7.0, merged_step=2))
  assert island.values()["a"] == 7
  (told,) = island.events("adopted")
  assert told == {
    "event": "adopted",
    "step": 3,
    "mode": "overwrite",
    "bytes": 12,
    "secs": 0.5,
    "kept_from_step": 2,
    "fragment": FRAGMENT["a"],
    "version": 1,
    "digest": "digest of 7.0",
    "lost_from_step": 2,
    "lost_to_step": 3,
  }
  assert island.exchange.core.positions[FRAGMENT["a"]].base == 1
  assert island.exchange.core.in_flight == []
  island.hear(fetched("a", 1, 9.0))  # not newer
  assert island.values()["a"] == 7 and not island.exchange.at_hand


def test_version_ahead_of_the_island_mutes_the_fragment_and_says_so(make):
  island = make(adoption="carry")
  island.step(3)
  island.hear(fetched("a", 1, 7.0, merged_step=8))
  (told,) = island.events("adopted")
  assert told["muted_until"] == 8 and island.values()["a"] == 7
  island.step(6)
  learned = island.values()["a"] - 7
  island.hear(fetched("a", 2, 20.0, merged_step=8))
  assert island.values()["a"] == 20 + learned
  assert "muted_until" not in island.events("adopted")[-1]


def test_version_that_came_after_a_cut_waits_for_the_islands_part(make):
  island = make(adoption="overwrite")
  island.step(3)
  before = island.values()
  island.log.clear()
  island.hear(fetched("a", 1, 7.0, merged_step=2, cut=5))
  (job,) = island.saver.given
  assert (job.serial, job.cut, job.part) == (1, 5, True)
  assert held(job.snapshot.progress.params) == before
  assert job.positions[FRAGMENT["a"]] == core.Position(0, 0, 2)
  assert job.ticket == ("ticket", job.positions, 1)
  assert island.values()["a"] == 7
  assert [e["event"] for e in island.tape[-2:]] == ["saving", "adopted"]
  assert island.events("saving") == [
    {"event": "saving", "step": 3, "serial": 1, "cut": 5}
  ]


def test_part_of_a_cut_is_taken_once_and_before_what_is_published(make):
  island = make()
  island.step()
  island.step(cut=2)  # fragment a is due as well
  assert island.log == [("save", 1), ("publish", FRAGMENT["a"])]
  ((sent, _),) = island.publisher.given
  assert sent.cut == 2
  for _ in range(3):
    island.hear(cut=2)
  assert len(island.saver.given) == 1
  island.hear(cut=3)
  assert [j.cut for j in island.saver.given] == [2, 3]


def test_plain_save_has_the_last_cut_and_is_no_part(make):
  island = make()
  island.step(cut=2)
  island.step()
  assert island.exchange.save() == 2
  job = island.saver.given[-1]
  assert (job.cut, job.part) == (2, False)
  assert island.events("saving")[-1]["cut"] == 0
  assert island.exchange.save() == 2
  assert len(island.saver.given) == 2


def poison(island):
  """Nothing of the island is finite any more, nor of what is at hand."""
  for fragment in FRAGMENT.values():
    island.trainer.swap.poison(island.trainer.params, fragment)
  bad = jax.tree.map(lambda x: x * jnp.nan, island.trainer.state.opt_state)
  island.trainer.state = island.trainer.state._replace(opt_state=bad)


def test_island_that_is_told_of_an_offence_begins_again_with_all_fragments(
  make,
):
  island = make(adoption="carry")
  island.step(2)
  poison(island)
  island.hear(fetched("a", 1, 3.0), offences=2)
  assert island.adopter.fetched_anew == 1
  assert np.isnan(np.asarray(island.trainer.state.params["a"])).all()
  island.hear(fetched("a", 1, 3.0))
  island.step(4)  # publishes nothing meanwhile
  assert len(island.publisher.given) == 1
  assert not island.events("resynced")
  island.hear(fetched("b", 0, 4.0))
  assert island.values() == {"a": 3, "b": 4}
  assert island.events("adopted") == []
  (told,) = island.events("resynced")
  assert (told["step"], told["offences"]) == (6, 2)
  assert {f["fragment"]: f["version"] for f in told["fragments"]} == {
    FRAGMENT["a"]: 1,
    FRAGMENT["b"]: 0,
  }
  assert (told["replaced"], told["checkpoint"]) == (2, None)
  assert island.trainer.optimizer_is_finite()
  island.step(2)
  assert len(island.publisher.given) > 1


def test_sound_optimizer_is_left_alone_by_a_resync(make):
  island = make()
  island.step(2)
  island.hear(offences=1)
  island.hear()
  island.hear(fetched("a", 1, 3.0), fetched("b", 1, 4.0))
  (told,) = island.events("resynced")
  assert told["replaced"] == 0
  island.step()
  # x is 3, and the momentum of two steps is 2.5.
  assert island.values()["a"] == 3 - 0.5 * (0.5 * 2.5 + 3)


def test_resync_keeps_what_comes_first_though_it_is_no_newer(make):
  island = make()
  island.step(2)
  island.hear(offences=1)
  island.hear(fetched("a", 0, 3.0))
  assert not island.events("resynced")
  island.hear(fetched("b", 0, 4.0))
  assert len(island.events("resynced")) == 1
  assert island.values() == {"a": 3.0, "b": 4.0}


@pytest.mark.parametrize(
  ("asked", "answered"), [([0, 0], True), ([1, 0], False), ([0], False)]
)
def test_call_is_answered_by_who_has_seen_the_versions(
  make, monkeypatch, asked, answered
):
  offers = []
  monkeypatch.setattr(
    peers, "answer", lambda store, request, *offer: offers.append(offer)
  )
  island = make()
  island.step(2)
  island.hear(request=records.PeerRequest(1, 1, asked))
  if island.exchange._answerer is not None:
    island.exchange._answerer.join()
  assert len(offers) == answered
  for who, step, versions, opt_state in offers:
    assert (who.island, who.incarnation, step) == (0, 1, 2)
    assert versions == [0, 0]
    leaves = [x for x in jax.tree.leaves(opt_state) if x.ndim]
    assert {float(x[0]) for x in leaves} == {2.5}


def test_island_that_was_refused_offers_its_optimizer_to_nobody(
  make, monkeypatch
):
  offers = []
  monkeypatch.setattr(
    peers, "answer", lambda store, request, *offer: offers.append(offer)
  )
  island = make()
  island.step(1)
  island.hear(offences=1, request=records.PeerRequest(1, 1, [0, 0]))
  assert island.exchange.core.resyncing
  assert island.exchange._answerer is None and not offers


def test_drain_publishes_what_is_left_of_every_fragment(make):
  island = make()
  island.step(3)
  island.exchange.publish_all()
  found = [(p.fragment, p.step) for p, _ in island.publisher.given]
  assert found == [(1, 2), (0, 3), (1, 3)]
  assert island.publisher.given[-1][0].trigger == "drain"
  island.exchange.publish_all()
  assert len(island.publisher.given) == 3
  assert island.exchange.flush(2.0) and not island.exchange.flush(0.5)


def test_publisher_ends_before_the_saver_that_waits_for_it(make):
  island = make()
  island.exchange.close()
  assert island.log == ["adopter closed", "publisher closed", "saver closed"]
