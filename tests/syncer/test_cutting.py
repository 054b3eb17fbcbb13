import dataclasses

import pytest
from cut_builder import ISLANDS, CutRun, run_with_a_cut, spoil

from diloco.snapshots import cuts, keys, records, restore
from diloco.syncer import chores, core, cutting, grace, orders, quorum

SETTINGS = core.Settings(
  num_fragments=2,
  quorum=quorum.MinimumQuorum(2),
  grace=grace.FixedGrace(0.0),
  max_staleness=4,
)


class Seat:
  """A syncer without merges: its core, its keeper, and the store."""

  def __init__(self, run):
    self.run = run
    self.keeper = cutting.CutKeeper()
    self.chores = chores.Chores(self.keeper, keep_versions=2)
    heads = run.heads()
    clocks = [
      (h.version, {int(m): s for m, s in h.clock.items()}) for h in heads
    ]
    self.core = core.SyncerCore(
      SETTINGS, clocks, cut=run.perform(self.keeper.recover(heads))
    )

  def handle(self, event):
    for action in self.core.handle(event, 0.0):
      if isinstance(action, orders.Cut):
        self.run.perform(self.keeper.take_part(action.number, self.run.heads()))

  def look(self):
    for event in self.run.perform(self.keeper.look(self.core.channel)):
      self.handle(event)

  def scan(self):
    self.handle(orders.Arrived(list(self.run.waiting().values())))

  def delete(self, sent):
    self.run.perform(self.chores.delete(sent.key))


def positions(run, published):
  return [[h.version, 0, published] for h in run.heads()]


def channel_of(run, cut):
  record = run.store.read(keys.cut_channel_key(cut), records.CutChannel)
  if record is None:
    return None
  return [records.Contribution.from_fields(c).key for c in record.contributions]


def save_all(run, cut, published=16, life=1):
  for island in ISLANDS:
    run.save(cut, island, 20 + cut, positions(run, published), life)


def refuse(key):
  raise OSError("read-only")


def cut_under_way(run_dir):
  """A cut the syncer took part in when one contribution was waiting."""
  run = CutRun(run_dir)
  waiting = run.publish(0, 0, 0, 0, 8)
  seat = Seat(run)
  seat.scan()
  asked = run.perform(cuts.request(ISLANDS, 2))
  seat.look()
  return run, seat, waiting, asked


def test_syncer_takes_part_once_and_writes_the_channel_after_the_islands(
  tmp_path,
):
  run, seat, waiting, asked = cut_under_way(tmp_path)
  assert seat.core.cut == 1
  seat.look()
  late = run.publish(1, 1, 0, 0, 8)  # sent before its part
  seat.scan()
  unseen = run.publish(1, 0, 0, 0, 8)
  after = run.publish(1, 0, 0, 8, 16, cut=1)
  assert channel_of(run, 1) is None
  save_all(run, 1, published=8)
  seat.look()
  assert channel_of(run, 1) == sorted([waiting.key, late.key, unseen.key])
  assert after.key not in channel_of(run, 1)
  run.perform(cuts.complete(asked))
  seat.look()
  assert seat.core.channel is None and not run.perform(seat.keeper.look(None))
  assert run.perform(restore.verified(1))


def test_stamped_contribution_makes_the_syncer_take_part_first(tmp_path):
  run = CutRun(tmp_path)
  seat = Seat(run)
  run.perform(cuts.request(ISLANDS, 2))
  run.publish(0, 0, 0, 8, 16, cut=1)
  seat.scan()
  part = run.store.read(keys.cut_heads_key(1), records.CutHeads)
  assert [h["version"] for h in part.heads] == [0, 0]


@pytest.mark.parametrize("life", [1, 3])  # they may be an earlier one's
def test_channel_has_what_a_stale_listing_lacks(tmp_path, monkeypatch, life):
  run, seat, waiting, _ = cut_under_way(tmp_path)
  # The part names the last of them, and that one the step before it.
  unlisted = [run.publish(0, 1, 0, 0, 8), run.publish(0, 1, 0, 8, 16)]
  listed = run.store.names
  monkeypatch.setattr(
    run.store,
    "names",
    lambda prefix: [
      name for name in listed(prefix) if name not in {x.key for x in unlisted}
    ],
  )
  save_all(run, 1, life=life)
  seat.look()
  assert channel_of(run, 1) == sorted(x.key for x in (waiting, *unlisted))


def test_channel_that_is_written_stays_as_it_is(tmp_path, monkeypatch):
  run, seat, waiting, asked = cut_under_way(tmp_path)
  unseen = run.publish(1, 0, 0, 0, 8)
  save_all(run, 1, published=8)
  read = run.store.read_for_update

  def fails(key, kind):
    if key == keys.cut_heads_key(1):
      raise OSError("no answer")  # on the way to what is pinned
    return read(key, kind)

  with monkeypatch.context() as broken:
    broken.setattr(run.store, "read_for_update", fails)
    with pytest.raises(OSError, match="no answer"):
      seat.look()
  written = channel_of(run, 1)
  assert written == sorted([waiting.key, unseen.key])
  seat.delete(unseen)  # refused meanwhile; its cut may be complete by now
  seat.look()
  assert channel_of(run, 1) == written
  run.perform(cuts.complete(asked))
  assert run.store.keys(unseen.payload)


def test_merged_contribution_of_the_channel_keeps_its_payload(tmp_path):
  run, seat, sent, asked = cut_under_way(tmp_path)
  run.commit(0, 1, {0: 8}, value=1.0, cut=1)
  seat.delete(sent)
  assert run.waiting() == {} and run.store.keys(sent.payload)
  for island in ISLANDS:
    run.save(1, island, 8, [[0, 0, 8], [0, 0, 8]])
  seat.look()
  run.perform(cuts.complete(asked))
  seat.look()
  assert channel_of(run, 1) == [sent.key]
  assert run.store.keys(sent.payload)
  assert seat.keeper.is_pinned_payload(keys.global_prefix(0, 0, "s1.0.0"))
  assert not seat.keeper.is_pinned_payload(run.head(0).payload)


def test_cut_that_ended_unseen_keeps_what_it_points_to(tmp_path, monkeypatch):
  run, seat, sent, asked = cut_under_way(tmp_path)
  begun = run.head(0).payload
  save_all(run, 1, published=8)
  write = run.store.compare_and_set

  def unheard(key, record, generation):
    write(key, record, generation)
    raise OSError("no answer")

  with monkeypatch.context() as broken:
    broken.setattr(run.store, "compare_and_set", unheard)
    with pytest.raises(OSError, match="no answer"):
      seat.look()
  run.perform(cuts.complete(asked))
  run.commit(0, 1, {0: 8}, value=1.0, cut=1)
  run.perform(cuts.request(ISLANDS, 2))
  seat.look()
  run.commit(0, 2, {0: 8}, value=2.0, cut=2)
  seat.delete(sent)  # which the second cut has merged
  assert seat.keeper.is_pinned_payload(begun)
  seat.look()
  assert seat.keeper.is_pinned_payload(begun)
  assert not seat.keeper.is_pinned_payload(run.head(0).payload)
  assert run.store.keys(sent.payload)
  assert run.perform(restore.verified(1))
  run.perform(cuts.abandon(2, "for a test"))
  assert run.perform(cuts.request(ISLANDS, 2)).cut == 3
  seat.look()
  assert run.perform(restore.verified(1))


def test_what_a_cut_that_is_given_up_held_back_is_deleted(tmp_path):
  run, seat, sent, _ = cut_under_way(tmp_path)
  seat.delete(sent)
  assert run.store.keys(sent.payload)
  run.perform(cuts.abandon(1, "for a test"))
  seat.look()
  assert not run.store.keys(sent.payload)
  assert seat.core.channel is None
  assert not seat.keeper.is_pinned_payload(run.head(0).payload)


def test_payload_outlives_its_cut_while_its_record_cannot_be_deleted(
  tmp_path, monkeypatch
):
  run, seat, sent, _ = cut_under_way(tmp_path)

  with monkeypatch.context() as refusing:
    refusing.setattr(run.store, "delete", refuse)
    seat.delete(sent)
    run.perform(cuts.abandon(1, "for a test"))
    seat.look()
  assert run.waiting() and run.store.keys(sent.payload)
  run.perform(seat.chores.tidy(0.0))
  assert not run.waiting() and not run.store.keys(sent.payload)


def test_payload_the_store_keeps_once_is_deleted_with_the_next_cut(
  tmp_path, monkeypatch
):
  run, seat, sent, _ = cut_under_way(tmp_path)
  seat.delete(sent)

  run.perform(cuts.abandon(1, "for a test"))
  with monkeypatch.context() as refusing:
    refusing.setattr(run.store, "delete_tree", refuse)
    with pytest.raises(OSError, match="read-only"):
      seat.look()
  assert run.store.keys(sent.payload)
  asked = run.perform(cuts.request(ISLANDS, 2))
  seat.look()
  run.perform(cuts.abandon(asked.cut, "for a test"))
  seat.look()
  assert not run.store.keys(sent.payload)


def test_cut_that_came_and_ended_unseen_is_weighed_like_the_others(tmp_path):
  run = CutRun(tmp_path)
  seat = Seat(run)
  seat.look()  # and is stopped then
  run.take_cut()
  run.commit(0, 1, {}, value=1.0, cut=1)
  run.commit(1, 1, {}, value=1.0, cut=1)
  for _ in range(3):
    run.take_cut()  # all with versions that may be damaged
  seat.look()
  assert run.perform(cuts.numbers()) == [1, 3, 4]


def test_old_cuts_and_what_they_held_are_deleted(tmp_path):
  run, sent = run_with_a_cut(tmp_path)
  seat = Seat(run)
  assert seat.keeper.is_pinned(sent[0].key)
  assert seat.keeper.is_pinned(sent[1].key)
  seat.delete(sent[1])
  for version in (8, 9):
    run.commit(0, version, {0: 24, 1: 4}, value=float(version), cut=version - 7)
    asked = run.perform(cuts.request(ISLANDS, 2))
    seat.look()
    save_all(run, asked.cut, published=32)
    seat.look()
    run.perform(cuts.complete(asked))
    seat.look()
  assert run.perform(cuts.numbers()) == [2, 3]
  for contribution in sent:
    assert not run.store.keys(contribution.payload)


def test_cut_without_the_newest_version_outlives_others_that_have_it(tmp_path):
  run, sent = run_with_a_cut(tmp_path)
  seat = Seat(run)
  for _ in range(3):  # version 7 may be damaged: nothing follows it
    asked = run.perform(cuts.request(ISLANDS, 2))
    seat.look()
    save_all(run, asked.cut, published=32)
    seat.look()
    run.perform(cuts.complete(asked))
    seat.look()
  assert run.perform(cuts.numbers()) == [1, 3, 4]
  seat.delete(sent[0])
  assert run.store.keys(sent[0].payload)
  assert run.perform(restore.verified(1)).heads[0].version == 5


def test_successor_guards_the_cuts_it_finds(tmp_path):
  run, sent = run_with_a_cut(tmp_path)
  run.take_cut(published=(32, 8))
  keeper = cutting.CutKeeper()
  assert run.perform(keeper.recover(run.heads())) == 2
  assert keeper.is_pinned(sent[0].key)
  assert keeper.is_pinned_payload("globals/0000/000000005.s1.5.0")
  assert keeper.is_pinned_payload(run.head(0).payload)
  assert not keeper.is_pinned_payload("globals/0000/000000006.s1.6.0")


def test_successor_takes_the_cut_again_if_no_version_came_after_it(tmp_path):
  run = CutRun(tmp_path)
  first = Seat(run)
  asked = run.perform(cuts.request(ISLANDS, 2))
  first.look()
  for fragment in range(2):  # fenced by the second
    head = dataclasses.replace(run.head(fragment), token=2)
    run.store.write(keys.head_key(fragment), head)
  second = Seat(run)
  assert second.core.cut == 0
  second.look()
  part = run.store.read(keys.cut_heads_key(1), records.CutHeads)
  assert part.token == 2
  save_all(run, 1)
  first.look()  # deposed, and does not know
  second.look()
  run.perform(cuts.complete(asked))
  assert run.perform(restore.verified(1)).heads_part.token == 2


def test_successor_gives_up_a_cut_some_versions_came_after(tmp_path):
  run = CutRun(tmp_path)
  first = Seat(run)
  run.perform(cuts.request(ISLANDS, 2))
  first.look()
  run.commit(0, 1, {0: 8}, value=1.0, cut=1)
  second = Seat(run)
  assert second.core.cut == 1
  assert run.perform(cuts.reason(1)) == (
    "the syncer was replaced during the cut"
  )


def test_successor_leaves_a_cut_alone_whose_channel_is_known(tmp_path):
  run = CutRun(tmp_path)
  first = Seat(run)
  asked = run.perform(cuts.request(ISLANDS, 2))
  first.look()
  save_all(run, 1)
  first.look()
  second = Seat(run)
  assert second.core.cut == 1
  second.look()
  run.perform(cuts.complete(asked))
  second.look()
  assert second.keeper.is_pinned_payload(run.head(0).payload)


def test_cut_asked_for_before_a_return_is_given_up(tmp_path):
  run = CutRun(tmp_path)
  cut = run.take_cut()
  choice = run.perform(restore.choose(lambda _: "", lambda _: "", cut))
  run.perform(restore.restore(choice, lambda *_: None, lambda _: None))
  # There before, and not in the restore's listing, which was stale.
  old = records.CutRequest(2, 0, list(ISLANDS))
  run.store.write(keys.cut_request_key(2), old)
  seat = Seat(run)
  seat.look()
  assert seat.core.channel is None
  assert run.store.read(keys.cut_heads_key(2), records.CutHeads) is None
  assert "set back" in run.perform(cuts.reason(2))
  run.perform(cuts.request(ISLANDS, 2))
  seat.look()
  assert run.store.read(keys.cut_heads_key(3), records.CutHeads).epoch == 1


def test_deposed_syncer_leaves_a_cut_of_a_later_epoch_alone(tmp_path):
  run = CutRun(tmp_path)
  cut = run.take_cut()
  seat = Seat(run)
  choice = run.perform(restore.choose(lambda _: "", lambda _: "", cut))
  run.perform(restore.restore(choice, lambda *_: None, lambda _: None))
  asked = run.perform(cuts.request(ISLANDS, 2))
  seat.look()
  assert run.perform(cuts.look(asked.cut)).names == {"request"}


@pytest.mark.parametrize("known", [False, True])
def test_stamp_of_an_ended_cut_changes_nothing(tmp_path, known):
  run = CutRun(tmp_path)
  seat = Seat(run)
  run.perform(cuts.request(ISLANDS, 2))
  run.perform(cuts.abandon(1, "for a test"))
  for _ in range(2 * known):
    seat.look()
  run.publish(0, 0, 0, 0, 8, cut=1)
  seat.scan()
  assert run.store.read(keys.cut_heads_key(1), records.CutHeads) is None
  assert seat.core.channel is not None
  seat.look()
  seat.look()
  assert seat.core.channel is None


def test_damaged_part_ends_the_cut_and_not_the_syncer(tmp_path):
  run = CutRun(tmp_path)
  seat = Seat(run)
  run.perform(cuts.request(ISLANDS, 2))
  seat.look()
  save_all(run, 1)
  spoil(run, keys.cut_part_key(1, 0))
  seat.look()
  assert "damaged" in run.perform(cuts.reason(1))


def test_cut_of_which_nothing_can_be_read_is_given_up(tmp_path):
  run, seat, _, asked = cut_under_way(tmp_path)
  save_all(run, 1, published=8)
  seat.look()
  run.perform(cuts.complete(asked))
  spoil(run, keys.cut_request_key(1))
  spoil(run, keys.cut_complete_key(1))
  seat.look()
  assert "damaged" in run.perform(cuts.reason(1))


def test_part_that_the_store_refused_is_written_at_the_next_look(
  tmp_path, monkeypatch
):
  run = CutRun(tmp_path)
  seat = Seat(run)
  run.perform(cuts.request(ISLANDS, 2))
  with monkeypatch.context() as broken:
    broken.setattr(run.store, "compare_and_set", _refuse)
    with pytest.raises(OSError, match="full"):
      seat.look()
  run.commit(0, 1, {0: 8}, value=1.0, cut=1)
  seat.look()
  part = run.store.read(keys.cut_heads_key(1), records.CutHeads)
  assert [h["version"] for h in part.heads] == [0, 0]


def _refuse(*args):
  raise OSError("the disk is full")


def test_cut_that_completes_between_two_looks_keeps_its_pins(tmp_path):
  run, seat, sent, asked = cut_under_way(tmp_path)
  first = run.head(0).payload
  save_all(run, 1, published=8)
  seat.look()
  run.perform(cuts.complete(asked))
  run.commit(0, 1, {0: 8}, value=1.0, cut=1)
  seat.delete(sent)  # merged
  run.perform(cuts.request(ISLANDS, 2))
  seat.look()
  assert seat.core.cut == 2
  assert seat.keeper.is_pinned_payload(first)
  run.perform(cuts.abandon(2, "for a test"))
  seat.look()
  assert run.store.keys(sent.payload)
  assert run.perform(restore.verified(1))


@pytest.mark.parametrize("stamped", [False, True])
@pytest.mark.parametrize("listed", [[], ["request"]])
def test_successor_with_a_stale_listing_guards_what_is_there(
  tmp_path, monkeypatch, stamped, listed
):
  run = CutRun(tmp_path)
  sent = run.publish(0, 0, 0, 0, 8)
  run.take_cut()
  cut = run.take_cut([sent])
  if stamped:
    run.commit(0, 1, {0: 8}, value=1.0, cut=cut)
  names = run.store.names

  def stale(prefix):
    if prefix == "cuts":
      return ["000001", "000002"] if listed else ["000001"]
    return listed if prefix == keys.cut_prefix(cut) else names(prefix)

  monkeypatch.setattr(run.store, "names", stale)
  keeper = cutting.CutKeeper()
  assert run.perform(keeper.recover(run.heads())) == cut
  assert keeper.is_pinned(sent.key)


def test_what_an_island_sent_that_is_not_asked_for_its_part_is_on_its_way(
  tmp_path,
):
  run = CutRun(tmp_path)
  absent = run.publish(0, 2, 0, 0, 8)
  seat = Seat(run)
  seat.scan()
  run.perform(cuts.request(ISLANDS, 2))  # island 2 is dead
  seat.look()
  unseen = run.publish(1, 2, 0, 0, 8)
  run.publish(1, 2, 0, 8, 16, cut=1)  # it is back, and knows of the cut
  save_all(run, 1)
  seat.look()
  assert channel_of(run, 1) == [absent.key, unseen.key]


def test_what_a_later_life_sent_is_not_of_its_earlier_ones_part(tmp_path):
  run = CutRun(tmp_path)
  seat = Seat(run)
  run.perform(cuts.request(ISLANDS, 2))
  seat.look()
  save_all(run, 1, published=16)
  own = run.publish(0, 0, 0, 0, 16)
  later = run.publish(0, 0, 0, 0, 8)
  again = dataclasses.replace(later, incarnation=2)
  run.delete(later)
  run.store.write(keys.contribution_key(again.key), again)
  behind = run.publish(1, 1, 0, 0, 24)  # after its part, with the old stamp
  seat.look()
  assert channel_of(run, 1) == [own.key]
  assert {again.key, behind.key} <= set(run.waiting())


def test_what_the_heads_hold_is_not_on_its_way_though_its_record_is_there(
  tmp_path,
):
  run = CutRun(tmp_path)
  run.commit(0, 1, {0: 8}, value=1.0)
  merged = run.publish(0, 0, 0, 0, 8)  # its deletion is still to come
  waiting = run.publish(0, 0, 1, 8, 16)
  seat = Seat(run)
  run.perform(cuts.request(ISLANDS, 2))
  seat.look()
  save_all(run, 1)
  seat.look()
  assert channel_of(run, 1) == [waiting.key]
  assert merged.key in run.waiting()


# Of a contribution like the one of the channel: what differs, and whether it
# is on its way still. Heads are at version 3, with island 0's steps up to 8;
# that island's life 2 has published up to step 16 before its part.
SENT = {
  "like it": ({}, True),
  "sent after the cut": ({"cut": 4}, False),
  "of another epoch": ({"epoch": 2}, False),
  "of no fragment": ({"fragment": 2}, False),
  "of a fragment before the first": ({"fragment": -1}, False),
  "merged": ({"step": 8}, False),
  "from a version to come": ({"base_version": 4}, False),
  "the last it counts on": ({"step": 16}, True),
  "later than that": ({"step": 17}, False),
  "of an earlier life": ({"incarnation": 1}, True),
  "of an earlier life, and longer": ({"incarnation": 1, "step": 17}, True),
  "of an earlier life, of later rows": (
    {"incarnation": 1, "first_step": 16, "step": 18},
    False,
  ),
  "of a later life": ({"incarnation": 3}, False),
  "of who was not asked": ({"island": 5, "step": 99, "incarnation": 9}, True),
}


@pytest.mark.parametrize("case", SENT)
def test_channel_of_a_cut_has_what_was_sent_before_it_and_not_merged(
  tmp_path, case
):
  changes, expected = SENT[case]
  run = CutRun(tmp_path)
  heads = [run.commit(p, 3, {0: 8}, 1.0) for p in range(2)]
  part = records.CutHeads(cut=4, epoch=1, token=1, heads=[])
  owner = records.CutPart(4, 1, 0, 2, 20, "", 0, [[3, 0, 16], [3, 0, 16]])
  plain = {"incarnation": 2, "epoch": 1, "cut": 3}
  one = dataclasses.replace(run.publish(0, 0, 3, 8, 12), **plain | changes)
  assert cutting._is_of_the_channel(one, part, heads, {0: owner}) == expected


def test_payloads_of_the_heads_of_an_open_cut_are_pinned(tmp_path):
  run, seat, _, _ = cut_under_way(tmp_path)
  payloads = [head.payload for head in run.heads()]
  assert all(map(seat.keeper.is_pinned_payload, payloads))
  assert not seat.keeper.is_pinned_payload(payloads[0] + "x")


def test_without_a_cut_there_is_nothing_to_do(tmp_path):
  seat = Seat(CutRun(tmp_path))
  assert seat.run.perform(seat.keeper.look(None)) == []


def test_syncer_is_in_the_newest_timeline_that_any_head_is_in(tmp_path):
  run = CutRun(tmp_path)
  run.store.write(keys.EPOCH, records.Epoch(1, 0))
  head = dataclasses.replace(run.head(1), epoch=1)
  run.store.write(keys.head_key(1), head)
  seat = Seat(run)
  run.perform(cuts.request(ISLANDS, 2))
  seat.look()
  part = run.store.read(keys.cut_heads_key(1), records.CutHeads)
  assert part is not None and part.epoch == 1
