from diloco.snapshots import records
from diloco.syncer import members


def _member(beat, island=0, incarnation=1):
  return records.Member(island, incarnation, beat, 5, 0.1, present=True)


def test_island_is_alive_while_its_beat_moves_by_the_observers_clock():
  watch = members.MemberWatch(ttl_secs=2.0)
  assert set(watch.live([_member(1)], 1000.0)) == {0}
  assert set(watch.live([_member(1)], 1001.9)) == {0}
  assert set(watch.live([_member(2)], 1002.5)) == {0}
  assert set(watch.live([_member(2)], 1004.4)) == {0}
  assert watch.live([_member(2)], 1004.5) == {}
  assert set(watch.live([_member(1, incarnation=2)], 1010.0)) == {0}
