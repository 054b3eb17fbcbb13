"""Why a round closed, from tapes written by hand."""

import pytest

from diloco import config as config_lib
from diloco import errors
from diloco.report import explain_text
from diloco.tape import events, explain, reader


class Tape:
  """Lines of syncers and islands about fragment 0."""

  def __init__(self):
    self.lines = []
    self.incarnation, self.token = 1, 1
    self.lead(1)

  def _line(self, role, event, incarnation, **fields):
    line = {"event": event, "role": role, "incarnation": incarnation}
    self.lines.append({**line, "wall_secs": float(len(self.lines)), **fields})

  def syncer(self, event, **fields):
    self._line("syncer", event, self.incarnation, **fields)

  def lead(self, token):
    self.token = token
    self.syncer(events.LEASE_ACQUIRED, token=token)

  def publish(self, key, island, base, steps=(0, 8)):
    self._line(
      f"island-{island}",
      events.PUBLISHED,
      1,
      fragment=0,
      key=key,
      base_version=base,
      first_step=steps[0],
      step=steps[1],
    )

  def open(self, version, island=0):
    self.syncer(events.ROUND_OPENED, fragment=0, version=version, island=island)

  def merge(self, version, *parts, absent=(), at=(10.0, 11.0), **fields):
    line = {
      "fragment": 0,
      "version": version,
      "contributions": list(parts),
      "absent": list(absent),
      "opened_at": at[0],
      "closed_at": at[1],
      "quorum_secs": 0.25,
      "grace_secs": 0.5,
      "grace_spent_secs": 0.75,
      "grace_facts": {"step_secs": 0.5, "quorum_secs": 0.2, "sync_secs": 0.1},
      "merge_secs": 0.004,
      "outer_grad_norm": 0.125,
      "digest": f"{version:032x}",
      "token": self.token,
      "bytes": 100,
    }
    self.syncer(events.MERGED, **line | fields)

  def discard(self, key, island, reason, arrived_at, steps=(0, 8)):
    self.syncer(
      events.DISCARDED,
      fragment=0,
      key=key,
      island=island,
      island_incarnation=1,
      first_step=steps[0],
      step=steps[1],
      c_tokens=80,
      reason=reason,
      arrived_at=arrived_at,
    )

  def explain(self, version=1, fragment=0):
    record = reader.Record(self.lines, {}, [])
    return explain.explain(record, fragment, version)


def part(key, island=0, weight=1.0, arrived_at=10.0, staleness=0, steps=(0, 8)):
  return {
    "key": key,
    "island": island,
    "incarnation": 1,
    "first_step": steps[0],
    "step": steps[1],
    "c_tokens": 10 * (steps[1] - steps[0]),
    "staleness": staleness,
    "weight": weight,
    "waited_secs": arrived_at - 10.0,
    "arrived_at": arrived_at,
  }


@pytest.fixture
def tape():
  return Tape()


def story(tape):
  """A round with all that can happen to contributions."""
  tape.publish("a", 0, base=0)
  tape.publish("b0", 1, base=0, steps=(0, 4))
  tape.publish("b", 1, base=0)
  tape.publish("c", 2, base=0)
  tape.publish("d", 3, base=0, steps=(0, 5))
  tape.publish("e", 4, base=0, steps=(0, 6))
  tape.open(1, island=1)
  tape.discard("b0", 1, "superseded", 10.0, steps=(0, 4))
  tape.merge(
    1,
    part("a", 0, weight=30.0, arrived_at=10.25),
    part("b", 1, weight=10.0, arrived_at=9.5),
    absent=[2, 3, 4],
  )
  tape.discard("d", 3, "too_stale", 14.5, steps=(0, 5))
  tape.open(2, island=0)
  tape.merge(
    2,
    part("a2", 0, arrived_at=12.0, steps=(8, 16)),
    part("c", 2, arrived_at=11.75, staleness=1),
    at=(12.0, 13.0),
  )


def test_weights_are_shares_of_the_round(tape):
  story(tape)
  facts = tape.explain()
  assert [(p.key, p.share) for p in facts.parts] == [("a", 0.75), ("b", 0.25)]
  assert facts.opened_by == 1
  assert (facts.token, facts.retold) == (1, False)


def test_round_opened_again_by_a_successor_is_its_own(tape):
  tape.open(1, island=1)
  tape.incarnation = 2
  tape.lead(2)
  tape.open(1, island=2)
  tape.merge(1, part("a"))
  assert tape.explain().opened_by == 2


def test_late_ones_say_by_how_much_and_what_became_of_them(tape):
  story(tape)
  late = {x.key: (x.late_secs, x.fate) for x in tape.explain().late}
  assert late == {
    "c": (0.75, "merged in version 2"),
    "d": (3.5, "discarded: too_stale"),
    "e": (None, "pending"),
  }


def test_contributions_meant_for_the_next_round_are_not_late(tape):
  story(tape)
  tape.publish("f", 4, base=1, steps=(6, 9))
  assert not {"a2", "f"} & {x.key for x in tape.explain().late}
  assert [x.key for x in tape.explain(version=2).late] == ["e", "f"]


def test_discards_belong_to_the_round_that_was_open(tape):
  story(tape)
  (one,) = tape.explain(version=1).discarded
  assert (one.key, one.reason, one.arrived_secs) == ("b0", "superseded", 0.0)
  (one,) = tape.explain(version=2).discarded
  assert (one.key, one.arrived_secs) == ("d", 2.5)


@pytest.mark.parametrize(
  ("absent", "spent", "cause"),
  [
    ([], 0.1, "all_in"),
    ([2], 0.5, "grace_spent"),
    ([2], 0.5 - 3e-12, "grace_spent"),  # a difference of two times is rounded
    ([2], 0.1, "draining"),
  ],
)
def test_cause_follows_from_who_was_absent_and_the_grace(
  tape, absent, spent, cause
):
  tape.merge(1, part("a"), absent=absent, grace_spent_secs=spent)
  assert tape.explain().cause == cause


def test_merge_told_by_a_successor_keeps_its_own_lease(tape):
  tape.publish("a", 0, base=0)
  tape.publish("c", 1, base=0)
  tape.incarnation = 2
  tape.lead(2)
  tape.merge(1, part("a"), absent=[1], token=1)
  tape.merge(2, part("c", 1, arrived_at=3.0, staleness=1), at=(2.0, 4.0))
  facts = tape.explain()
  assert (facts.token, facts.retold, facts.incarnation) == (1, True, 2)
  # Arrival and close are on clocks of two machines, perhaps.
  assert [x.late_secs for x in facts.late] == [None]


def test_first_telling_of_a_version_counts(tape):
  tape.merge(1, part("a"))
  tape.incarnation = 2
  tape.lead(2)
  tape.merge(1, part("a"), token=1)
  assert tape.explain().incarnation == 1


def test_merges_told_again_change_nothing(tape):
  story(tape)
  tape.open(3)
  tape.discard("x", 1, "superseded", 14.0)
  expected = tape.explain(version=1), tape.explain(version=2)
  merges = [e for e in tape.lines if e["event"] == events.MERGED]
  # A successor, and a controller about to set the run back, tell them again.
  tape.incarnation = 2
  tape.lead(2)
  for role in ("syncer", "controller"):
    for line in merges:
      tape.lines.append(line | {"role": role, "incarnation": 2})
  assert (tape.explain(version=1), tape.explain(version=2)) == expected
  tape.merge(3, part("z", steps=(16, 24)))
  assert [x.key for x in tape.explain(version=3).discarded] == ["x"]


@pytest.mark.parametrize(
  ("fragment", "version", "said"),
  [
    (0, 3, "not merged yet; the newest version is 2"),
    (0, 0, "initial parameters"),
    (0, -1, "no round that made it"),
    (7, 1, r"only of fragments \[0\]"),
  ],
)
def test_version_that_no_round_made_is_refused(tape, fragment, version, said):
  story(tape)
  with pytest.raises(errors.UserError, match=said):
    tape.explain(version, fragment)


def test_tape_without_merges_is_refused(tape):
  with pytest.raises(errors.UserError, match="no merge at all"):
    tape.explain()


def test_tape_of_an_older_version_is_explained_without_what_it_lacks(tape):
  tape.publish("c", 1, base=0)
  tape.merge(1, part("a"))
  line = tape.lines[-1]
  for name in ("opened_at", "closed_at", "grace_facts", "digest", "token"):
    del line[name]
  facts = tape.explain()
  assert facts.grace_facts == {} and facts.token == 1
  assert "not on this tape" in explain_text.render(facts, SYNC)


SYNC = config_lib.SyncConfig(
  num_fragments=4, every=8, overlap_steps=2, quorum=2, grace_gamma=0.8
)

GOLDEN = """\
fragment 0, version 1: closed because the quorum was there and the grace window had ended
  opened     by island 1
  quorum     of 2 after 0.250 s
  grace      offered 0.500 s, spent 0.750 s
             slack 0.700 s = 2 steps of 0.500 s - 0.200 s to quorum - 0.100 s to merge
             offer = min(0.8 slack, one step), at least 0; averages over rounds
  merge      0.004 s, outer gradient of norm 0.125
  committed  by syncer 1, token 1
  digest     00000000000000000000000000000001

  in           steps  base  staleness  tokens  weight   share  after opening
  island 0.1  (0, 8]     0          0      80      30  75.0 %        0.250 s
  island 1.1  (0, 8]     0          0      80      10  25.0 %       -0.500 s

  absent     island 2, island 3, island 4
  late       island 2.1, steps (0, 8]: 0.750 s after the close; merged in version 2
             island 3.1, steps (0, 5]: 3.500 s after the close; discarded: too_stale
             island 4.1, steps (0, 6]: pending
  discarded  island 1.1, steps (0, 4]: superseded, arrived 0.000 s after the opening"""  # noqa: E501


def test_text_is_as_before(tape):
  story(tape)
  assert explain_text.render(tape.explain(), SYNC) == GOLDEN


def test_fixed_grace_is_said_to_be_fixed(tape):
  tape.merge(1, part("a"))
  sync = config_lib.SyncConfig(grace="0.5")
  text = explain_text.render(tape.explain(), sync)
  assert "fixed by config.sync.grace = '0.5'" in text
  assert "slack" not in text
