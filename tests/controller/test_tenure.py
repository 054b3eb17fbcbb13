"""One controller at a time: who takes a run, who keeps it, what is refused."""

import functools
import itertools
import json
import os
import subprocess
import threading
import types

import pytest
from cut_builder import CutRun, run_with_a_cut

from diloco import errors
from diloco.controller import move, roles, tenure
from diloco.report import liveness
from diloco.snapshots import (
  cuts,
  keys,
  lease,
  operations,
  records,
  restore,
  store,
)

LONG_SECS = 1000.0  # no thread renews by itself before a test is over
SHORT_SECS = 0.5
HOME = "of the directory"


class Store(store.SnapshotStore):
  """A store that can be cut off."""

  fails = False

  def execute(self, operation):
    if self.fails:
      raise errors.StoreError("no answer")
    return super().execute(operation)


@pytest.fixture
def snapshots():
  return Store("memory://")


class Clock:
  """Stands still until moved."""

  now = 0.0

  def __call__(self):
    return self.now


def take(snapshots, ttl_secs=LONG_SECS, home=HOME):
  return tenure.take(snapshots, home, ttl_secs, "the run")


def held(snapshots):
  return snapshots.read(keys.CONTROLLER_LEASE, records.Lease)


def name_of(pid, ticks, machine=None):
  return json.dumps([machine or liveness.machine(), pid, ticks, "nonce"])


def left_by(snapshots, owner):
  """The lease of a controller that did not give it up."""
  snapshots.write(f"{keys.CONTROLLER_LEASE}.token", records.DrawnToken(4))
  snapshots.write(keys.CONTROLLER_LEASE, records.Lease(owner, 4, 9, HOME))


def test_controller_takes_a_free_run_and_leaves_it_free(snapshots):
  for token in (1, 2):
    with take(snapshots) as mine:
      assert mine.token == token
      mine.check()
      lease_now = held(snapshots)
      assert (lease_now.token, lease_now.home) == (token, HOME)
      assert liveness.lives(lease_now.owner) is None  # this very process
    assert held(snapshots).owner == "" and held(snapshots).home == HOME


def test_dead_controller_of_this_machine_is_replaced_at_once(
  snapshots, monkeypatch
):
  monkeypatch.setattr(move, "_POLL_SECS", None)  # to wait would fail
  child = subprocess.Popen(["sleep", "60"])
  owner = name_of(child.pid, liveness.start_ticks(child.pid))
  assert liveness.lives(owner) is True
  left_by(snapshots, owner)
  with pytest.raises(errors.UserError, match="a controller of this run is al"):
    take(snapshots)
  child.kill()
  child.wait()
  assert liveness.lives(owner) is False
  with take(snapshots) as mine:
    assert mine.token == 5
  # Nor is a later process of that number the controller, such as this one.
  for pid in (os.getppid(), os.getpid()):
    left_by(snapshots, name_of(pid, 1))
    with take(snapshots) as mine:
      assert mine.token > 4


# Processes whose numbers are others' here; the second is of a container.
STRANGERS = {
  "another machine": ("another boot.pid:[4026531836]", os.getppid()),
  "a container with our number": ("this boot.pid:[1]", os.getpid()),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_controller_elsewhere_is_replaced_once_its_lease_stands_still(
  snapshots, who, capsys
):
  machine, pid = STRANGERS[who]
  left_by(snapshots, name_of(pid, liveness.start_ticks(pid), machine))
  with take(snapshots, SHORT_SECS) as mine:
    assert mine.token == 5
  assert "is its controller alive? watching" in capsys.readouterr().err


def test_lease_of_a_living_controller_is_not_that_of_a_copied_store(
  snapshots, capsys
):
  parent = os.getppid()
  left_by(snapshots, name_of(parent, liveness.start_ticks(parent)))
  with tenure.take(snapshots, HOME, SHORT_SECS, "", copied=True) as mine:
    assert mine.token == 5
  assert "watching" in capsys.readouterr().err


def test_who_waits_for_a_damaged_lease_says_so(snapshots, capsys):
  damage(snapshots, keys.CONTROLLER_LEASE)
  with take(snapshots, SHORT_SECS):
    pass
  assert capsys.readouterr().err == (
    "the run: is its controller alive? watching 0 s\n"
  )


def test_controller_elsewhere_that_lives_keeps_the_run(snapshots):
  with take(snapshots, SHORT_SECS) as mine:
    with pytest.raises(
      errors.UserError, match="a controller of this run is al"
    ):
      take(snapshots, SHORT_SECS)
    mine.check()


def test_of_many_who_take_a_run_at_once_one_has_it(snapshots):
  found, start = [], threading.Barrier(8)

  def contend():
    start.wait()
    try:
      found.append(take(snapshots, 2 * SHORT_SECS))
    except errors.UserError:
      found.append(None)

  threads = [threading.Thread(target=contend) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  (mine,) = filter(None, found)
  with mine:
    mine.check()
    assert held(snapshots).token == mine.token


def test_run_that_is_in_another_directory_is_not_taken(snapshots):
  with take(snapshots):
    pass
  before = held(snapshots)
  with pytest.raises(errors.UserError, match="goes on in another directory"):
    take(snapshots, home="of a copy")
  assert held(snapshots) == before and snapshots.perform(move.home()) == HOME


def test_run_that_begins_and_dies_as_it_is_looked_at_is_not_taken(snapshots):
  child = subprocess.Popen(["sleep", "60"])
  left_by(snapshots, name_of(child.pid, liveness.start_ticks(child.pid)))

  def unused():
    child.kill()  # once nothing was seen of its run
    child.wait()
    return True

  take = functools.partial(
    tenure.take, snapshots, "another", LONG_SECS, "the run"
  )
  before = held(snapshots)
  with pytest.raises(errors.UserError, match="a controller of this run is al"):
    take(unused=unused)
  assert held(snapshots) == before
  with take(unused=lambda: True):
    assert snapshots.perform(move.home()) == "another"


@pytest.mark.parametrize(("owner", "secs"), [("", 3.0), ("other", 8.0)])
def test_run_is_watched_for_as_long_as_who_has_it_may_be_still(
  snapshots, owner, secs
):
  snapshots.write(keys.CONTROLLER_LEASE, records.Lease(owner, 5, 1))
  now, said = [100.0], []
  mover = types.SimpleNamespace(
    **{"what": "the run", "run_name": "it", "each": operations.in_turn},
    times=types.SimpleNamespace(
      member_ttl_secs=3.0, control_ttl_secs=8.0, heartbeat_secs=0.5
    ),
    watch=lease.LeaseWatch(8.0),
    clock=lambda: now[0],
    say=said.append,
  )

  def execute(operation):
    if not isinstance(operation, float):
      return snapshots.execute(operation)
    now[0] += operation

  operations.perform(move.Move._refuse_living(mover), execute)
  assert now[0] == 100.0 + secs
  assert said == [f"the run: is it alive? watching {secs:.0f} s"]


def holding(snapshots, clock, ttl_secs=LONG_SECS):
  with take(snapshots):
    pass
  owner = liveness.name_process()
  watch = lease.LeaseWatch(ttl_secs)
  token = snapshots.perform(
    lease.acquire(keys.CONTROLLER_LEASE, owner, watch, clock, HOME)
  )
  mine = records.Lease(owner, token, 0, HOME)
  return tenure.Tenure(snapshots, mine, ttl_secs, clock)


def depose(snapshots, mine):
  """Another controller takes the run, as if this one were long dead."""
  snapshots.write(keys.CONTROLLER_LEASE, records.Lease("", mine.token, 0, HOME))
  return take(snapshots)


def test_controller_that_was_stopped_asks_before_it_does_anything(snapshots):
  clock = Clock()
  with holding(snapshots, clock) as mine:
    mine.check()
    with depose(snapshots, mine):
      mine.check()  # nobody could have taken it so soon
      clock.now += LONG_SECS
      with pytest.raises(errors.FencedError, match="took the run over"):
        mine.check()
  # It gives up nothing that is not its own.
  assert held(snapshots).token == mine.token + 1


def test_controller_that_was_stopped_as_it_took_the_run_asks(snapshots):
  with (
    holding(snapshots, Clock()) as mine,
    depose(snapshots, mine),
    pytest.raises(errors.FencedError),
  ):
    mine.check()


def test_controller_that_was_stopped_and_not_replaced_goes_on(snapshots):
  clock = Clock()
  with holding(snapshots, clock) as mine:
    clock.now += LONG_SECS
    mine.check()
    assert held(snapshots).beat > 0


def test_store_that_answers_nobody_deposes_nobody_and_is_told_of_once(
  snapshots, caplog
):
  clock = Clock()
  with holding(snapshots, clock) as mine:
    for outages in (1, 2):
      snapshots.fails = True
      for _ in range(3):
        clock.now += LONG_SECS
        mine.check()
      snapshots.fails = False
      clock.now += LONG_SECS
      mine.check()
      assert [r.message for r in caplog.records] == [
        "renewal_failed error=no answer"
      ] * outages


def test_store_that_answers_nobody_is_asked_seldom_again(snapshots):
  clock = Clock()
  with holding(snapshots, clock) as mine:
    snapshots.fails = True
    asked = []
    for share in (1.0, 0.3, 0.1, 0.3):
      clock.now += share * LONG_SECS
      mine.check()
      asked.append(mine._failed)
    assert asked == [1, 1, 2, 2]


@pytest.mark.parametrize("where", ["renewal", "release"])
def test_controller_that_waits_for_its_store_at_the_end_says_so(
  snapshots, monkeypatch, where
):
  slow, hangs, told = (threading.Event() for _ in range(3))
  monkeypatch.setattr(tenure, "_ASK_SECS", 0.01)
  monkeypatch.setattr(
    "builtins.print",
    lambda text="", *_, **__: "waiting for the run" in text and told.set(),
  )

  def execute(operation):
    if slow.is_set():
      hangs.set()
      assert told.wait(20)
    return store.SnapshotStore.execute(snapshots, operation)

  monkeypatch.setattr(snapshots, "execute", execute)
  with holding(snapshots, Clock()) as mine:
    slow.set()
    if where == "renewal":
      mine.renew_within(SHORT_SECS)
      assert hangs.wait(20)
  assert told.is_set()
  assert held(snapshots).owner == ""


def damage(snapshots, key):
  snapshots.put(key, b"{}")


def delete_all(snapshots, key):
  for lost in (key, f"{key}.token"):
    snapshots.delete(lost)


@pytest.mark.parametrize(
  "strike", [store.SnapshotStore.delete, damage, delete_all]
)
def test_lease_that_is_lost_or_damaged_is_put_back(snapshots, strike):
  clock = Clock()
  with holding(snapshots, clock) as mine:
    strike(snapshots, keys.CONTROLLER_LEASE)
    clock.now += LONG_SECS
    mine.check()
    assert held(snapshots).token == mine.token


@pytest.mark.parametrize("strike", [store.SnapshotStore.delete, damage])
def test_lease_that_somebody_is_about_to_take_is_not_put_back(
  snapshots, strike
):
  clock = Clock()
  with holding(snapshots, clock) as mine:
    strike(snapshots, keys.CONTROLLER_LEASE)
    snapshots.perform(lease.draw(keys.CONTROLLER_LEASE, mine.token))
    clock.now += LONG_SECS
    with pytest.raises(errors.FencedError):
      mine.check()


def test_lost_lease_is_not_put_back_after_another_controller(snapshots):
  clock = Clock()
  with holding(snapshots, clock) as mine:
    snapshots.perform(restore.hold(mine.token + 1))
    delete_all(snapshots, keys.CONTROLLER_LEASE)
    clock.now += LONG_SECS
    with pytest.raises(errors.FencedError):
      mine.check()


@pytest.mark.parametrize(
  ("owner", "newer"), [("", 0), ("another", 0), ("", 1), ("another", 1)]
)
def test_lease_that_is_there_and_not_its_own_is_left_alone(
  snapshots, owner, newer
):
  clock = Clock()
  with holding(snapshots, clock) as mine:
    there = records.Lease(owner, mine.token + newer, 0, HOME)
    snapshots.write(keys.CONTROLLER_LEASE, there)
    clock.now += LONG_SECS
    with pytest.raises(errors.FencedError):
      mine.check()
  assert held(snapshots) == there


def test_who_goes_by_a_shorter_time_to_live_asks_at_once(
  snapshots, monkeypatch
):
  monkeypatch.setattr(tenure, "_ASK_SECS", 0.01)
  clock = Clock()
  with holding(snapshots, clock) as mine:
    mine.check()
    with monkeypatch.context() as deaf:
      deaf.setattr(mine._renewals, "wake", lambda: None)
      mine.renew_within(SHORT_SECS)
      mine.check()  # what gets no answer is excused, by the new time
    with depose(snapshots, mine):
      clock.now += SHORT_SECS
      monkeypatch.setattr(tenure, "_ASK_SECS", 20.0)
      with pytest.raises(errors.FencedError):
        mine.check()


def test_controller_goes_by_the_time_to_live_that_others_watch_by(snapshots):
  clock = Clock()
  with holding(snapshots, clock) as mine:
    mine.renew_within(SHORT_SECS)
    mine.check()
    with depose(snapshots, mine):
      clock.now += SHORT_SECS
      with pytest.raises(errors.FencedError):
        mine.check()


def test_start_that_fails_leaves_a_new_run_to_whatever_directory(
  snapshots, monkeypatch
):
  def fail(operation):
    if getattr(operation, "key", "") == keys.EPOCH and not isinstance(
      operation, operations.Read
    ):
      raise errors.StoreError("no answer")
    return store.SnapshotStore.execute(snapshots, operation)

  with monkeypatch.context() as patched:
    patched.setattr(snapshots, "execute", fail)
    with pytest.raises(errors.StoreError):
      take(snapshots)
  assert snapshots.perform(move.home()) == ""
  with take(snapshots, home="another"):
    pass


def test_token_is_newer_than_those_of_controllers_that_may_restore(snapshots):
  with take(snapshots):
    pass
  snapshots.perform(restore.hold(9))
  for key in (keys.CONTROLLER_LEASE, f"{keys.CONTROLLER_LEASE}.token"):
    snapshots.delete(key)
  with take(snapshots) as mine:
    assert mine.token == 10


def test_run_without_a_lease_is_taken_whatever_its_heads_are(tmp_path):
  run = CutRun(tmp_path)
  damage(run.store, keys.head_key(1))
  with take(run.store) as mine:
    assert mine.token == 1


def wanting(run, what, asked):
  """What a controller with token 1 does to a cut."""
  if what == "request":
    return cuts.request([0], 2, token=1)
  if what == "complete":
    return cuts.complete(asked, token=1)
  return cuts.abandon(asked.cut, "a reason", token=1)


class Meanwhile:
  """Does operations; right before one of them something else happens."""

  def __init__(self, run, moment, happens):
    self.run, self.left, self.happens = run, moment, happens
    self.before = None  # which operation, once it was reached

  def execute(self, operation):
    if not self.left:
      self.before = operation
      self.happens()
    self.left -= 1
    return self.run.store.execute(operation)


@pytest.mark.parametrize("what", ["request", "complete", "abandon"])
def test_cut_is_left_alone_by_who_is_deposed_before_its_last_write(
  tmp_path, what
):
  refused = 0
  for moment in itertools.count():
    run = CutRun(tmp_path / f"{moment}")
    run.take_cut()
    asked = run.store.read(keys.cut_request_key(1), records.CutRequest)
    run.store.delete(keys.cut_complete_key(1))
    newer = operations.Write(
      keys.CONTROLLER_LEASE, records.Lease("other", 2, 0)
    )
    world = Meanwhile(run, moment, functools.partial(run.execute, newer))
    before = run.store.keys("cuts")
    try:
      operations.perform(wanting(run, what, asked), world.execute)
    except errors.FencedError:
      refused += 1
      assert run.store.keys("cuts") == before
      continue
    if world.before is None:
      break
    # Only what was on its way already gets through.
    assert isinstance(world.before, operations.Write | operations.CompareAndSet)
  assert refused


def zombie(run, token):
  """Goes back to a cut as a controller does, until it is refused."""
  while True:
    choice = yield from restore.choose(
      lambda parts: "", lambda sent: "", None, token
    )
    try:
      return (
        yield from restore.restore(choice, lambda *_: None, lambda _: None)
      )
    except restore.ChangedError:
      continue


def test_restore_is_decided_by_the_newest_controller_or_finished_by_it(
  tmp_path,
):
  refused = finished = 0
  for moment in itertools.count():
    run, _ = run_with_a_cut(tmp_path / f"{moment}")
    run.perform(restore.hold(1))
    before = run.heads(), run.waiting()
    found = []
    world = Meanwhile(run, moment, functools.partial(take_over, run, 2, found))
    try:
      operations.perform(zombie(run, 1), world.execute)
    except errors.FencedError:
      assert found
    if not found:
      break
    if found == [1]:
      finished += 1
      assert not run.perform(restore.unfinished())
      assert [head.version for head in run.heads()] == [8, 5]
    else:
      refused += 1
      assert (run.heads(), run.waiting()) == before
    with pytest.raises(errors.FencedError):
      run.perform(zombie(run, 1))
    assert run.store.read(keys.EPOCH, records.Epoch).token == 2
  assert refused > 10 and finished > 10


def take_over(run, token, found):
  """Another controller begins, and finishes a restore that was decided."""
  run.perform(restore.hold(token))
  found.append(run.perform(restore.unfinished()))
  if found[0]:
    run.perform(zombie(run, token))


def test_damaged_epoch_stays_what_shows_that_the_run_must_be_set_back(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  damage(run.store, keys.EPOCH)
  run.perform(restore.hold(3))
  with pytest.raises(errors.CorruptSnapshotError):
    run.perform(restore.unfinished())
  run.perform(zombie(run, 3))
  assert run.store.read(keys.EPOCH, records.Epoch).token == 3


def test_no_life_is_drawn_twice_however_two_controllers_meet(snapshots):
  for moments in itertools.product(range(9), repeat=2):
    run, lives = Store("memory://"), []
    for moment in moments:
      first = roles.draw_life("island-0", 2)
      step = next(first)
      for _ in range(moment):
        try:
          step = first.send(run.execute(step))
        except StopIteration as end:
          lives.append(end.value)
          break
      else:
        lives.append(run.perform(roles.draw_life("island-0", 2)))
        with pytest.raises(StopIteration) as end:
          while True:
            step = first.send(run.execute(step))
        lives.append(end.value.value)
    assert len(set(lives)) == len(lives) and min(lives) == 3


def test_life_is_newer_than_those_an_earlier_version_drew(snapshots):
  snapshots.write("lives/0011.token", records.DrawnToken(7))
  assert snapshots.perform(roles.draw_life("island-11", 2)) == 8
  assert snapshots.perform(roles.draw_life("island-11", 2)) == 9
  assert snapshots.perform(roles.draw_life("island-1", 2)) == 3


def test_life_is_newer_than_that_of_a_living_member(snapshots):
  member = records.Member("island-0", 7, 1, "nonce")
  snapshots.write(keys.member_key("island-0"), member)
  assert snapshots.perform(roles.draw_life("island-0", 2)) == 8
  damage(snapshots, keys.member_key("island-0"))
  assert snapshots.perform(roles.draw_life("island-0", 2)) == 9


@pytest.mark.parametrize(
  ("key", "unused"), [(keys.SEEN, True), ("plan", False)]
)
def test_store_of_who_was_about_to_begin_is_unused(tmp_path, key, unused):
  snapshots = store.SnapshotStore(tmp_path.as_uri())
  assert tenure.is_unused(snapshots)
  snapshots.put(key, b"{}")
  assert tenure.is_unused(snapshots) == unused
