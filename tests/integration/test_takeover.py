"""Syncer processes that are killed, stopped and told to leave, without islands.

The store holds a plan and heads of version 0; the test is their controller.
"""

import itertools
import signal

import pytest

from diloco.snapshots import keys, records
from diloco.tape import reader
from experiments.benchmarks import takeover

_PATIENCE_SECS = 60.0


@pytest.fixture
def seats(tmp_path):
  made = takeover.Seats(tmp_path / "run", num_fragments=8, takeover_secs=3.0)
  yield made
  made.close()


def _leases(seats):
  """(role, life, token) of everybody who ever led, in order of tokens."""
  taken = [
    (e["role"], e["incarnation"], e["token"])
    for e in reader.read(seats.dir).events
    if e["event"] == "lease_acquired"
  ]
  return sorted(taken, key=lambda t: t[2])


def _head_tokens(seats):
  heads = [
    seats.store.read(keys.head_key(p), records.Head)
    for p in range(seats.num_fragments)
  ]
  return {head.token for head in heads}


def _lease(seats):
  return seats.store.read(keys.SYNCER_LEASE, records.Lease)


def test_leaders_that_are_killed_are_replaced_by_whoever_waits(seats):
  seats.start_both()
  assert seats.tokens == {"syncer": 1, "standby": 0}
  kills = 3
  for token in range(1, kills + 1):
    dead, _ = seats.kill_leader(token)
    (other,) = set(seats.handles) - {dead}
    assert seats.tokens == {dead: 0, other: token + 1}
    # It says so only when nobody else can commit any more.
    assert _head_tokens(seats) == {token + 1}
  led = _leases(seats)
  assert [token for _, _, token in led] == list(range(1, kills + 2))
  assert all(a[0] != b[0] for a, b in itertools.pairwise(led))


def test_leader_that_was_stopped_is_fenced_when_it_wakes(seats):
  seats.start_both()
  assert seats.tokens == {"syncer": 1, "standby": 0}
  seats.handles["syncer"].signal(signal.SIGSTOP)
  seats.listen(lambda: seats.leader(above=1) == "standby")
  seats.handles["syncer"].signal(signal.SIGCONT)
  assert seats.handles["syncer"].wait(_PATIENCE_SECS)
  assert seats.handles["syncer"].cause_of_death() == "exit 1"
  assert "fenced" in (seats.dir / "logs" / "syncer.log").read_text()
  assert _head_tokens(seats) == {2}
  seats.start("syncer")
  seats.listen(lambda: seats.tokens.get("syncer") == 0)
  assert _lease(seats).token == 2


def test_all_leave_when_told_and_free_the_lease(seats):
  seats.start_both()
  assert seats.tokens == {"syncer": 1, "standby": 0}
  for seq, role in enumerate(("standby", "syncer")):
    program = {"type": "program", "seq": seq, "name": "stop", "args": {}}
    assert seats.server.send(role, program)
    assert seats.handles[role].wait(_PATIENCE_SECS)
    assert seats.handles[role].cause_of_death() == "exit 0"
  assert _lease(seats).owner == ""
  assert _lease(seats).token == 1  # nobody else took it meanwhile


def test_successor_tells_the_newest_merges_again_and_no_others(seats):
  seats.start_both()
  assert seats.tokens == {"syncer": 1, "standby": 0}
  head = seats.store.read(keys.head_key(3), records.Head)
  seats.handles["syncer"].signal(signal.SIGKILL)
  merged = {"fragment": 3, "version": 9, "contributions": []}
  changed = records.Head(
    3, 9, head.token, head.payload, head.chunks, {"0": 40}, merged
  )
  seats.store.write(keys.head_key(3), changed)
  seats.listen(lambda: seats.leader(above=1) == "standby")
  told = [e for e in reader.read(seats.dir).events if e["event"] == "merged"]
  assert [(e["fragment"], e["version"]) for e in told] == [(3, 9)]


def test_leader_that_finds_a_damaged_head_says_so_and_waits(seats):
  seats.start_both()
  head = seats.store.read(keys.head_key(3), records.Head)
  # A leader that lives would put it back.
  seats.handles["syncer"].signal(signal.SIGKILL)
  (seats.dir / "snapshots" / keys.head_key(3)).write_bytes(b"{}")

  def told():
    found = reader.select(reader.read(seats.dir).events, {"global_damaged"})
    return [e["fragment"] for e in found if e["role"] == "standby"]

  seats.listen(told)
  assert seats.leader(above=1) is None
  # It is still there, and goes on once somebody has put the head back.
  seats.store.write(keys.head_key(3), head)
  seats.listen(lambda: seats.leader(above=1) == "standby")
  # Once; who leads long enough finds out that no head here has a payload.
  assert told()[:2] in ([3], [3, 0])


def test_benchmark_says_how_long_nobody_led():
  facts = takeover.run(kills=2, num_fragments=2)
  assert facts["kills"] == 2
  # Nobody may take a lease before it has stood still for its time to live,
  # less the longest pause between two renewals.
  least = facts["chosen_secs"] / 6
  assert least < facts["takeover_secs_min"] <= facts["takeover_secs_p50"]
  assert facts["takeover_secs_p99"] <= facts["takeover_secs_max"]
