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
    versions=[0] * fragments,
  )


def _step(state, ready=(), board=None):
  return state.handle(core.Stepped(state.step + 1, ready, board))


def _board(versions, **rounds):
  return core.Board(versions, {int(p[1:]): i for p, i in rounds.items()})


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
  ],
)
def test_adoption_gives_up_what_came_after_the_publication(
  adoption, lost, next_first_step
):
  state = _core(adoption)
  _step(state)  # publishes fragment 1 at step 1
  _step(state)
  actions = _step(state, ready=[(1, 1, 1)])
  assert core.Adopt(1, 1, *lost) in actions
  _step(state)
  (publish,) = _step(state)
  assert publish == core.Publish(1, 1, next_first_step, 5, "schedule")


def test_adoption_without_a_publication_gives_up_everything_or_carries_it():
  for adoption, lost in [("overwrite", (0, 0, 2)), ("carry", (0, 2, 2))]:
    state = _core(adoption)
    _step(state)
    actions = _step(state, ready=[(3, 1, 0)])
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


def test_followed_fragment_is_not_published_again_before_h_steps():
  state = _core()
  _step(state, board=_board([0] * 4, p3=[1]))  # follows at step 1
  steps = {}
  for _ in range(8):
    for action in _step(state, ready=[(3, 1, 1)] if state.step == 1 else ()):
      steps.setdefault(action.fragment, []).append(state.step)
  assert steps[3] == [2, 7]  # adopted at 2; its grid point 3 came too early


def test_steps_already_offered_to_an_older_version_are_not_published_again():
  state = _core()
  _step(state)  # fragment 1 published at step 1
  for _ in range(3):
    _step(state, board=_board([0, 1, 0, 0]))  # its next version exists
  actions = _step(state)
  assert [a.fragment for a in actions if isinstance(a, core.Publish)] == []


def test_old_version_is_not_adopted_again():
  state = _core()
  _step(state, ready=[(0, 3, 0)])
  assert not [
    a for a in _step(state, ready=[(0, 3, 0)]) if isinstance(a, core.Adopt)
  ]
  assert state.base_version(0) == 3


def test_restarted_island_lets_others_lead_before_its_own_grid_starts():
  state = _core(step=100)
  early = [a for _ in range(3) for a in _step(state)]
  assert early == []
  later = [a for _ in range(4) for a in _step(state)]
  assert sorted(a.fragment for a in later) == [0, 1, 2, 3]
  assert all(a.first_step == 100 for a in later)


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
  _step(state, ready=[(1, 1, 1)])
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
    for a in _step(state, ready=[(1, 1, merged_step)])
    if isinstance(a, core.Adopt)
  ]
  assert adopt == core.Adopt(1, 1, kept_from, 6, 6)
  for _ in range(2):
    _step(state)
  (publish,) = _step(state)
  assert publish == core.Publish(1, 1, kept_from, 9, "schedule")
