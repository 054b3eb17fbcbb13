import dataclasses
import json
import shutil

import numpy as np
import pytest
from cut_builder import (
  PLAN,
  CutRun,
  is_readable,
  run_with_a_cut,
  spoil,
  write_leaf,
)

from diloco import config as config_lib
from diloco import errors, process
from diloco.controller import restorer
from diloco.snapshots import (
  arrays,
  checkpoint,
  cuts,
  keys,
  records,
  restore,
  store,
  verify,
)
from diloco.tape import evidence, reader

CONFIG = config_lib.from_mapping({"outer": {"momentum": 0.9}})


class Machine:
  """A run directory with a restorer before its next session."""

  def __init__(self, tmp_path):
    self.dir = tmp_path
    self.run, self.sent = run_with_a_cut(tmp_path, process.store_url(tmp_path))
    self.ended = []

  def prepare(self, wanted=None):
    self.ended.append(0)
    return restorer.Restorer(
      self.dir, CONFIG, PLAN, lambda: [], incarnation=1
    ).prepare(wanted)

  def events(self, name):
    return [e for e in reader.read(self.dir).events if e["event"] == name]

  def everything(self):
    files = [p for p in self.dir.rglob("*") if p.is_file()]
    return {str(p): p.read_bytes() for p in files}


@pytest.fixture
def machine(tmp_path):
  return Machine(tmp_path)


def test_whole_run_is_left_alone(machine, capsys):
  before = machine.everything()
  assert machine.prepare() is None
  assert machine.everything() == before
  assert capsys.readouterr().err == ""


def test_fresh_run_is_whole(tmp_path):
  run = CutRun(tmp_path, process.store_url(tmp_path))
  run.store.delete(keys.head_key(1))  # died before it was written
  prepared = restorer.Restorer(tmp_path, CONFIG, PLAN, lambda: [], 1).prepare(
    None
  )
  assert prepared is None


def save_state(folder):
  path = folder / "checkpoints" / "island-0" / "000000040.0001.000001"
  path.mkdir(parents=True)
  (path / "complete.json").write_text("{}")


def write_tape(folder):
  (folder / "tape").mkdir()
  (folder / "tape" / "island-1-0001.jsonl").write_text("{}\n")


@pytest.mark.parametrize("leave", [save_state, write_tape])
def test_run_that_has_trained_does_not_start_anew_in_an_empty_store(
  tmp_path, leave
):
  leave(tmp_path)
  before = sorted(tmp_path.rglob("*"))
  snapshots = store.SnapshotStore(process.store_url(tmp_path))
  with pytest.raises(errors.UserError, match="missing or empty; mount"):
    restorer.check_store(tmp_path, snapshots)
  assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("leave", [save_state, write_tape])
def test_run_that_has_trained_misses_the_heads_its_store_lacks(tmp_path, leave):
  leave(tmp_path)
  store.SnapshotStore(process.store_url(tmp_path)).write_plan(PLAN)
  made = restorer.Restorer(tmp_path, CONFIG, PLAN, lambda: [], 1)
  with pytest.raises(errors.UserError, match="fragment 0 has no head"):
    made.prepare(None)


def test_run_killed_before_its_islands_joined_starts_anew(tmp_path):
  (tmp_path / "tape").mkdir()
  (tmp_path / "tape" / "island-0-0001.jsonl").touch()
  snapshots = store.SnapshotStore(process.store_url(tmp_path))
  restorer.check_store(tmp_path, snapshots)


def test_run_whose_tapes_lost_their_ends_tells_what_they_tell_of(machine):
  late = "0000.0000.0001.000000032"
  names = [sent.key for sent in machine.sent]
  known = {
    name: evidence.Contribution(name, 1, 8, 16, 800)
    for name in (*names, "0001.0000.0001.000000024")
  }
  made = restorer.Restorer(
    machine.dir, CONFIG, PLAN, lambda: [], incarnation=1, known=known
  )
  assert made.prepare("last").reinjected == names
  told = machine.events("discarded")
  # What waits again is not lost, and what no tape tells of was never there.
  assert [line["key"] for line in told] == ["0001.0000.0001.000000024"]
  assert told[0]["reason"] == "before_restore" and told[0]["first_step"] == 8
  assert machine.events("merged") == []
  assert late not in machine.run.waiting()
  (line,) = machine.events("restored")
  assert line["why"] == "the ends of its tapes are lost"


def chunk_of(machine, prefix):
  folder = machine.dir / "snapshots" / prefix
  return next(p for p in folder.rglob("*") if p.is_file() and "c" in p.name)


def damage_head(machine):
  spoil(machine.run, keys.head_key(0))


def lose_head(machine):
  machine.run.store.delete(keys.head_key(1))


def damage_tensor(machine):
  path = chunk_of(machine, f"{machine.run.head(0).payload}/params")
  data = bytearray(path.read_bytes())
  data[0] ^= 1
  path.write_bytes(data)


def lose_momentum(machine):
  machine.run.store.delete_tree(f"{machine.run.head(0).payload}/momentum")


def swap_tensor(machine):
  """Well-formed and wrong: only the digest tells."""
  payload = machine.run.head(0).payload
  (tensor,) = PLAN.fragments[0]
  machine.run.store.arrays.write(
    f"{payload}/params",
    [arrays.Tensor.whole(tensor.name, np.ones(tensor.shape, np.float32))],
  )


def swap_heads(machine):
  """Each is whole, and lies under the other's key."""
  for fragment, head in enumerate(reversed(machine.run.heads())):
    machine.run.store.write(keys.head_key(fragment), head)


def damage_epoch(machine):
  machine.run.store.write(keys.EPOCH, records.Board([], {}))


DAMAGE = [
  damage_head,
  lose_head,
  damage_tensor,
  lose_momentum,
  swap_tensor,
  swap_heads,
  damage_epoch,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_run_goes_back_to_the_last_cut(machine, capsys, damage):
  damage(machine)
  restored = machine.prepare()
  assert restored.cut == 1
  assert [h.clock for h in machine.run.heads()] == [{"0": 8, "1": 4}] * 2
  assert set(machine.run.waiting()) == {s.key for s in machine.sent}
  line = capsys.readouterr().err
  assert line.count("\n") == 1 and line.startswith("restored cut 1 (")
  (event,) = machine.events("restored")
  assert event["version_to"] == restored.version_to
  assert event["why"] in line
  assert {e["reason"] for e in machine.events("discarded")} == {
    "before_restore"
  }
  assert machine.prepare() is None


def test_last_merges_are_told_whichever_head_is_damaged(machine):
  head = machine.run.head(1)
  merged = {"fragment": 1, "version": head.version, "contributions": []}
  machine.run.store.write(
    keys.head_key(1), dataclasses.replace(head, merged=merged)
  )
  damage_head(machine)
  assert machine.prepare().cut == 1
  (told,) = machine.events("merged")
  assert (told["fragment"], told["version"]) == (1, head.version)


def damage_part(machine):
  spoil(machine.run, keys.cut_part_key(1, 0))


def lose_complete(machine):
  machine.run.store.delete(keys.cut_complete_key(1))


def lose_saved_state(machine):
  shutil.rmtree(machine.dir / "checkpoints" / "island-1")


def tamper_with_saved_state(machine):
  (path,) = (machine.dir / "checkpoints" / "island-0").glob("*.*.*")
  write_leaf(path, "p000000", np.full(4, -1, np.float32))


def tamper_with_marker(machine):
  (path,) = (machine.dir / "checkpoints" / "island-0").glob("*/complete.json")
  content = json.loads(path.read_text())
  content["record"]["step"] += 1
  path.write_text(json.dumps(content))


def save_another_state(machine):
  """Sound, and of the very same step, but not the one of the cut."""
  (path,) = (machine.dir / "checkpoints" / "island-0").glob("*.*.*")
  marker = checkpoint.read_marker(path)
  values = np.full(4, 7, np.float32)
  write_leaf(path, "p000000", values)
  told = dataclasses.replace(
    marker,
    leaves={"p000000": checkpoint.leaf_digest("p000000", values)},
    files=checkpoint.file_sizes(path),
  )
  (path / checkpoint.MARKER).unlink()
  checkpoint.commit(path, told)
  checkpoint.read_all(path, checkpoint.verify(path))


def lose_cut_tensor(machine):
  cut = machine.run.perform(restore.verified(1))
  machine.run.store.delete_tree(cut.heads[0].payload)


def lead_out_of_the_run(machine):
  part = machine.run.store.read(keys.cut_part_key(1, 0), records.CutPart)
  fields = {**vars(part), "checkpoint": "../elsewhere"}
  machine.run.store.write(keys.cut_part_key(1, 0), records.CutPart(**fields))


@pytest.mark.parametrize(
  "harm",
  [
    damage_part,
    lose_complete,
    lose_saved_state,
    tamper_with_saved_state,
    tamper_with_marker,
    save_another_state,
    lose_cut_tensor,
    lead_out_of_the_run,
  ],
)
def test_without_a_good_cut_nothing_changes_and_the_user_is_told(machine, harm):
  harm(machine)
  damage_tensor(machine)
  before = machine.everything()
  with pytest.raises(errors.UserError) as refused:
    machine.prepare()
  assert machine.everything() == before
  text = str(refused.value)
  assert "fragment 0 is damaged" in text and "cut 1: " in text
  assert "\n" not in text


def lose_payload(machine, sent):
  machine.run.store.delete_tree(sent.payload)


def damage_payload(machine, sent):
  chunk = chunk_of(machine, sent.payload)
  chunk.write_bytes(chunk.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [lose_payload, damage_payload])
def test_contribution_that_cannot_be_read_is_left_out_by_name(
  machine, harm, capsys
):
  # A syncer that was deposed and did not know it may have deleted it.
  gone, other = machine.sent
  harm(machine, gone)
  restored = machine.prepare("last")
  assert restored.cut == 1 and restored.reinjected == [other.key]
  assert set(machine.run.waiting()) == {other.key}
  line = capsys.readouterr().err
  assert f"{gone.key} left out: " in line and line.count("\n") == 1
  told = [e for e in machine.events("discarded") if e["key"] == gone.key]
  assert [e["reason"].split(":")[0] for e in told] == ["corrupt"]
  assert (told[0]["first_step"], told[0]["step"]) == (8, 16)


def test_damage_without_any_cut_is_said(tmp_path):
  run = CutRun(tmp_path, process.store_url(tmp_path))
  run.commit(0, 1, {0: 8}, value=1.0)
  spoil(run, keys.head_key(0))
  with pytest.raises(errors.UserError, match="the run has no cut"):
    restorer.Restorer(tmp_path, CONFIG, PLAN, lambda: [], 1).prepare(None)
  assert not is_readable(run, keys.head_key(0), records.Head)


@pytest.mark.parametrize("wanted", ["last", "1"])
def test_whole_run_goes_back_when_asked_to(machine, wanted, capsys):
  assert machine.prepare(wanted).version_to == [8, 5]
  assert f"--cut={wanted}" in capsys.readouterr().err


def test_cut_that_is_not_there_is_refused(machine):
  with pytest.raises(errors.UserError, match="no cut 7 exists"):
    machine.prepare("7")
  with pytest.raises(errors.UserError, match="'last' or a number"):
    restorer.check_wanted("first")


def test_restore_that_died_is_finished_by_any_next_session(machine, capsys):
  choice = machine.run.perform(restore.choose(lambda _: "", lambda _: ""))
  died, _ = machine.run.perform_until(
    restore.restore(choice, lambda *_: None, lambda _: None), 24
  )
  assert died and machine.run.perform(restore.unfinished()) == 1
  assert machine.prepare().epoch == 1
  assert "not finished" in capsys.readouterr().err
  assert machine.prepare() is None


def test_roles_that_live_are_ended_before_anything_changes(machine):
  seen = []

  def end_roles():
    seen.append(machine.run.store.read(keys.EPOCH, records.Epoch))
    return ["syncer"]

  restorer.Restorer(machine.dir, CONFIG, PLAN, end_roles, 1).prepare("last")
  assert seen == [None]


def test_cut_that_goes_while_roles_end_is_not_gone_back_to(machine):
  newest = machine.run.take_cut(published=(32, 8))

  def end_roles():
    machine.run.perform(cuts.delete(newest))  # as a syncer that lives may do
    return ["syncer"]

  made = restorer.Restorer(machine.dir, CONFIG, PLAN, end_roles, 1)
  assert made.prepare("last").cut == 1 != newest


def test_restore_that_was_begun_is_finished_before_the_one_asked_for(machine):
  newest = machine.run.take_cut(published=(32, 8))
  choice = machine.run.perform(restore.choose(lambda _: "", lambda _: ""))
  died, _ = machine.run.perform_until(
    restore.restore(choice, lambda *_: None, lambda _: None), 24
  )
  assert died and machine.run.perform(restore.unfinished()) == newest
  assert machine.prepare("1").cut == 1
  assert [e["cut"] for e in machine.events("restored")] == [newest, 1]


def test_version_0_is_whole_without_the_momentum_it_never_had(tmp_path):
  run = CutRun(tmp_path, process.store_url(tmp_path))
  run.take_cut()
  run.commit(0, 1, {0: 8}, value=1.0, cut=1)
  made = restorer.Restorer(tmp_path, CONFIG, PLAN, lambda: [], 1)
  assert made.prepare("last").version_to == [2, 1]
  assert made.prepare(None) is None  # nothing is damaged


def test_delayed_momentum_without_its_count_is_damage(tmp_path):
  run = CutRun(tmp_path, process.store_url(tmp_path))
  head = run.commit(0, 1, {0: 8}, value=1.0)
  store, (tensor,) = run.store, PLAN.fragments[0]
  check = verify.Verifier(
    tmp_path, store, PLAN, buffers=("momentum", "delayed")
  ).check_version
  for name, values in (
    ("delayed", np.ones(tensor.shape, np.float32)),
    ("arrivals", np.ones((), np.float32)),
  ):
    with pytest.raises(errors.CorruptSnapshotError):
      check(head)
    whole = tensor.name if name == "delayed" else name
    prefix = f"{head.payload}/{name}"
    store.arrays.write(prefix, [arrays.Tensor.whole(whole, values)])
  check(head)


def test_cut_of_a_timeline_that_was_given_up_is_not_gone_back_to(
  machine, capsys
):
  run = machine.run
  given_up = run.take_cut(published=(32, 8))
  machine.prepare("1")
  run.commit(0, 9, {0: 16, 1: 4}, value=9.0, cut=given_up, token=9)
  damage_head(machine)
  restored = machine.prepare()
  assert restored.cut == 1 and restored.version_to == [10 + restore.UNSEEN, 6]
  assert f"cut {given_up} passed over" in capsys.readouterr().err
  with pytest.raises(errors.UserError, match="set back to cut 1"):
    machine.prepare(str(given_up))
