import itertools

import pytest

from diloco.fragments import schedule
from diloco.islands import core


def _core(
  adoption="overwrite", follow=True, step=0, fragments=4, every=4, island=0
):
  return core.IslandCore(
    schedule.Schedule(every, fragments),
    island,
    adoption,
    follow=follow,
    step=step,
    origins=[core.Origin(0, step)] * fragments,
  )


def _step(state, ready=(), board=None):
  return state.handle(core.Stepped(state.step + 1, ready, board))


def _board(versions, **rounds):
  return core.Board(versions, {int(p[1:]): i for p, i in rounds.items()})


def _waiting(*, step=0, follow=False, **fields):
  """An island that waits for answers at every second step, for 3 s."""
  return core.IslandCore(
    schedule.Schedule(2, 1),
    0,
    "overwrite",
    follow=follow,
    step=step,
    origins=[core.Origin(0, 0)],
    wait_secs=3.0,
    **fields,
  )


def test_next_step_waits_for_the_answer_but_not_for_ever():
  state = _waiting()
  assert not state.handle(core.Stepped(1, now=10.0)) and not state.holds(10.0)
  assert state.handle(core.Stepped(2, now=11.0)) and state.holds(11.0)
  state.handle(core.Stepped(2, now=13.5))  # nothing has come
  assert state.holds(13.9) and not state.holds(14.0)
  state.handle(core.Stepped(2, [core.Ready(0, 1, 2)], now=13.9))
  assert not state.holds(13.9)
  for step in (3, 4):
    state.handle(core.Stepped(step, now=20.0))
  assert state.holds(20.0)
  state.handle(core.Refused())
  ready = [core.Ready(0, 1, 2)]
  state.handle(core.Stepped(4, ready, now=20.1))  # fetched before
  assert state.holds(20.1)
  state.handle(core.Stepped(4, ready, now=20.2))
  assert not state.holds(20.2)


def test_island_whose_publications_nobody_looks_at_does_not_wait():
  state = _waiting()
  for step, now in ((1, 9.9), (2, 10.0)):
    state.handle(core.Stepped(step, now=now))
  state.handle(core.Suspended(2.0, 10.5))
  assert not state.holds(10.5) and not state.holds(12.4)
  assert state.holds(12.5)  # it may be heard again
  state.handle(core.Suspended(2.0, 10.5))
  state.handle(core.Refused())
  assert state.holds(10.5)  # before it does a step it begins anew


def test_first_step_of_a_life_waits_for_what_it_published_before_it():
  state = _waiting(step=1, follow=True)
  board = _board([0], p0=[1])
  followed = state.handle(core.Stepped(1, board=board, now=10.0))
  assert [type(action) for action in followed] == [core.Publish]
  assert state.holds(12.9) and not state.holds(13.0)


def test_island_that_waits_for_its_own_answer_takes_no_other():
  state = _waiting(passes_by=2)

  def moment(step, now, *ready):
    return state.handle(core.Stepped(step, ready, now=now))

  assert not moment(1, 1.0, core.Ready(0, 1, 0))  # it would cost step 1
  assert moment(2, 2.0) == [core.Publish(0, 0, 0, 2, "schedule")]
  assert not moment(2, 2.5, core.Ready(0, 2, 0)) and state.holds(2.5)
  adopted = moment(2, 2.9, core.Ready(0, 3, 2))
  assert adopted == [core.Adopt(0, 3, 2, 2, 2)] and not state.holds(2.9)
  moment(3, 3.0)
  assert moment(4, 4.0) == [core.Publish(0, 3, 2, 4, "schedule")]
  other = core.Ready(0, 5, 2)
  assert not moment(4, 6.9, other) and not state.holds(7.0)
  assert moment(5, 8.0, other) == [core.Adopt(0, 5, 4, 4, 5)]  # it went on
  assert moment(6, 8.1) == [core.Publish(0, 5, 5, 6, "schedule")]
  # What it sent is too stale by now, and will never be merged.
  assert moment(6, 8.2, core.Ready(0, 8, 2)) == [core.Adopt(0, 8, 6, 6, 6)]
  # What an earlier life sent and was merged late counts, whoever waits.
  assert moment(6, 8.3, core.Ready(0, 9, 9))[0].muted_until == 9


def test_island_that_does_not_wait_is_never_held():
  state = _core()
  assert _step(state) and state.unanswered and not state.holds(0.0)


def test_one_fragment_leaves_at_each_step():
  state = _core()
  published = [_step(state) for _ in range(8)]
  assert [[a.fragment for a in actions] for actions in published] == [
    [1], [2], [3], [0], [1], [2], [3], [0]
  ]  # fmt: skip
  assert published[0] == [core.Publish(1, 0, 0, 1, "schedule")]
  # Nothing was adopted: the next publication contains the one before.
  assert published[4] == [core.Publish(1, 0, 0, 5, "schedule")]


@pytest.mark.parametrize(
  ("adoption", "lost", "next_first_step"),
  [
    ("overwrite", (1, 1, 3), 3),
    ("blend", (1, 1, 3), 3),
    ("carry", (1, 3, 3), 1),
    ("eager", (1, 3, 3), 1),
  ],
)
def test_adoption_gives_up_what_came_after_the_publication(
  adoption, lost, next_first_step
):
  state = _core(adoption)
  _step(state)  # publishes fragment 1 at step 1
  _step(state)
  actions = _step(state, ready=[core.Ready(1, 1, 1)])
  assert core.Adopt(1, 1, *lost) in actions
  _step(state)
  (publish,) = _step(state)
  assert publish == core.Publish(1, 1, next_first_step, 5, "schedule")


def test_adoption_without_a_publication_gives_up_everything_or_carries_it():
  for adoption, lost in [("overwrite", (0, 0, 2)), ("carry", (0, 2, 2))]:
    state = _core(adoption)
    _step(state)
    actions = _step(state, ready=[core.Ready(3, 1, 0)])
    assert core.Adopt(3, 1, *lost) in actions
  (publish,) = _step(state)  # carry: all its steps are still to be published
  assert publish == core.Publish(3, 1, 0, 3, "schedule")


def test_island_follows_a_round_that_would_close_without_it():
  state = _core(island=2)
  _step(state)
  actions = _step(state, board=_board([0] * 4, p3=[0, 1]))
  assert core.Publish(3, 0, 0, 2, "follow") in actions
  again = _step(state, board=_board([0] * 4, p3=[0, 1]))
  assert not [a for a in again if a.fragment == 3]


@pytest.mark.parametrize(
  ("board", "follow"),
  [
    (_board([0] * 4, p0=[0, 1]), True),  # already in it
    (_board([1, 0, 0, 0], p0=[1]), True),  # a round for a version not here yet
    (_board([0] * 4, p0=[1]), False),  # told not to
  ],
)
def test_island_does_not_follow(board, follow):
  state = _core(follow=follow)
  actions = _step(state, board=board)
  assert [a.fragment for a in actions] == [1]


def test_followed_fragment_is_published_again_after_h_steps():
  state = _core()
  _step(state, board=_board([0] * 4, p3=[1]))  # follows at step 1
  steps = []
  for _ in range(12):
    ready = [core.Ready(3, 1, 1)] if state.step == 1 else ()
    actions = _step(state, ready)
    steps += [
      state.step
      for a in actions
      if isinstance(a, core.Publish) and a.fragment == 3
    ]
  # Its grid points 3, 7 and 11 come too early; the faster island set the pace.
  assert steps == [5, 9, 13]


@pytest.mark.parametrize("adoption", ["overwrite", "blend", "carry"])
@pytest.mark.parametrize("step", [0, 100])
@pytest.mark.parametrize("fragment", [0, 1])
def test_no_progress_waits_longer_than_h_steps(adoption, step, fragment):
  # All that can happen to a fragment between any two steps: nothing, a round
  # to follow, a version with all that was published.
  every = 3
  for events in itertools.product(("", "round", "version"), repeat=7):
    state = _core(adoption, step=step, fragments=2, every=every)
    for event in events:
      base, _, published = state.positions[fragment]
      board, ready = None, []
      if event == "round":
        versions = [0, 0]
        versions[fragment] = base
        board = core.Board(versions, {fragment: [7]})
      elif event == "version":
        ready = [core.Ready(fragment, base + 1, published)]
      unanswered = len(state._fragments[fragment].published)
      before = state.positions[fragment].published
      _step(state, ready, board)
      if adoption == "carry" and unanswered >= 2:
        break  # from here on it waits longer for an answer
      assert state.step - before <= every
      # What H steps have passed for is published, or was given up.
      assert state.step - state.positions[fragment].published < every, events


def test_steps_already_offered_to_an_older_version_are_not_published_again():
  state = _core()
  _step(state)  # fragment 1 published at step 1
  for _ in range(3):
    _step(state, board=_board([0, 1, 0, 0]))  # its next version exists
  actions = _step(state)
  assert [a.fragment for a in actions if isinstance(a, core.Publish)] == []


def test_old_version_is_not_adopted_again():
  state = _core()
  _step(state, ready=[core.Ready(0, 3, 0)])
  again = _step(state, ready=[core.Ready(0, 3, 0)])
  assert not [a for a in again if isinstance(a, core.Adopt)]
  assert state.positions[0].base == 3


def test_restarted_island_publishes_every_fragment_within_h_steps():
  state = _core(step=100)
  actions = [a for _ in range(4) for a in _step(state)]
  assert [a.fragment for a in actions] == [1, 2, 3, 0]
  assert all(a.first_step == 100 for a in actions)


def test_drain_publishes_exactly_what_is_unpublished():
  state = _core()
  _step(state)
  _step(state)
  actions = state.handle(core.Drain())
  assert {a.fragment: (a.first_step, a.step) for a in actions} == {
    0: (0, 2), 1: (0, 2), 3: (0, 2)
  }  # fmt: skip
  assert all(a.trigger == "drain" for a in actions)
  assert state.handle(core.Drain()) == []


def test_in_flight_fragments_are_named_until_answered():
  state = _core()
  _step(state)
  assert state.in_flight == [1]
  _step(state, ready=[core.Ready(1, 1, 1)])
  assert state.in_flight == [2]


@pytest.mark.parametrize(("merged_step", "kept_from"), [(1, 1), (5, 5), (0, 5)])
def test_progress_after_the_merged_publication_is_carried_on(
  merged_step, kept_from
):
  # Fragment 1 is published at steps 1 and 5 with one base. If the version has
  # the first of them, the second will be refused and its news goes out again;
  # if it has none of them, the second may still join the next round.
  state = _core("carry")
  for _ in range(5):
    _step(state)
  (adopt,) = [
    a
    for a in _step(state, ready=[core.Ready(1, 1, merged_step)])
    if isinstance(a, core.Adopt)
  ]
  assert adopt == core.Adopt(1, 1, kept_from, 6, 6)
  for _ in range(2):
    _step(state)
  (publish,) = _step(state)
  assert publish == core.Publish(1, 1, kept_from, 9, "schedule")


def _restarted(origins, step, adoption="carry", every=4):
  return core.IslandCore(
    schedule.Schedule(every, len(origins)),
    0,
    adoption,
    follow=True,
    step=step,
    origins=origins,
    cut=3,
  )


def test_muted_fragment_publishes_nothing_until_it_is_rebased():
  state = _restarted([core.Origin(5, 12), core.Origin(6, 10)], step=10)
  seen = {}
  for _ in range(8):
    for action in _step(state, board=_board([5, 6], p0=[1])):
      seen.setdefault(type(action).__name__, []).append(
        (state.step, action.fragment, getattr(action, "first_step", None))
      )
  assert seen["Rebase"] == [(12, 0, None)]
  # At step 12 nothing is new; then the open round is followed.
  assert next(s for s in seen["Publish"] if s[1] == 0) == (13, 0, 12)
  assert min(s for s in seen["Publish"] if s[1] == 1)[2] == 10


def test_version_that_arrives_for_a_muted_fragment_keeps_it_muted():
  state = _restarted([core.Origin(5, 13)], step=10)
  (adopt,) = _step(state, ready=[core.Ready(0, 6, 13)])
  assert adopt == core.Adopt(0, 6, 11, 11, 11, muted_until=13)
  # One that does not have all of those steps shortens nothing: the others are
  # published as well.
  (adopt,) = _step(state, ready=[core.Ready(0, 7, 11)])
  assert adopt == core.Adopt(0, 7, 12, 12, 12, muted_until=13)
  assert _step(state) == [core.Rebase(0, 13, 7)]
  assert state.positions == (core.Position(7, 13, 13),)


def test_version_with_steps_of_an_earlier_life_that_lie_ahead_mutes():
  state = _restarted([core.Origin(5, 10)], step=10, every=100)
  _step(state)
  (adopt,) = _step(state, ready=[core.Ready(0, 6, 14)])
  assert adopt == core.Adopt(0, 6, 12, 12, 12, muted_until=14)
  state = _restarted([core.Origin(5, 10)], step=10, every=100)
  for _ in range(3):
    _step(state)
  # Rows 11 and 12 are merged, 13 cannot be told from them and is given up.
  (adopt,) = _step(state, ready=[core.Ready(0, 6, 12)])
  assert adopt == core.Adopt(0, 6, 14, 12, 14, muted_until=12)
  assert state.positions == (core.Position(6, 14, 14),)


def test_part_of_a_cut_is_taken_before_a_version_sent_after_it_is_adopted():
  state = _restarted([core.Origin(5, 10), core.Origin(5, 10)], step=10)
  actions = _step(state, ready=[core.Ready(0, 6, 0, cut=4)])
  assert actions[0] == core.Cut(4, (core.Position(5, 10, 10),) * 2)
  assert isinstance(actions[1], core.Adopt)
  (publish,) = [a for a in state.handle(core.Drain()) if a.fragment == 1]
  assert publish.cut == 4
  again = state.handle(core.Stepped(11, cut=4))
  assert not [a for a in again if isinstance(a, core.Cut)]
  (cut, *_) = state.handle(core.Stepped(11, cut=5))
  assert cut.number == 5 and cut.positions[1].published == 11


def _told():
  """An island of two fragments that was told, and that moment is over."""
  state = _restarted([core.Origin(5, 10), core.Origin(6, 10)], step=10)
  _step(state)
  assert state.handle(core.Refused()) == [core.Resync()]
  assert state.handle(core.Stepped(11)) == []
  return state


def test_told_island_takes_all_fragments_together_or_none():
  state = _told()
  first, second = core.Ready(0, 5, 0), core.Ready(1, 6, 0)
  # What is not offered again does not count later.
  for part in ([first], [second], [first, first], []):
    assert _step(state, ready=part) == []
    assert state.resyncing
  # The same version again is taken.
  assert _step(state, ready=[first, second]) == [
    core.Adopt(0, 5, 10, 10, 16, resync=True),
    core.Adopt(1, 6, 10, 10, 16, resync=True),
  ]
  assert not state.resyncing
  assert state.positions == (core.Position(5, 16, 16), core.Position(6, 16, 16))
  # From now on one fragment comes after the other again.
  (adopt, *_) = _step(state, ready=[core.Ready(1, 7, 0)])
  assert adopt.version == 7 and not adopt.resync


def test_told_island_publishes_nothing_until_it_has_all_fragments():
  state = _told()
  board = _board([5, 6], p0=[1], p1=[1])
  published = [_step(state, board=board) for _ in range(8)]
  assert not any(published) and not state.handle(core.Drain())
  _step(state, ready=[core.Ready(0, 5, 0), core.Ready(1, 6, 0)])
  actions = [a for _ in range(4) for a in _step(state, board=board)]
  assert {a.fragment for a in actions} == {0, 1}
  assert all(a.first_step == 20 for a in actions)


def test_resync_never_goes_back_to_a_version_before_the_one_there_is():
  state = _told()
  assert _step(state, [core.Ready(0, 5, 0), core.Ready(1, 5, 0)]) == []
  assert len(_step(state, [core.Ready(0, 5, 0), core.Ready(1, 6, 0)])) == 2


def test_version_at_hand_when_an_island_is_told_does_not_count():
  at_hand = [core.Ready(0, 6, 0), core.Ready(1, 7, 0)]
  for offered in (at_hand, at_hand[:1]):
    state = _restarted([core.Origin(5, 10), core.Origin(6, 10)], step=10)
    state.handle(core.Refused())
    assert _step(state, ready=offered) == []
    assert _step(state, ready=[core.Ready(1, 7, 0)]) == []
    assert len(_step(state, ready=at_hand)) == 2


def test_island_that_is_told_again_while_it_mends_goes_on():
  state = _told()
  assert state.handle(core.Refused()) == []
  ready = [core.Ready(0, 5, 0), core.Ready(1, 6, 0)]
  assert len(_step(state, ready=ready)) == 2
  assert state.handle(core.Refused()) == [core.Resync()]


def test_part_of_a_cut_is_taken_before_the_versions_of_a_resync():
  state = _told()
  assert _step(state, ready=[core.Ready(0, 6, 0, cut=4)]) == []
  ready = [core.Ready(0, 6, 0, cut=4), core.Ready(1, 6, 0, cut=4)]
  cut, *adopted = _step(state, ready=ready)
  assert cut.number == 4 and [a.resync for a in adopted] == [True, True]


@pytest.mark.parametrize("merged_step", [4, 8, 28])
def test_unheard_merge_of_any_publication_costs_no_step(merged_step):
  state = _core("carry", fragments=1, follow=False)
  published = []
  while state.step < 30:
    published += [a.step for a in _step(state)]
  # The third waits: it would push the second out of memory.
  assert published == [4, 8, 28]
  (adopt,) = _step(state, ready=[core.Ready(0, 1, merged_step)])
  assert adopt.kept_from == merged_step
  assert adopt.lost_from == adopt.lost_to


@pytest.mark.parametrize("merged_step", [4, 8, 48])
def test_of_many_unanswered_publications_the_first_and_the_last_are_known(
  merged_step,
):
  state = _core("carry", fragments=1, follow=False)
  published = []
  while state.step < 50:
    published += [a.step for a in _step(state)]
  assert published == [4, 8, 28, 48]
  # The values are kept of the same ones: `swap.Swap.published`.
  (adopt,) = _step(state, ready=[core.Ready(0, 1, merged_step)])
  assert adopt.kept_from == merged_step
  assert state.positions[0].first_step == merged_step


def test_drain_publishes_what_waits_for_an_answer():
  state = _core("carry", fragments=1, follow=False)
  for _ in range(12):
    _step(state)
  (publish,) = state.handle(core.Drain())
  assert publish == core.Publish(0, 0, 0, 12, "drain")


def test_one_step_of_a_fragment_is_published_under_its_name_only_once():
  # Found by simulate-protocol, seed 30 of its first version: the second one
  # took the first one's name, and was never looked at.
  state = _core("carry", fragments=1, every=2)
  for _ in range(4):
    _step(state)  # publishes at steps 2 and 4
  # Only the first of them was merged; the rest is carried to the new version.
  state.handle(core.Stepped(4, [core.Ready(0, 1, 2)]))
  assert state.positions[0].first_step == 2
  assert state.handle(core.Drain()) == []
  _step(state)
  (publish,) = state.handle(core.Drain())
  assert (publish.first_step, publish.step) == (2, 5)


@pytest.mark.parametrize("every", [2, 3, 16])
def test_other_schedule_holds_from_the_next_step_on(every):
  state = _core(fragments=2, every=8)
  for _ in range(8):
    _step(state)
  state.reschedule(schedule.Schedule(every, 2))
  for _ in range(4 * every):
    _step(state)
    for position in state.positions:
      assert state.step - position.published <= max(every, 8)
