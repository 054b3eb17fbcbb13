"""A run that goes on in another directory, from what its store has of it."""

import contextlib
import dataclasses
import shutil

import pytest
from cut_builder import PLAN, run_with_a_cut

from diloco import cli, errors, logbook, moving, process, timing
from diloco import config as config_lib
from diloco.controller import move, roles, tenure
from diloco.snapshots import checkpoint, keys, records, states, store
from diloco.tape import events, reader, recorder

FIELDS = {"outer": {"momentum": 0.9}, "sync": {"num_fragments": 2}}
MEMBER = records.Member(
  role="island-0",
  incarnation=3,
  beat=7,
  nonce="of its process",
  host="far",
  pid=17,
)


@pytest.fixture(autouse=True)
def fast(tmp_path, monkeypatch):
  """A cache of another machine, and looks that take no time."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setattr(logbook, "PUSH_SECS", 0.0)
  quick = dataclasses.replace(
    timing.derive(config_lib.ControllerConfig(), 0.0),
    heartbeat_secs=0.01,
    member_ttl_secs=0.05,
    takeover_secs=0.05,
  )
  monkeypatch.setattr(timing, "read", lambda *_: quick)


class Lost:
  """A run with a cut, whose directory is gone; its store is `url`."""

  def __init__(self, tmp_path, **fields):
    self.dir = tmp_path / "first" / "run"
    self.new = tmp_path / "second" / "run"
    self.url = (tmp_path / "far").as_uri()
    config = config_lib.from_mapping(FIELDS | {"store": self.url} | fields)
    process.write_config(config, self.dir)
    self.run, self.sent = run_with_a_cut(self.dir, self.url)
    self.store = self.run.store
    self.member = dataclasses.replace(MEMBER, run=process.run_name(self.dir))
    self.sign("island-0", 7)
    copies = states.Copies(self.store)
    for island in (0, 1):
      part = self.store.read(keys.cut_part_key(1, island), records.CutPart)
      copies.keep(self.dir / part.checkpoint, 1)
    self.tape = recorder.Recorder(self.dir, "controller", 1)
    self.tape.record(events.RUN_STARTED, method="decoupled", islands=2)
    island = recorder.Recorder(self.dir, "island-0", 1)
    for fragment, first_step, step in ((0, 24, 32), (1, 16, 24)):
      island.record(
        events.PUBLISHED,
        fragment=fragment,
        first_step=first_step,
        step=step,
        c_tokens=800,
        key=keys.contribution_name(fragment, 0, 1, step),
      )

  def sign(self, role, beat, **other):
    member = dataclasses.replace(self.member, role=role, beat=beat, **other)
    self.store.write(keys.member_key(role), member)

  def tell_cut(self, cut=1):
    self.tape.record(
      events.CUT_COMPLETED, cut=cut, secs=1.0, islands={}, versions=[5, 4]
    )
    return self

  def finish(self):
    self.tape.record(events.RUN_FINISHED, status="stopped", reason="asked")
    return self

  def gone(self):
    with self.controlled():
      logbook.Keeper(self.dir, self.store).push()
    shutil.rmtree(self.dir)
    return self

  def controlled(self, run_dir=None):
    """A session of its controller, by default where it was begun."""
    home = process.run_id(run_dir or self.dir)
    return tenure.take(self.store, home, 0.5, "the run")

  def resume(self, cut=None):
    found = moving.look(self.url, self.new, None)
    return moving.bring(found, self.new, cut)

  def refusal(self, cut=None):
    with pytest.raises(errors.UserError) as caught:
      self.resume(cut)
    assert "\n" not in str(caught.value)
    return str(caught.value)

  def events(self, name):
    return [e for e in reader.read(self.new).events if e["event"] == name]

  def heads(self):
    return [head.version for head in self.run.heads()]


def test_run_that_ended_in_order_goes_on_as_it_was(tmp_path):
  lost = Lost(tmp_path).tell_cut().finish().gone()
  before = lost.heads()
  assert lost.resume("last") == "last"  # is still to be gone back to
  assert lost.heads() == before and not lost.events("restored")
  config = process.read_config(lost.new)
  assert config.store == lost.url
  assert lost.store.perform(move.home()) == process.run_id(lost.new)


def test_run_that_did_not_goes_back_to_the_newest_cut_its_tapes_tell(tmp_path):
  lost = Lost(tmp_path).tell_cut().gone()
  assert lost.resume("last") is None
  (back,) = lost.events("restored")
  assert (back["cut"], back["epoch"]) == (1, 1)
  assert back["why"] == "the ends of its tapes are lost"
  assert back["torn"]
  # One is on the tape alone and one in the store alone, after the cut: what
  # the tape does not tell of is not discarded by name.
  told = {e["key"]: e["reason"] for e in lost.events("discarded")}
  assert told == {
    keys.contribution_name(0, 0, 1, 32): "before_restore",
    keys.contribution_name(1, 0, 1, 24): "before_restore",
  }
  assert set(lost.run.waiting()) == {sent.key for sent in lost.sent}
  for island in (0, 1):
    (path,) = checkpoint.completed(checkpoint.directory(lost.new, island))
    assert checkpoint.verify(path)


def test_session_that_died_before_it_kept_a_line_did_not_end_in_order(
  tmp_path,
):
  lost = Lost(tmp_path).tell_cut().finish()
  with lost.controlled() as held:
    logbook.Keeper(lost.dir, lost.store).push()
    life = roles.draw_incarnation(lost.dir, "controller")
    keeper = logbook.Keeper(lost.dir, lost.store, held.check, life=life)
    keeper.__enter__()
    keeper._closing.set()  # what it keeps later is lost with its machine
    keeper._worker.join()
  merged = lost.heads()
  shutil.rmtree(lost.dir)
  assert lost.resume() is None
  (back,) = lost.events("restored")
  assert (back["cut"], back["torn"]) == (1, True)
  assert all(new > old for new, old in zip(lost.heads(), merged, strict=True))


def test_life_whose_tape_is_lost_lends_its_number_to_nobody(tmp_path):
  lost = Lost(tmp_path).finish().gone()
  lost.resume()
  newest = roles.newest_tape(lost.new, "island-0")
  assert newest < MEMBER.incarnation
  assert (
    lost.store.perform(roles.draw_life("island-0", newest)) > MEMBER.incarnation
  )


def tree(snapshots, prefix):
  keys_of = snapshots.keys(prefix)
  return {key: snapshots.get(f"{prefix}/{key}".strip("/")) for key in keys_of}


@pytest.mark.parametrize(
  ("cut", "told"), [(None, "tell of no such cut"), ("2", "no such cut")]
)
def test_run_without_a_cut_that_is_told_is_refused(tmp_path, cut, told):
  lost = Lost(tmp_path)
  if cut:
    lost.tell_cut()
  lost.gone()
  before, leases = lost.heads(), tree(lost.store, "leases")
  assert told in lost.refusal(cut)
  assert lost.heads() == before and not lost.new.exists()
  # It can go on where it was begun, should that be found again; its controller
  # may only be stopped.
  assert leases and tree(lost.store, "leases") == leases


def test_move_that_is_interrupted_leaves_the_run_where_it_was(
  tmp_path, monkeypatch
):
  def interrupt(*_, **__):
    raise KeyboardInterrupt

  lost = Lost(tmp_path).tell_cut().gone()
  home = lost.store.perform(move.home())
  monkeypatch.setattr(moving.restorer.Restorer, "prepare", interrupt)
  with pytest.raises(KeyboardInterrupt):
    lost.resume()
  assert (
    home and lost.store.perform(move.home()) == home and not lost.new.exists()
  )


def test_move_that_is_interrupted_once_it_has_settled_has_moved(
  tmp_path, monkeypatch
):
  settle = moving._Move.settle

  def interrupt(self):
    settle(self)
    raise KeyboardInterrupt

  lost = Lost(tmp_path).finish().gone()
  monkeypatch.setattr(moving._Move, "settle", interrupt)
  with pytest.raises(KeyboardInterrupt):
    lost.resume()
  assert lost.store.perform(move.home()) == process.run_id(lost.new)
  with lost.controlled(lost.new):
    pass  # it goes on there


def test_directory_of_a_move_that_was_killed_is_explained(tmp_path):
  lost = Lost(tmp_path).finish().gone()
  moving._claim(lost.new)
  assert ".moving in it tells; name another; or delete it" in lost.refusal()
  shutil.rmtree(lost.new)
  lost.resume()
  assert not (lost.new / ".moving").exists()


def _signs(role):
  return lambda lost: lost.sign(role, MEMBER.beat + 1)


def _renew(lost):
  lost.store.write(keys.SYNCER_LEASE, records.Lease("other", 9, 1))


def _control(lost):
  lost.store.write(keys.CONTROLLER_LEASE, records.Lease("other", 9, 1))


@pytest.mark.parametrize(
  ("live", "who"),
  [
    (_signs("island-0"), "island-0 on far (process 17)"),
    (_signs("standby"), "standby on far (process 17)"),
    (_signs("evaluator"), "evaluator on far (process 17)"),
    (_renew, "syncer"),
    (_control, "controller"),
  ],
)
def test_run_that_is_alive_is_refused(tmp_path, monkeypatch, live, who):
  lost = Lost(tmp_path).finish().gone()
  signs = move.signs

  def and_then(*of):
    found = yield from signs(*of)
    live(lost)
    return found

  monkeypatch.setattr(move, "signs", and_then)
  assert f"it is alive: its {who} gives" in lost.refusal()
  assert not lost.new.exists()


def _begin(lost):
  lost.store.perform(roles.draw_life("standby", MEMBER.incarnation))


@pytest.mark.parametrize(
  "stays", ["", "island-1", "syncer", "controller", "one that begins"]
)
def test_run_of_which_all_have_left_is_not_watched(
  tmp_path, monkeypatch, stays
):
  lost = Lost(tmp_path).finish().gone()
  lost.store.perform(roles.draw_life("standby", MEMBER.incarnation - 1))
  for role in ("island-0", "island-1", "standby"):
    lost.sign(role, 7, left=role != stays)
  acts = {"syncer": _renew, "controller": _control, "one that begins": _begin}
  acts.get(stays, lambda lost: None)(lost)
  looks = []
  monkeypatch.setattr(tenure.time, "sleep", looks.append)
  lost.resume()
  assert bool(looks) == bool(stays)


def test_member_of_another_run_is_refused_and_nothing_touched(tmp_path):
  lost = Lost(tmp_path).finish().gone()
  lost.sign("standby", 1, run="another")
  before = tree(lost.store, "")
  refusal = lost.refusal()
  assert "standby, life 3 on far," in refusal and "run another," in refusal
  assert tree(lost.store, "") == before and not lost.new.exists()


def test_run_is_known_by_the_directory_it_was_begun_in(tmp_path):
  lost = Lost(tmp_path).finish().gone()
  lost.resume()
  assert (
    process.run_name(lost.new) == lost.member.run != process.run_id(lost.new)
  )


def test_of_two_who_take_a_run_over_one_does(tmp_path, monkeypatch):
  lost = Lost(tmp_path).finish().gone()
  watch = move.Move._refuse_living

  with contextlib.ExitStack() as ending:

    def and_then(self):
      seen = yield from watch(self)
      taken = tenure.take(lost.store, "other", 0.5, "", self.watch)
      ending.enter_context(taken)
      return seen

    monkeypatch.setattr(move.Move, "_refuse_living", and_then)
    assert "a controller of this run is alive" in lost.refusal()
  assert not lost.new.exists()
  assert lost.store.perform(move.home()) == "other"


@pytest.mark.parametrize("lives", [True, False])
def test_directory_that_another_has_brought_a_run_to_is_left_alone(
  tmp_path, monkeypatch, lives
):
  lost = Lost(tmp_path).finish().gone()
  signs = move.signs

  def and_then(*of):
    found = yield from signs(*of)
    if not lost.new.exists():  # it was empty when this command began
      lost.new.mkdir(parents=True)
      (lost.new / "config.json").write_text("theirs")
      if lives:
        _control(lost)
    return found

  monkeypatch.setattr(move, "signs", and_then)
  why = "it is alive" if lives else "somebody else has brought a run there"
  assert why in lost.refusal()
  assert [p.name for p in lost.new.iterdir()] == ["config.json"]


def test_first_directory_keeps_nothing_any_more_and_does_not_go_on(
  tmp_path, capsys
):
  lost = Lost(tmp_path).finish()
  with lost.controlled() as held:
    first = logbook.Keeper(lost.dir, lost.store, held.check)
    first.push()
    free = records.Lease("", held.token, 0, held.home)
    lost.store.write(keys.CONTROLLER_LEASE, free)  # as if it were long dead
    lost.resume()
    before = lost.store.keys("log")
    lost.finish()
    with pytest.raises(errors.FencedError):
      while True:
        first.push()
    with (
      pytest.raises(errors.FencedError),
      logbook.Keeper(lost.dir, lost.store, held.check),
    ):
      pass
  assert lost.store.keys("log") == before
  assert cli.main(["resume", str(lost.dir)]) == 2
  assert "goes on in another directory" in capsys.readouterr().err


def test_refusals_touch_nothing(tmp_path, capsys):
  lost = Lost(tmp_path).finish().gone()
  full = tmp_path / "full"
  full.mkdir()
  (full / "config.json").touch()
  empty = (tmp_path / "nothing").as_uri()
  before = lost.store.keys("log")
  for argv, told in (
    ([lost.url], "add --workdir=NEW"),
    ([lost.url, f"--workdir={full}"], "it is not empty"),
    ([empty, f"--workdir={lost.new}"], "no run has kept its files"),
    (
      [lost.url, f"--workdir={lost.new}", "--config.sync.quorumm=1"],
      "quorumm",
    ),
    ([str(full), f"--workdir={lost.new}"], "by the URL of its store moves"),
  ):
    assert cli.main(["resume", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
  assert lost.store.keys("log") == before and not lost.new.exists()


def test_task_of_a_run_from_elsewhere_is_trusted_by_name_only(tmp_path):
  name = "somebody:make_task"
  lost = Lost(tmp_path, task={"name": name}).finish().gone()
  with pytest.raises(errors.UserError, match="if you trust that module"):
    moving.look(lost.url, lost.new, None)
  assert moving.look(lost.url, lost.new, name).plan.hash == PLAN.hash


def test_run_of_an_older_format_is_refused(tmp_path):
  lost = Lost(tmp_path).finish().gone()
  snapshots = store.SnapshotStore(lost.url)
  text = snapshots.get("log/whole/config.json").decode()
  older = text.replace(process.FORMAT, "diloco-run-1")
  snapshots.put("log/whole/config.json", older.encode())
  with pytest.raises(errors.UserError, match="diloco-run-1"):
    moving.look(lost.url, lost.new, None)
