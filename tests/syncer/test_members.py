import dataclasses

from diloco.snapshots import keys, records, store
from diloco.syncer import members, protocol


def _member(beat, island=0, incarnation=1):
  return records.Member(
    f"island-{island}", incarnation, beat, "n", step_secs=0.1, present=True
  )


def test_island_is_alive_while_its_beat_moves_by_the_observers_clock():
  watch = members.MemberWatch(ttl_secs=2.0)
  assert set(watch.present([_member(1)], 1000.0)) == {0}
  assert set(watch.present([_member(1)], 1001.9)) == {0}
  assert set(watch.present([_member(2)], 1002.5)) == {0}
  assert set(watch.present([_member(2)], 1004.4)) == {0}
  assert watch.present([_member(2)], 1004.5) == {}
  assert set(watch.present([_member(2, incarnation=2)], 1010.0)) == {0}


def test_rounds_wait_for_islands_that_live_and_say_they_are_there():
  watch = members.MemberWatch(ttl_secs=2.0)
  drained = records.Member("island-1", 1, 1, "n", step_secs=0.2)
  another = dataclasses.replace(drained, role="island-2", present=True)
  all_three = [_member(1), drained, another]
  assert watch.present(all_three, 0.0) == {0: 0.1, 2: 0.2}
  assert watch.present(all_three, 2.0) == {}


def test_unreadable_sign_of_life_is_named_and_the_others_are_read(tmp_path):
  snapshots = store.SnapshotStore(tmp_path.as_uri())
  for island in (0, 2):
    snapshots.write(keys.member_key(f"island-{island}"), _member(1, island))
  (tmp_path / keys.member_key("island-1")).write_bytes(b"torn")
  (tmp_path / keys.member_key("standby")).write_bytes(b"no island")
  (tmp_path / "members" / "island-3.lock").touch()
  found, unreadable = snapshots.perform(protocol.members())
  assert found == [_member(1, 0), _member(1, 2)]
  ((name, why),) = unreadable
  assert name == "island-1" and "cannot be parsed" in why
