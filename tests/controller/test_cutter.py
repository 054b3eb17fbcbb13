import dataclasses
import itertools
import os
import types

import pytest
from cut_builder import ISLANDS, PLAN, CutRun, spoil

from diloco import channel, errors, process
from diloco import config as config_lib
from diloco.controller import cut_command, cutter
from diloco.report import liveness
from diloco.snapshots import cuts, keys, records, restore, store
from diloco.tape import reader, recorder

SETTINGS = cutter.Settings(
  every_secs=300.0,
  limit_secs=60.0,
  patience_secs=60.0,
  islands=2,
  num_fragments=2,
)
LIVES = {0: 1, 1: 1}


class Session:
  """A cutter, its store and its tape."""

  def __init__(self, tmp_path, run=None, number=1, **settings):
    self.dir = tmp_path
    self.run = run or CutRun(tmp_path)
    (tmp_path / "control").mkdir(exist_ok=True)
    self.tape = recorder.Recorder(tmp_path, "controller", number)
    self.cutter = cutter.Cutter(
      dataclasses.replace(SETTINGS, **settings),
      self.tape.record,
      cutter.wish_path(tmp_path),
      lambda cut: cutter.end_line(tmp_path, cut) is not None,
    )

  def look(self, now, lives):
    self.run.store.perform(self.cutter.look(now, lives))

  def close(self):
    self.run.store.perform(self.cutter.close())

  def wish(self):
    cutter.wish_path(self.dir).touch()

  def take_parts(self, cut, islands=ISLANDS):
    heads = self.run.heads()
    for island in islands:
      self.run.save(cut, island, 16, [[h.version, 0, 16] for h in heads])
    fields = [dataclasses.asdict(h) for h in heads]
    self.run.perform(cuts.add_heads(records.CutHeads(cut, 0, 1, fields)))
    if set(islands) == set(ISLANDS):
      self.run.store.write(
        keys.cut_channel_key(cut), records.CutChannel(cut, 1, [])
      )

  def events(self):
    found = reader.read(self.dir).events
    return [(e["event"], e.get("reason", "")) for e in found]

  def asked(self):
    return self.run.perform(cuts.numbers())


def begun(tmp_path):
  """A session that has asked both islands for the cut somebody wished."""
  session = Session(tmp_path)
  session.wish()
  session.look(0.0, LIVES)
  return session


def test_damaged_line_of_a_cut_tells_nothing(tmp_path):
  session = Session(tmp_path)
  session.tape.record("cut_requested", cut=1, islands=ISLANDS)
  session.tape.record("cut_completed", cut=1, secs=1.0, islands={})
  session.tape.record("cut_requested", cut=None, islands=ISLANDS)
  assert cutter.end_line(tmp_path, 1)["event"] == "cut_completed"


@pytest.mark.parametrize(
  ("told", "found"),
  [
    ([], None),
    ([("requested", 2), ("completed", 2)], "completed"),
    ([("requested", 2), ("abandoned", 2)], "abandoned"),
    ([("requested", 2)], None),
    # That of the cut before is no word on this one, nor of one after it.
    ([("completed", 1), ("requested", 2)], None),
    ([("requested", 2), ("requested", 3), ("completed", 3)], None),
    ([("completed", 2), ("requested", 3), ("abandoned", 3)], "completed"),
    # Told by who has taken it up, before its next one is asked for.
    ([("requested", 1), ("completed", 2), ("requested", 3)], "completed"),
    # Nothing is told of a cut before it was asked for.
    ([("completed", 2), ("requested", 2)], None),
    ([("completed", 2), ("requested", 1)], None),
  ],
)
def test_end_of_a_cut_is_what_was_told_since_it_was_asked_for(
  tmp_path, told, found
):
  tape = recorder.Recorder(tmp_path, "controller", 1)
  for event, cut in told:
    tape.record(f"cut_{event}", cut=cut)
  tape.close()
  line = cutter.end_line(tmp_path, 2)
  assert (line and line["event"]) == (found and f"cut_{found}")


@pytest.mark.parametrize("planned", [False, True])
def test_cutter_of_a_run_goes_by_its_configuration(tmp_path, planned):
  config = config_lib.from_mapping(
    {
      "fleet": {"slices": [{}] * 3},
      "programs": {"cut_every_secs": 77.0},
      "sync": {"num_fragments": 5, "every": 10},
    }
  )
  run = CutRun(tmp_path)
  if not planned:
    run.store.delete("plan")
  (tmp_path / "control").mkdir()
  tape = recorder.Recorder(tmp_path, "controller", 1)
  made = cutter.of_run(config, run.store, tmp_path, tape, token=4)
  patience_secs = config.controller.patience_secs
  num_params = PLAN.num_params if planned else 0
  assert made._settings == cutter.Settings(
    *(77.0, cutter.limit_secs(patience_secs, num_params), patience_secs, 3, 5)
  )
  # It takes wishes up, tells the tape, and asks it what was told before.
  cutter.wish_path(tmp_path).touch()
  run.store.perform(made.look(0.0, {0: 1}))
  run.store.perform(made.close())
  assert [e["event"] for e in reader.read(tmp_path).events] == [
    "cut_requested",
    "cut_abandoned",
  ]
  assert made._is_told(1) and not made._is_told(2)
  # What it writes is fenced by its controller's token.
  run.store.write(keys.CONTROLLER_LEASE, records.Lease("another", 5, 0))
  cutter.wish_path(tmp_path).touch()
  with pytest.raises(errors.FencedError):
    run.store.perform(made.look(9.0, {0: 1}))


def test_cuts_are_asked_for_at_intervals_and_completed(tmp_path):
  session = Session(tmp_path)
  session.look(0.0, {})  # the first interval begins with training
  session.look(100.0, LIVES)
  session.look(399.0, LIVES)
  assert session.asked() == []
  session.look(400.0, LIVES)
  assert session.asked() == [1]
  session.look(401.0, LIVES)
  session.take_parts(1)
  session.look(402.0, LIVES)
  assert session.run.perform(restore.verified(1)).request.islands == [0, 1]
  (completed,) = [
    e for e in reader.read(tmp_path).events if e["event"] == "cut_completed"
  ]
  assert completed["secs"] == 2.0 and completed["versions"] == [0, 0]
  assert completed["islands"] == {"0": 16, "1": 16}
  session.look(699.0, LIVES)
  assert session.asked() == [1]
  session.look(701.0, LIVES)
  assert session.asked() == [1, 2]


def test_wish_is_granted_at_once_and_once(tmp_path):
  session = Session(tmp_path, every_secs=0.0)
  session.look(0.0, LIVES)
  assert session.asked() == []
  session.wish()
  session.look(2.0, {1: 3})
  assert not cutter.wish_path(tmp_path).exists()
  session.wish()  # while one is open
  session.take_parts(1, islands=[1])
  session.run.store.write(keys.cut_channel_key(1), records.CutChannel(1, 1, []))
  session.look(3.0, {1: 3})
  assert session.run.perform(cuts.look(1)).is_complete
  session.look(5.0, LIVES)
  assert session.asked() == [1, 2]


def test_wish_that_comes_while_a_cut_is_asked_for_gets_its_own(
  tmp_path, monkeypatch
):
  session = Session(tmp_path, every_secs=0.0)
  request = cuts.request

  def ask(*args):
    session.wish()
    return request(*args)

  monkeypatch.setattr(cuts, "request", ask)
  session.wish()
  session.look(0.0, LIVES)
  monkeypatch.undo()
  session.take_parts(1)
  session.look(1.0, LIVES)
  session.look(3.0, LIVES)
  assert session.asked() == [1, 2]


def test_due_cut_waits_for_an_island_that_is_restarted_but_not_for_ever(
  tmp_path,
):
  session = Session(tmp_path)
  session.look(0.0, LIVES)
  session.look(301.0, {0: 1})
  assert session.asked() == []
  session.look(361.0, {0: 1})
  asked = session.run.store.read(keys.cut_request_key(1), records.CutRequest)
  assert asked.islands == [0]


@pytest.mark.parametrize("lives", [{0: 1}, {0: 1, 1: 2}])
def test_cut_is_given_up_when_an_island_dies_before_its_part(tmp_path, lives):
  session = begun(tmp_path)
  session.take_parts(1, islands=[0])
  session.look(1.0, lives)
  assert session.events()[-1] == (
    "cut_abandoned",
    "island 1 died before it took its part",
  )
  assert not session.run.perform(cuts.look(1)).is_open


def test_island_may_die_after_its_part(tmp_path):
  session = begun(tmp_path)
  session.take_parts(1)
  session.look(1.0, {0: 1})
  assert session.events()[-1][0] == "cut_completed"


def test_late_cut_is_given_up_and_says_who_was_missing(tmp_path):
  session = begun(tmp_path)
  session.take_parts(1, islands=[1])
  session.look(59.0, LIVES)
  assert session.run.perform(cuts.look(1)).is_open
  session.look(60.0, LIVES)
  assert session.events()[-1] == (
    "cut_abandoned",
    "no part of island 0, the syncer in time",
  )


def test_parts_that_do_not_fit_are_never_complete(tmp_path):
  session = begun(tmp_path)
  session.take_parts(1)
  session.run.store.write(keys.cut_channel_key(1), records.CutChannel(1, 2, []))
  session.look(1.0, LIVES)
  assert session.events()[-1] == (
    "cut_abandoned",
    "heads and channel are of two syncers",
  )


def test_cut_that_the_syncer_gave_up_keeps_its_reason(tmp_path):
  session = begun(tmp_path)
  session.run.perform(cuts.abandon(1, "a reason"))
  session.look(1.0, LIVES)
  assert session.events()[-1] == ("cut_abandoned", "a reason")


def test_next_controller_finishes_a_cut(tmp_path):
  first = begun(tmp_path)
  second = Session(tmp_path, first.run, number=2)
  second.look(10.0, LIVES)
  second.take_parts(1)
  second.look(11.0, LIVES)
  assert second.run.perform(cuts.look(1)).is_complete
  assert second.events()[-1][0] == "cut_completed"


@pytest.mark.parametrize("end", ["cut_completed", "cut_abandoned"])
def test_cut_that_has_ended_is_not_taken_up(tmp_path, end):
  first = begun(tmp_path)
  if end == "cut_completed":
    first.take_parts(1)
    first.look(1.0, LIVES)
  else:
    first.close()
  second = Session(tmp_path, first.run, number=2)
  second.look(10.0, LIVES)
  second.look(12.0, LIVES)
  assert [name for name, _ in second.events()] == ["cut_requested", end]


@pytest.mark.parametrize("end", ["cut_completed", "cut_abandoned"])
def test_end_of_a_cut_that_no_tape_tells_is_told_by_the_next_controller(
  tmp_path, monkeypatch, end
):
  """The first dies after the cut's last record and before its line."""
  first = begun(tmp_path)
  with monkeypatch.context() as patched:
    patched.setattr(first.cutter, "_record", lambda *_, **__: None)
    if end == "cut_completed":
      first.take_parts(1)
      first.look(1.0, LIVES)
    else:
      first.close()
  for number in (2, 3):
    later = Session(tmp_path, first.run, number=number)
    later.look(10.0 * number, LIVES)
    later.look(10.0 * number + 2, LIVES)
    assert [name for name, _ in later.events()] == ["cut_requested", end]


def test_cut_that_was_given_up_when_it_was_complete_is_told_as_given_up(
  tmp_path,
):
  session = begun(tmp_path)
  session.take_parts(1)
  session.run.store.write(
    keys.cut_abandoned_key(1), records.CutAbandoned(1, "late")
  )
  session.run.store.write(
    keys.cut_complete_key(1), records.CutComplete(1, 0, {keys.REQUEST: 1})
  )
  session.look(1.0, LIVES)
  assert session.events()[-1] == ("cut_abandoned", "late")


def test_end_of_a_session_ends_its_cut(tmp_path):
  session = begun(tmp_path)
  session.close()
  assert session.events()[-1] == ("cut_abandoned", "the session ended")
  session.close()
  assert len(session.events()) == 2


def test_store_out_of_reach_disturbs_nobody(tmp_path, monkeypatch):
  session = Session(tmp_path)
  session.wish()

  def fail(*args):
    raise OSError("no store")

  with monkeypatch.context() as broken:
    broken.setattr(session.run.store, "names", fail)
    session.look(0.0, LIVES)
  assert session.asked() == []
  session.look(10.0, LIVES)
  session.look(20.0, LIVES)
  assert session.asked() == [1]


@pytest.mark.parametrize(
  ("state", "secs"), [("idle", 1.0), ("open", 0.2), ("failed", 5.0)]
)
def test_store_is_looked_at_so_often(tmp_path, monkeypatch, state, secs):
  session, asked = Session(tmp_path, every_secs=0.0), []
  if state != "idle":
    session.wish()
  execute, fails = session.run.store.execute, state == "failed"

  def count(operation):
    asked.append(operation)
    if fails:
      raise OSError("no store")
    return execute(operation)

  monkeypatch.setattr(session.run.store, "execute", count)
  session.look(7.0, LIVES)
  assert asked
  session.wish()
  before, fails = len(asked), False
  session.look(7.0 + secs - 0.01, LIVES)
  assert len(asked) == before
  session.look(7.0 + secs + 0.01, LIVES)
  assert len(asked) > before


def test_cut_whose_end_cannot_be_written_keeps_no_later_one_away(tmp_path):
  session = begun(tmp_path)
  spoil(session.run, keys.cut_request_key(1))
  session.wish()
  session.look(50.0, LIVES)  # it may be the store for a moment
  assert session.asked() == [1]
  for now in (60.0, 70.0):
    session.look(now, LIVES)
  assert session.asked() == [1, 2]


def test_wish_that_the_store_refuses_is_granted_later(tmp_path, monkeypatch):
  session = Session(tmp_path, every_secs=0.0)
  session.look(0.0, LIVES)
  session.wish()

  def fail(*args):
    raise OSError("no store")

  with monkeypatch.context() as broken:
    broken.setattr(session.run.store, "compare_and_set", fail)
    session.look(2.0, LIVES)
  assert session.asked() == []
  session.look(10.0, LIVES)
  assert session.asked() == [1]
  session.take_parts(1)
  for now in (11.0, 20.0, 30.0):
    session.look(now, LIVES)
  assert session.asked() == [1]  # it was one wish


def test_next_controller_asks_for_cuts_though_the_last_request_is_damaged(
  tmp_path,
):
  run = CutRun(tmp_path)
  run.take_cut()
  spoil(run, keys.cut_request_key(1))
  session = Session(tmp_path, run, number=2)
  session.wish()
  for now in (0.0, 10.0):
    session.look(now, LIVES)
  assert session.asked() == [1, 2]


def test_cut_of_a_large_model_may_take_the_time_its_states_need():
  assert cutter.limit_secs(60.0, 1_000_000) == pytest.approx(60, abs=3)
  # 12 B parameters with two moments are 144 GB, at 100 MB/s 24 minutes.
  assert cutter.limit_secs(60.0, 12_000_000_000) > 1440


@pytest.fixture
def commanded(tmp_path, monkeypatch):
  """A session with a cut, and a command that sees what follows each look."""
  run = CutRun(tmp_path, process.store_url(tmp_path))
  session = Session(tmp_path, run)
  run.take_cut()
  server, pid = channel.Server(0), os.getpid()
  address = {"pid": pid, "started_ticks": liveness.start_ticks(pid)}
  address["directory"] = process.directory_id(tmp_path)
  server.announce(tmp_path, address)
  told = []

  def command(*follows):
    next_one = iter(follows)
    waits = itertools.count()
    clock = types.SimpleNamespace(
      monotonic=lambda: 10.0 * next(waits), sleep=lambda secs: next(next_one)()
    )
    monkeypatch.setattr(cut_command, "time", clock)
    facts = cut_command.run(tmp_path, 60.0, told.append)
    return facts["cut"], facts["status"], facts["reason"]

  yield session, command, told
  server.close()


def ask(session):
  return session.run.perform(cuts.request(ISLANDS, 2))


def test_cut_on_demand_is_the_one_that_was_asked_for(commanded):
  session, command, told = commanded
  found = command(
    cutter.wish_path(session.dir).unlink,  # the request is yet to come
    lambda: ask(session),
    lambda: session.take_parts(2),
    lambda: session.run.perform(
      cuts.complete(records.CutRequest(2, 0, [0, 1]))
    ),
  )
  assert found == (2, "complete", "")
  assert told == ["cut 2 requested", "cut 2 complete"]


def test_cut_on_demand_that_is_given_up_says_why(commanded):
  session, command, told = commanded
  found = command(
    cutter.wish_path(session.dir).unlink,
    lambda: ask(session),
    lambda: session.run.perform(cuts.abandon(2, "island 1 died")),
  )
  assert found == (2, "abandoned", "island 1 died")
  found = command(channel.address_path(session.dir).unlink)
  assert found == (0, "abandoned", "the run ended before it was complete")
  assert told[1] == "cut 2 abandoned: island 1 died"
  assert not cutter.wish_path(session.dir).exists()


def test_cut_on_demand_that_a_run_completes_as_it_ends_is_complete(
  commanded, monkeypatch
):
  session, command, _ = commanded
  look = cuts.look

  def and_then(number):
    found = yield from look(number)
    if found.is_open:
      session.run.perform(cuts.complete(found.request))
      channel.address_path(session.dir).unlink()
    return found

  def take_parts():
    session.take_parts(2)
    monkeypatch.setattr(cuts, "look", and_then)

  found = command(
    cutter.wish_path(session.dir).unlink,
    lambda: ask(session),
    take_parts,
    lambda: None,
  )
  assert found == (2, "complete", "")


def test_cut_on_demand_outlives_a_store_that_fails_for_a_moment(
  commanded, monkeypatch
):
  session, command, _ = commanded
  names = store.SnapshotStore.names
  failures = iter([OSError("no store"), OSError("no store")])

  def fail(*args):
    for error in failures:
      raise error
    return names(*args)

  def ask_in_an_outage():
    cutter.wish_path(session.dir).unlink()
    ask(session)
    monkeypatch.setattr(store.SnapshotStore, "names", fail)

  found = command(
    ask_in_an_outage,
    lambda: None,
    lambda: None,
    lambda: session.run.perform(cuts.abandon(2, "island 1 died")),
  )
  assert found == (2, "abandoned", "island 1 died")
  assert next(failures, None) is None


def test_cut_on_demand_that_ended_and_was_deleted_out_of_sight_says_how(
  commanded,
):
  session, command, _ = commanded

  def end_and_delete(event, **fields):
    session.run.perform(cuts.delete(max(session.asked())))
    session.tape.record(event, **fields)

  def after(*steps):
    return command(
      cutter.wish_path(session.dir).unlink, lambda: ask(session), *steps
    )

  found = after(lambda: end_and_delete("cut_completed", cut=2))
  assert found == (2, "complete", "")
  ask(session)  # the number is free here, and is not in a run
  found = after(lambda: end_and_delete("cut_abandoned", cut=3, reason="late"))
  assert found == (3, "abandoned", "late")


def test_cut_on_demand_whose_request_is_damaged_ends_in_one_line(commanded):
  session, command, _ = commanded

  def ask_in_vain():
    cutter.wish_path(session.dir).unlink()
    ask(session)
    spoil(session.run, keys.cut_request_key(2))

  with pytest.raises(errors.UserError, match="CutRequest record") as raised:
    command(ask_in_vain, *9 * [lambda: None])
  assert "\n" not in str(raised.value)
  assert not cutter.wish_path(session.dir).exists()


def test_cut_on_demand_whose_reason_is_damaged_is_given_up_all_the_same(
  commanded,
):
  session, command, _ = commanded

  def give_up():
    session.run.perform(cuts.abandon(2, "island 1 died"))
    spoil(session.run, keys.cut_abandoned_key(2))

  found = command(
    cutter.wish_path(session.dir).unlink, lambda: ask(session), give_up
  )
  assert found == (2, "abandoned", "no reason was left")
