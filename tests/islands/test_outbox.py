"""The queue of publications, without a store or a thread."""

import itertools

import pytest

from diloco.islands import core, outbox


def publish(box, fragment, first_step, step, base=0):
  action = core.Publish(fragment, base, first_step, step, "schedule")
  dropped = box.submit(action, f"{fragment}:{step}")
  return [(d.action.fragment, d.action.step, d.reason) for d in dropped]


def queue(box):
  return [(e.action.fragment, e.action.step) for e in box.waiting]


def test_what_contains_another_takes_its_place_in_the_queue():
  box = outbox.Outbox()
  for fragment in range(3):
    assert publish(box, fragment, 0, 4) == []
  assert publish(box, 0, 0, 8) == [(0, 4, "superseded")]
  assert publish(box, 1, 0, 8) == [(1, 4, "superseded")]
  assert queue(box) == [(0, 8), (1, 8), (2, 4)]


def test_what_contains_two_takes_the_place_of_the_first():
  box = outbox.Outbox()
  for fragment, first, step in ((2, 0, 4), (0, 0, 4), (1, 0, 4), (0, 4, 8)):
    publish(box, fragment, first, step)
  assert len(publish(box, 0, 0, 12)) == 2
  assert queue(box) == [(2, 4), (0, 12), (1, 4)]


@pytest.mark.parametrize("every", [2, 3])
def test_every_fragment_gets_its_turn_on_a_link_that_is_too_slow(every):
  # One publication leaves every so many steps; each step brings another.
  fragments = 24
  box = outbox.Outbox()
  left = {p: [0] for p in range(fragments)}
  for step in range(1, 40 * fragments):
    publish(box, step % fragments, 0, step)
    if step % every == 0 and (entry := box.take()):
      left[entry.action.fragment].append(step)
      box.committed()
  gaps = [
    b - a for steps in left.values() for a, b in itertools.pairwise(steps[1:])
  ]
  assert max(gaps) == every * fragments


def test_what_is_not_contained_waits_its_turn_behind_the_older_one():
  box = outbox.Outbox()
  publish(box, 0, 0, 4)
  publish(box, 1, 0, 4)
  assert publish(box, 0, 4, 8, base=1) == []
  assert queue(box) == [(0, 4), (1, 4), (0, 8)]


def test_third_of_a_fragment_pushes_the_oldest_out_and_all_stay_in_order():
  box = outbox.Outbox()
  publish(box, 0, 0, 4)
  publish(box, 1, 0, 4)
  publish(box, 0, 4, 8, base=1)
  publish(box, 2, 0, 4)
  dropped = publish(box, 0, 8, 12, base=2)
  assert dropped == [(0, 4, "store_unreachable")]
  assert queue(box) == [(0, 8), (1, 4), (0, 12), (2, 4)]


def test_what_fails_gives_way_only_to_what_contains_it():
  box = outbox.Outbox()
  publish(box, 0, 0, 4)
  assert box.take().content == "0:4"
  assert box.give_way() is None
  publish(box, 0, 4, 8, base=1)
  assert box.give_way() is None
  publish(box, 0, 0, 9)
  assert box.give_way().reason == "store_unreachable"
  assert box.busy is None


def test_nothing_that_waits_leaves_a_stopped_outbox():
  box = outbox.Outbox()
  publish(box, 0, 0, 4)
  box.stop()
  assert box.take() is None and box.busy is None
  (dropped,) = box.close()
  assert dropped.reason == "island_stopped"


def test_no_values_are_kept_of_what_has_gone():
  box = outbox.Outbox()
  publish(box, 0, 0, 4)
  publish(box, 1, 0, 4)
  first, second = ticket = box.ticket([core.Position(0, 0, 4)] * 2).awaited
  publish(box, 0, 0, 8)
  box.take()
  box.committed()
  box.close()
  assert [entry.content for entry in ticket] == [None, None]
  assert outbox.settled(outbox.Ticket((first,), (first,)))
  assert outbox.settled(outbox.Ticket((second,), (second,))) is False


# How far fragment 0 is when a state is copied, and what that state counts on.
BEFORE, AFTER = core.Position(0, 0, 4), core.Position(2, 8, 8)


def drop_the_first(box):
  publish(box, 0, 4, 8, base=1)
  publish(box, 0, 8, 12, base=2)


def test_save_before_a_publication_that_is_lost_does_not_count():
  box = outbox.Outbox()
  publish(box, 0, 0, 4)
  ticket = box.ticket([BEFORE])
  assert outbox.settled(ticket) is None
  drop_the_first(box)
  assert outbox.settled(ticket) is False


def test_saves_settle_again_after_a_publication_was_lost():
  box = outbox.Outbox()
  publish(box, 0, 0, 4)
  drop_the_first(box)
  ticket = box.ticket([core.Position(2, 8, 12)])
  for _ in range(2):
    assert outbox.settled(ticket) is None
    box.take()
    box.committed()
  assert outbox.settled(ticket)


def test_save_outlives_the_loss_of_what_a_newer_version_gave_up():
  box = outbox.Outbox()
  publish(box, 0, 0, 4)
  publish(box, 0, 4, 8, base=1)
  ticket = box.ticket([AFTER])  # version 2 has come, nothing published since
  # What was given up may be merged all the same, so its end is waited for.
  assert outbox.settled(ticket) is None
  publish(box, 0, 8, 12, base=2)  # pushes the first one out
  box.take()
  box.committed()
  assert outbox.settled(ticket)


def test_save_counts_on_what_contains_its_publication():
  for committed in (True, False):
    box = outbox.Outbox()
    publish(box, 0, 0, 4)
    ticket = box.ticket([BEFORE])
    publish(box, 0, 0, 8)
    assert box.take().action.step == 8
    if committed:
      box.committed()
    else:
      box.close()
    assert outbox.settled(ticket) is committed


def test_save_counts_on_what_its_publication_gave_way_to():
  for committed in (True, False):
    box = outbox.Outbox()
    publish(box, 0, 0, 4)
    box.take()
    ticket = box.ticket([BEFORE])
    publish(box, 0, 0, 8)
    assert box.give_way().action.step == 4
    assert outbox.settled(ticket) is None
    box.take()
    if committed:
      box.committed()
    else:
      box.close()
    assert outbox.settled(ticket) is committed


def test_later_publications_are_not_waited_for():
  box = outbox.Outbox()
  ticket = box.ticket([core.Position(0, 0, 0)])
  publish(box, 0, 0, 4)
  assert outbox.settled(ticket)


def test_error_that_keeps_a_fragment_from_leaving_does_not_hide_for_ever():
  # Publications come faster than one is given up, and other fragments leave.
  box = outbox.Outbox()
  publish(box, 0, 0, 1)
  with pytest.raises(KeyError):
    for step in range(1, 6):
      assert box.take().action.fragment == 0
      publish(box, 1, 0, step)
      publish(box, 0, 0, step + 1)
      box.failed(KeyError("w"))
      assert box.give_way()
      assert box.take().action.fragment == 1
      box.committed()
  assert step == 4


def test_error_that_passed_is_forgotten():
  box = outbox.Outbox()
  for step in range(1, 12):
    publish(box, 0, 0, step)
    box.take()
    box.failed(MemoryError())
    box.committed()


def test_script_sends_one_after_another_and_tries_again_what_failed():
  box, told = outbox.Outbox(retry_secs=(1.0, 4.0)), []

  def send(action, content):
    yield f"write {content}"

  script = box.send_all(
    send,
    lambda dropped: told.append(dropped.reason),
    lambda action, error: told.append(str(error)),
  )
  assert [next(script), next(script)] == [None, None]  # woken for nothing
  publish(box, 0, 0, 4)
  publish(box, 1, 0, 4)
  assert next(script) == "write 0:4"
  assert script.throw(OSError("full")) == 1.0
  assert next(script) == "write 0:4"
  assert script.throw(OSError("full")) == 2.0
  publish(box, 0, 0, 8)  # contains it, and has its own turn
  assert next(script) == "write 1:4"
  assert told == ["full", "full", "store_unreachable"]
  assert next(script) == "write 0:8"
  assert next(script) is None and box.busy is None
