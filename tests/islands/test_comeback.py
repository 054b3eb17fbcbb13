"""Where an island goes on: rows are merged once, and none is skipped."""

import pytest
from cut_builder import contribution
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.islands import comeback, core, protocol
from diloco.snapshots import keys, operations, records

H = 8


def _known(published, merged=None):
  versions = tuple(range(5, 5 + len(published)))
  return comeback.Known(published, versions, merged or published)


@pytest.mark.parametrize(
  ("saved", "published", "start", "first_steps", "carried", "optimizer"),
  [
    (None, (0, 0), 0, (0, 0), (), "own"),  # a new island
    (None, (12, 8), 8, (12, 8), (), "peer"),
    # Stopped in order: saved last, everything published.
    (comeback.Saved(20, (20, 20), (9, 9)), (20, 20), 20, (20, 20), (), "own"),
    # Unsent progress of both fragments comes back.
    (
      comeback.Saved(20, (16, 18), (9, 9)),
      (16, 18),
      20,
      (16, 18),
      (0, 1),
      "own",
    ),
    # Published after saving: those steps are done again, not merged again.
    (comeback.Saved(20, (16, 18), (9, 9)), (24, 18), 20, (24, 18), (1,), "own"),
    # An earlier life's publication came late, inside the saved progress.
    (comeback.Saved(20, (10, 18), (9, 9)), (14, 18), 14, (14, 18), (), "own"),
    # Saved long ago: nobody needs those steps any more.
    (comeback.Saved(20, (16, 18), (9, 9)), (24, 26), 24, (24, 26), (), "own"),
    (comeback.Saved(20, (16, 18), (9, 9)), (40, 44), 40, (40, 44), (), "peer"),
    # An optimizer is recent for H steps.
    (comeback.Saved(20, (16, 18), (9, 9)), (28, 44), 28, (28, 44), (), "own"),
    (comeback.Saved(20, (16, 18), (9, 9)), (29, 44), 29, (29, 44), (), "peer"),
  ],
)
def test_where_to_go_on(
  saved, published, start, first_steps, carried, optimizer
):
  found = comeback.decide(saved, _known(published), H)
  assert found.start == start
  assert [o.first_step for o in found.origins] == list(first_steps)
  assert [o.base for o in found.origins] == [5, 6]
  assert found.carried == carried
  assert found.optimizer == optimizer


@settings(deadline=None)
@given(
  st.lists(st.integers(0, 30), min_size=1, max_size=4),
  st.integers(0, 40),
  st.data(),
)
def test_no_row_is_published_twice_and_none_is_skipped(published, step, data):
  kept = [
    data.draw(st.integers(0, min(p, step)), label="kept") for p in published
  ]
  saved = None
  if data.draw(st.booleans()):
    # Some fragments adopted after their last publication; the store then has
    # all that was published, or what came later was given up.
    saved = comeback.Saved(step, kept, [k - 1 for k in kept])
  found = comeback.decide(saved, _known(tuple(published)), H)
  for fragment, (p, origin) in enumerate(
    zip(published, found.origins, strict=True)
  ):
    assert origin.first_step == p  # neither before nor after what is published
    # Between the start and the origin rows are only read again; an origin
    # before the start needs the progress since then.
    assert (origin.first_step < found.start) == (fragment in found.carried)


def _execute(store):
  def execute(operation):
    match operation:
      case operations.Names(prefix):
        return sorted(
          k.split("/")[1] for k in store if k.startswith(prefix + "/")
        )
      case operations.Read(key, _):
        return store.get(key), None
      case operations.ReadPayload(head):
        return f"values of version {head.version}"
      case operations.Point():
        return None
    raise AssertionError(operation)

  return execute


def _waiting(fragment, island, step, epoch=0):
  of = dict(island=island, incarnation=2, fragment=fragment, base_version=3)
  return contribution(**of, step=step, epoch=epoch)


def test_survey_counts_waiting_and_merged_steps_of_this_island_only():
  # Steps of another island, or of a timeline that was left, do not count.
  store = {
    keys.head_key(p): records.Head(p, 3 + p, 1, "x", [], clock, {})
    for p, clock in enumerate([{"1": 10, "2": 90}, {"1": 20}, {}])
  }
  for record in (_waiting(0, 1, 14), _waiting(1, 2, 99), _waiting(2, 1, 50, 7)):
    store[keys.contribution_key(record.key)] = record
  store["contributions/junk"] = None
  known = operations.perform(protocol.survey(1, 3), _execute(store))
  assert known == comeback.Known((14, 20, 0), (3, 4, 5), (10, 20, 0))
  with pytest.raises(LookupError, match="fragment 3"):
    operations.perform(protocol.survey(1, 4), _execute(store))


def test_version_made_while_an_island_comes_back_is_what_it_starts_from():
  # The merge takes in what a dead life wrote after the survey.
  store = {
    keys.head_key(p): records.Head(p, 3, 1, "x", [], {"1": 10}, {})
    for p in range(2)
  }
  late = records.Head(1, 4, 1, "y", [], {"1": 16}, {}, cut=7)

  def merge_meanwhile(operation):
    if isinstance(operation, operations.Point):
      store[keys.head_key(1)] = late
    return _execute(store)(operation)

  found = operations.perform(protocol.come_back(1, 2), merge_meanwhile)
  assert found.known == comeback.Known((10, 16), (3, 4), (10, 16))
  assert [f.content for f in found.fetched] == [
    "values of version 3",
    "values of version 4",
  ]
  assert found.cut == 7  # the start is after what was asked for before it


def test_steps_of_a_publication_that_came_to_nothing_are_done_again():
  # Fragment 0: step 16 was submitted and refused, or never reached the store.
  saved = comeback.Saved(20, (16, 18), (10, 10))
  found = comeback.decide(saved, _known((12, 18)), H)
  assert found.start == 12 and found.carried == ()
  assert found.origins == (core.Origin(5, 12), core.Origin(6, 18))
  assert found.optimizer == "own"


def test_steps_given_up_by_adoption_are_no_hole():
  saved = comeback.Saved(20, (16, 18), (16, 18))
  found = comeback.decide(saved, _known((12, 18)), H)
  assert found.start == 20 and found.carried == (0, 1)
  assert found.origins == (core.Origin(5, 16), core.Origin(6, 18))
