import dataclasses

import pytest
from cut_builder import CutRun, run_with_a_cut, spoil

from diloco import errors
from diloco.snapshots import cut_parts, cuts, keys, operations, records, restore


def test_numbers_grow_and_are_never_used_twice(tmp_path):
  run = CutRun(tmp_path)
  assert run.perform(cuts.request([0, 1], 2)).cut == 1
  assert run.perform(cuts.request([0], 2)) == records.CutRequest(2, 0, [0])
  run.perform(cuts.delete(1))
  assert run.perform(cuts.numbers()) == [2]
  run.commit(0, 1, {}, value=1.0, cut=7)  # all of `cuts/` may be lost
  assert run.perform(cuts.request([0], 2)).cut == 8


def test_no_cut_is_missed_that_a_stale_listing_lacks(tmp_path):
  run = CutRun(tmp_path)
  for _ in range(4):
    run.perform(cuts.request([0], 2))
  spoil(run, keys.cut_request_key(3))  # it is there all the same

  def execute(operation):
    found = run.store.execute(operation)
    return found[:1] if isinstance(operation, operations.Names) else found

  for taken in (0, 3, 4):
    found = operations.perform(cuts.all_numbers(taken), execute)
    assert found == [1, 2, 3, 4]
  run.perform(cuts.delete(2))  # by who kept only the newest
  assert operations.perform(cuts.all_numbers(4), execute) == [1, 3, 4]


def test_cut_is_complete_only_with_all_its_parts(tmp_path):
  run = CutRun(tmp_path)
  asked = run.perform(cuts.request([0], 2))
  look = run.perform(cuts.look(1))
  assert look.is_open and not look.is_complete and look.missing_islands == [0]
  run.save(1, 0, 3, [[0, 0, 0], [0, 0, 0]])
  assert run.perform(cuts.look(1)).missing_islands == []
  with pytest.raises(errors.CorruptSnapshotError, match="no heads"):
    run.perform(cuts.complete(asked))
  assert run.take_cut() == 2
  look = run.perform(cuts.look(2))
  assert look.is_complete and not look.is_open
  more = dataclasses.replace(asked, cut=2, islands=[0, 1, 5])
  with pytest.raises(errors.CorruptSnapshotError, match="no part of 5"):
    run.perform(cuts.complete(more))


def test_ended_cut_takes_no_more_parts(tmp_path):
  run = CutRun(tmp_path)
  cut = run.take_cut()
  part = run.store.read(keys.cut_part_key(cut, 0), records.CutPart)
  later = dataclasses.replace(part, step=99, incarnation=2)
  assert not run.perform(cuts.add_part(later))
  heads = run.store.read(keys.cut_heads_key(cut), records.CutHeads)
  assert not run.perform(cuts.add_heads(dataclasses.replace(heads, token=9)))
  assert run.perform(restore.verified(cut)).islands[0] == part
  assert not run.perform(cuts.abandon(cut, "too late"))


class _Late:
  """Somebody who is overtaken when it says how a cut ends."""

  def __init__(self, run, overtaken_by):
    """Args: the run; what another does right before."""
    self._run, self._overtaken_by = run, overtaken_by

  def execute(self, operation):
    if getattr(operation, "key", "") == keys.cut_complete_key(1) and isinstance(
      operation, operations.CompareAndSet | operations.Write
    ):
      overtaken_by, self._overtaken_by = self._overtaken_by, lambda: None
      overtaken_by()
    return self._run.store.execute(operation)


def _ready(tmp_path, base=0):
  """A run with a cut that has all its parts; what was asked.

  Its island starts from version `base` of the first fragment.
  """
  run = CutRun(tmp_path)
  asked = run.perform(cuts.request([0], 2))
  run.save(1, 0, 3, [[base, 0, 0], [0, 0, 0]])
  fields = [dataclasses.asdict(h) for h in run.heads()]
  run.perform(cuts.add_heads(records.CutHeads(1, 0, 1, fields)))
  run.store.write(keys.cut_channel_key(1), records.CutChannel(1, 1, []))
  return run, asked


def test_cut_is_not_given_up_by_who_is_late(tmp_path):
  run, asked = _ready(tmp_path)
  late = _Late(run, lambda: run.perform(cuts.complete(asked)))
  assert not operations.perform(cuts.abandon(1, "late"), late.execute)
  assert run.perform(cuts.look(1)).is_complete
  assert run.perform(restore.verified(1)).request == asked


def test_cut_is_not_completed_by_who_is_late(tmp_path):
  run, asked = _ready(tmp_path)
  late = _Late(run, lambda: run.perform(cuts.abandon(1, "a reason")))
  assert operations.perform(cuts.complete(asked), late.execute) is None
  assert not run.perform(cuts.look(1)).is_complete
  with pytest.raises(errors.CorruptSnapshotError, match="a reason"):
    run.perform(restore.verified(1))


def test_deposed_controller_has_no_say_in_cuts(tmp_path):
  run, asked = _ready(tmp_path)
  run.store.write(keys.CONTROLLER_LEASE, records.Lease("another", 5, 0))
  for late in (
    cuts.request([0], 2, 4),
    cuts.complete(asked, 4),
    cuts.abandon(1, "late", 4),
  ):
    with pytest.raises(errors.FencedError, match="token 5"):
      run.perform(late)
  look = run.perform(cuts.look(1))
  assert look.is_open and run.perform(cuts.numbers()) == [1]
  assert run.perform(cuts.abandon(1, "a reason", 5))


def test_cut_is_given_up_although_nobody_said_why(tmp_path):
  run, asked = _ready(tmp_path)
  run.perform(cuts.abandon(1, "a reason"))
  run.store.delete(keys.cut_abandoned_key(1))  # its author died before it
  for look in (cuts.look, cuts.look_surely):
    assert not run.perform(look(1)).is_complete
    assert keys.ABANDONED in run.perform(look(1)).names
  assert run.perform(cuts.complete(asked)) is None
  with pytest.raises(errors.CorruptSnapshotError, match="no reason was left"):
    run.perform(restore.verified(1))
  assert run.perform(cuts.abandon(1, "again"))
  assert run.perform(cuts.reason(1)) == "again"


def test_completion_that_nobody_can_read_is_written_again(tmp_path):
  run, asked = _ready(tmp_path)
  run.perform(cuts.complete(asked))
  spoil(run, keys.cut_complete_key(1))
  assert run.perform(cuts.look(1)).is_complete  # as far as names tell
  run.perform(cuts.complete(asked))
  assert run.perform(restore.verified(1)).request == asked


# The lease while a syncer of token 5 takes its part, and whether it may.
LEASES = {
  "its own": (records.Lease("me.1", 5, 0), True),
  "lost": (None, True),
  "damaged": (records.DrawnToken(5), True),
  "another's by now": (records.Lease("you.1", 6, 0), False),
  "given up by another": (records.Lease("", 6, 0), False),
}


@pytest.mark.parametrize("case", LEASES)
def test_deposed_syncer_takes_no_part_in_a_cut(tmp_path, case):
  lease, may = LEASES[case]
  run = CutRun(tmp_path)
  cut = run.perform(cuts.request([0], 2)).cut
  if lease is not None:
    run.store.write(keys.SYNCER_LEASE, lease)
  fields = [head.to_fields() for head in run.heads()]
  part = records.CutHeads(cut, 0, 5, fields)
  assert run.perform(cuts.add_heads(part)) == may
  found = run.store.read(keys.cut_heads_key(cut), records.CutHeads)
  assert (found == part) == may


@pytest.mark.parametrize("lease", [None, records.DrawnToken(5)])
def test_heads_depose_a_syncer_whose_lease_tells_nothing(tmp_path, lease):
  run = CutRun(tmp_path)
  cut = run.perform(cuts.request([0], 2)).cut
  if lease is not None:
    run.store.write(keys.SYNCER_LEASE, lease)
  mine = [dataclasses.replace(head, token=5) for head in run.heads()]
  part = records.CutHeads(cut, 0, 5, [head.to_fields() for head in mine])
  run.store.write(keys.head_key(1), dataclasses.replace(mine[1], token=6))
  assert not run.perform(cuts.add_heads(part))
  assert run.store.read(keys.cut_heads_key(cut), records.CutHeads) is None


def test_cut_of_another_epoch_takes_no_part(tmp_path):
  run = CutRun(tmp_path)
  run.perform(cuts.request([0], 2))
  of_cut_2 = run.take_cut()
  for kind, key, add in (
    (records.CutPart, keys.cut_part_key(of_cut_2, 0), cuts.add_part),
    (records.CutHeads, keys.cut_heads_key(of_cut_2), cuts.add_heads),
  ):
    part = dataclasses.replace(run.store.read(key, kind), cut=1)
    later = dataclasses.replace(part, epoch=1)
    assert not run.perform(add(later))
    assert run.perform(add(part))


def test_second_life_of_an_island_does_not_replace_its_part(tmp_path):
  run = CutRun(tmp_path)
  run.perform(cuts.request([0], 2))
  part = run.save(1, 0, 3, [[0, 0, 0], [0, 0, 0]])
  assert run.perform(cuts.add_part(part))  # told twice, done once
  again = dataclasses.replace(part, incarnation=2)
  assert not run.perform(cuts.add_part(again))
  assert run.store.read(keys.cut_part_key(1, 0), records.CutPart) == part


def test_only_a_newer_syncer_replaces_the_heads(tmp_path):
  run = CutRun(tmp_path)
  run.perform(cuts.request([0], 2))
  parts = {
    token: records.CutHeads(1, 0, token, [dataclasses.asdict(h)])
    for token, h in ((1, run.head(0)), (2, run.head(0)))
  }
  assert run.perform(cuts.add_heads(parts[1]))
  assert run.perform(cuts.add_heads(parts[2]))
  assert not run.perform(cuts.add_heads(parts[1]))
  other = dataclasses.replace(parts[2], heads=[])  # nor does one of its token
  assert not run.perform(cuts.add_heads(other))
  assert run.store.read(keys.cut_heads_key(1), records.CutHeads) == parts[2]


def parts_of(tmp_path):
  run, _ = run_with_a_cut(tmp_path)
  return run.perform(restore.verified(1))


def with_position(parts, island, fragment, position):
  positions = [list(p) for p in parts.islands[island].positions]
  positions[fragment] = position
  return with_part(parts, island, positions=positions)


def with_part(parts, island, **changes):
  part = dataclasses.replace(parts.islands[island], **changes)
  return parts._replace(islands={**parts.islands, island: part})


def with_sent(parts, **changes):
  first, *rest = parts.contributions
  changed = dataclasses.replace(first, **changes)
  return parts._replace(contributions=(changed, *rest))


def with_head(parts, **changes):
  first, *rest = parts.heads
  return parts._replace(heads=(dataclasses.replace(first, **changes), *rest))


INCONSISTENT = {
  "merged before it was sent": (
    lambda p: with_position(p, 0, 0, [5, 0, 7]),
    "merged step 8 of island 0, which had published 7",
  ),
  "adopted before it was made": (
    lambda p: with_position(p, 1, 1, [6, 0, 8]),
    "island 1 had version 6 of fragment 1, whose head is 4",
  ),
  "on its way before it was sent": (
    lambda p: with_sent(p, step=17),
    "published after the cut",
  ),
  "on its way from a later life": (
    lambda p: with_sent(p, incarnation=9),
    "published after the cut",
  ),
  "stamped with the cut": (lambda p: with_sent(p, cut=1), "sent after the cut"),
  "from a later version": (
    lambda p: with_sent(p, base_version=6),
    "from a version after the cut",
  ),
  "head stamped with the cut": (
    lambda p: with_head(p, cut=1),
    "no head from before the cut",
  ),
  "head of another epoch": (
    lambda p: with_head(p, epoch=2),
    "no head from before the cut",
  ),
  "two syncers": (
    lambda p: p._replace(channel=dataclasses.replace(p.channel, token=2)),
    "of two syncers",
  ),
  "another island's part": (
    lambda p: p._replace(islands={**p.islands, 0: p.islands[1]}),
    "part of island 0 is of another island",
  ),
  "part of a run of fewer fragments": (
    lambda p: with_part(p, 0, positions=p.islands[0].positions[:1]),
    "part of island 0 is of another island or run",
  ),
  "two cuts": (
    lambda p: p._replace(heads_part=dataclasses.replace(p.heads_part, cut=2)),
    "several cuts",
  ),
  "heads of another epoch": (
    lambda p: p._replace(heads_part=dataclasses.replace(p.heads_part, epoch=1)),
    "several cuts or epochs",
  ),
  "channel of another cut": (
    lambda p: p._replace(channel=dataclasses.replace(p.channel, cut=2)),
    "several cuts",
  ),
  "part of another cut": (lambda p: with_part(p, 1, cut=2), "several cuts"),
  "part of another epoch": (lambda p: with_part(p, 1, epoch=1), "or epochs"),
  "heads in another order": (
    lambda p: p._replace(heads=p.heads[::-1]),
    "fragment 0 has no head",
  ),
  "sent of a fragment that is none": (
    lambda p: with_sent(p, fragment=2),
    "sent after the cut",
  ),
}


@pytest.mark.parametrize("name", INCONSISTENT)
def test_planted_inconsistency_is_found(tmp_path, name):
  parts = parts_of(tmp_path)
  assert cut_parts.inconsistency(parts) == ""
  plant, expected = INCONSISTENT[name]
  assert expected in cut_parts.inconsistency(plant(parts))


def test_late_publication_of_an_earlier_life_may_be_in_the_heads(tmp_path):
  parts = parts_of(tmp_path)._replace(contributions=())
  parts = with_position(parts, 0, 0, [5, 0, 7])
  assert "merged step 8" in cut_parts.inconsistency(parts)
  assert not cut_parts.inconsistency(with_part(parts, 0, incarnation=2))


def test_inconsistent_cut_is_never_completed(tmp_path):
  run, asked = _ready(tmp_path, base=1)
  with pytest.raises(errors.CorruptSnapshotError, match="version 1 of"):
    run.perform(cuts.complete(asked))
  assert not run.perform(cuts.look(1)).is_complete


@pytest.mark.parametrize(
  ("states", "deleted"),
  [
    ("", []),
    ("c", []),
    ("cc", []),
    ("ccc", [1]),
    ("cccc", [1, 2]),
    ("cac", [2]),
    ("cacaa", [2, 4]),
    ("aa", [1]),
    ("ccao", [3]),
    ("cbc", [2]),  # given up after it was complete
    ("bbb", [1, 2]),
  ],
)
def test_last_two_complete_cuts_and_the_newest_number_stay(states, deleted):
  names = {"c": {keys.COMPLETE}, "a": {keys.ABANDONED}, "o": set()}
  names["b"] = names["c"] | names["a"]
  looks = [
    cuts.Look(n, records.CutRequest(n, 0, []), frozenset(names[state]))
    for n, state in enumerate(states, 1)
  ]
  assert cuts.expired(looks, {}) == deleted


@pytest.mark.parametrize(
  ("versions", "deleted"),
  [
    ("1a 2b 3c", [1]),
    ("1a 2b 3c 3c 3c", [1, 3]),
    ("1a 2b 2c 2c", []),  # were 2 damaged, only the first would do
    ("1a 1b 1c 2c 2c", [1]),  # the third without 2, the second without c
    ("1a 1a 1a", [1]),  # all have the same
    ("1a ?? 2b 2b 2b", [2, 3]),  # what is not known may be damaged too
  ],
)
def test_cut_without_a_version_of_the_newest_stays(versions, deleted):
  payloads = {
    n: [f"globals/{p:04d}/{v}" for p, v in enumerate(pair) if v != "?"]
    for n, pair in enumerate(versions.split(), 1)
  }
  payloads[max(payloads)].append("payloads/0000.0000.0001.000000001")
  names = frozenset([keys.COMPLETE])
  looks = [cuts.Look(n, records.CutRequest(n, 0, []), names) for n in payloads]
  assert cuts.expired(looks, payloads) == deleted


def test_half_deleted_cut_is_no_cut(tmp_path):
  run = CutRun(tmp_path)
  run.take_cut()
  died, _ = run.perform_until(cuts.delete(1), 1)
  assert died  # what makes it usable goes first, and alone
  assert {"heads", "channel"} <= set(run.store.names(keys.cut_prefix(1)))
  with pytest.raises(errors.CorruptSnapshotError, match="never completed"):
    run.perform(restore.verified(1))
  run.perform(cuts.delete(1))
  assert run.perform(cuts.numbers()) == []
