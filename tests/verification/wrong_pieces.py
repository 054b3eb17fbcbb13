"""The wrong pieces that `plants` puts in the place of right ones.

Each function takes the right piece and gives the wrong one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from diloco import errors
from diloco.islands import comeback, outbox, saving, watching
from diloco.snapshots import keys, lease, operations, records
from diloco.syncer import orders
from diloco.syncer import protocol as syncer_protocol


class Plant(NamedTuple):
  """One planted bug.

  Attributes:
    what: in words.
    where: object whose attribute is replaced.
    name: of the attribute.
    make: gives the wrong piece from the right one.
  """

  what: str
  where: Any
  name: str
  make: Callable[[Any], Any]


def commit_without_fence(right: Any) -> Any:
  """A commit reads the head's generation anew before its compare-and-set."""

  def commit(held: Any, head: records.Head) -> Any:
    key = keys.head_key(head.fragment)
    _, generation = yield operations.Read(key, records.Head)
    yield operations.CompareAndSet(key, head, generation)
    _, generation = yield operations.Read(key, records.Head)
    return syncer_protocol.Held(head, generation)

  return commit


def commit_ignores_result(right: Any) -> Any:
  """A compare-and-set that failed counts as a commit."""

  def commit(held: Any, head: records.Head) -> Any:
    key = keys.head_key(head.fragment)
    yield operations.CompareAndSet(key, head, held.generation)
    _, generation = yield operations.Read(key, records.Head)
    return syncer_protocol.Held(head, generation)

  return commit


def commit_tried_again(right: Any) -> Any:
  """A commit whose fate is unknown is made once more."""

  def commit(held: Any, head: records.Head) -> Any:
    try:
      return (yield from right(held, head))
    except OSError:
      key = keys.head_key(head.fragment)
      found, generation = yield operations.Read(key, records.Head)
      again = dataclasses.replace(head, version=found.version + 1)
      return (yield from right(syncer_protocol.Held(found, generation), again))

  return commit


def heal_without_lease(right: Any) -> Any:
  """A head is put back by whoever believes that it leads."""

  def leads(token: int) -> Any:
    yield from ()
    return True

  return leads


def heal_in_doubt(right: Any) -> Any:
  """A head is put back although a later one may have been there."""

  def heal(held: Any, *, doubted: bool) -> Any:
    return (yield from right(held, doubted=False))

  return heal


def fence_keeps_token(right: Any) -> Any:
  """A new leader does not raise the tokens of the heads."""

  def fence(fragment: int, token: int) -> Any:
    key = keys.head_key(fragment)
    head, generation = yield operations.Read(key, records.Head)
    if head.token > token:
      raise errors.FencedError("taken over")
    return syncer_protocol.Held(head, generation)

  return fence


def head_before_payload(right: Any) -> Any:
  """The head moves before the payload it points to is written."""

  def close_round(held: Any, merge: Any, head_of: Any) -> Any:
    done = yield from syncer_protocol.commit(held, head_of(None))
    yield merge
    return done

  return close_round


def record_before_payload(right: Any) -> Any:
  """The commit record is written before its payload."""

  def publish(record: records.Contribution, content: Any) -> Any:
    yield operations.Write(keys.contribution_key(record.key), record)
    yield operations.WritePayload(record.payload, content)

  return publish


def abandoned_without_clock(right: Any) -> Any:
  """A new leader deletes payloads whose publisher is still at work."""

  def abandoned(heads: Any, pinned: Any = None) -> Any:
    payloads = yield operations.Names("payloads")
    names = yield operations.Names("contributions")
    for name in sorted(set(payloads) - set(names)):
      yield operations.DeleteTree(keys.payload_prefix(name))

  return abandoned


def expired_by_foreign_clock(right: Any) -> Any:
  """A lease is judged by the clock of the machine that renews it."""

  def expired(self: Any, held: records.Lease | None, now: float) -> bool:
    if held is None or not held.owner:
      return True
    # The beat as the time of the last renewal, on the owner's clock.
    return bool(now - held.beat * 0.5 >= self._ttl_secs)

  return expired


def damages_alike(right: Any) -> Any:
  """A lease damaged twice counts as damaged from the first time on."""

  def unreadable(self: Any, generation: Any, now: float) -> bool:
    return bool(right(self, 0, now))

  return unreadable


def counters_kept(right: Any) -> Any:
  """An island's counters are not reset when it adopts a version."""

  def adopt(self: Any, fragment: int, version: int, merged_step: int) -> Any:
    first_step = self._fragments[fragment].first_step
    actions = right(self, fragment, version, merged_step)
    self._fragments[fragment].first_step = first_step
    return actions

  return adopt


def admit_without_clock(right: Any) -> Any:
  """The syncer does not check contributions against the vector clock."""

  def admit(self: Any, new: Any, now: float) -> Any:
    state = self._fragments[new.fragment]
    clock, state.clock = state.clock, {}
    try:
      return right(self, new, now)
    finally:
      state.clock = clock

  return admit


def not_muted(right: Any) -> Any:
  """A restarted island publishes rows again that it published before."""

  def decide(saved: Any, known: comeback.Known, sync_every: int) -> Any:
    back = right(saved, known, sync_every)
    origins = tuple(
      o._replace(first_step=min(o.first_step, back.start)) for o in back.origins
    )
    return back._replace(origins=origins)

  return decide


def resume_from_furthest(right: Any) -> Any:
  """A restarted island goes on after the furthest row of any fragment."""

  def decide(saved: Any, known: comeback.Known, sync_every: int) -> Any:
    furthest = max(known.published)
    return right(
      saved,
      known._replace(published=(furthest,) * len(known.published)),
      sync_every,
    )

  return decide


def resume_from_saved(right: Any) -> Any:
  """A restarted island believes its saved state, not the vector clock."""

  def decide(saved: Any, known: comeback.Known, sync_every: int) -> Any:
    if saved is None:
      return right(saved, known, sync_every)
    behind = known._replace(published=tuple(saved.published))
    return right(saved, behind, sync_every)

  return decide


def own_optimizer(right: Any) -> Any:
  """An island takes its own saved optimizer, however old."""

  def decide(*args: Any) -> Any:
    return right(*args)._replace(optimizer="own")

  return decide


def only_open_cuts_given_up(right: Any) -> Any:
  """A return leaves the cuts after the one gone back to as they are."""

  def give_up(begun: records.Epoch, heads: Any) -> Any:
    return (yield from right(dataclasses.replace(begun, cut=10**6), heads))

  return give_up


def any_epoch(right: Any) -> Any:
  """A contribution from before a return to a cut is taken in."""

  def admit(self: Any, new: Any, now: float) -> Any:
    epoch, self._epoch = self._epoch, new.epoch
    try:
      return right(self, new, now)
    finally:
      self._epoch = epoch

  return admit


def cut_after_admission(right: Any) -> Any:
  """The syncer takes its part when it sees the request, and not before."""

  def arrived(self: Any, contributions: Any, now: float) -> Any:
    cut = self._cut
    newest = max((c.cut for c in contributions), default=0)
    self._cut = max(cut, newest)  # as if it had taken part
    actions = right(self, contributions, now)
    self._cut = cut
    return actions

  return arrived


def chosen_unread(right: Any) -> Any:
  """A restore does not read what the cut points to."""

  def choose(check: Any, *args: Any, **options: Any) -> Any:
    return right(lambda parts: "", *args, **options)

  return choose


def lost_head_made_anew(right: Any) -> Any:
  """A new leader makes a fragment anew whose head is lost."""

  def fence(fragment: int, token: int) -> Any:
    try:
      return (yield from right(fragment, token))
    except LookupError:
      key, payload = keys.head_key(fragment), f"globals/{fragment:04d}/"
      first = f"{payload}{0:09d}.i0.1"
      head = records.Head(fragment, 0, token, first, [[1]], {}, {})
      yield operations.CompareAndSet(key, head, 0)
      return (yield from right(fragment, token))

  return fence


def expired_by_number(right: Any) -> Any:
  """Of old cuts none is kept that lacks a version the newest has."""

  def expired(looks: Any, payloads: Any) -> Any:
    return right(looks, {})

  return expired


def unstamped(right: Any) -> Any:
  """Contributions do not say which cut their island has taken part in."""

  def publish(self: Any, fragment: int, trigger: Any) -> Any:
    action = right(self, fragment, trigger)
    return dataclasses.replace(action, cut=0)

  return publish


def superseded_lost(right: Any) -> Any:
  """What is superseded while no round is open is not deleted."""

  def evaluate(self: Any, fragment: int, now: float) -> Any:
    actions = right(self, fragment, now)
    only = all(
      isinstance(a, orders.Discard) and a.reason == "superseded"
      for a in actions
    )
    return [] if only else actions

  return evaluate


def survey_by_name(right: Any) -> Any:
  """A restarted island counts records from before a return to a cut."""

  def survey(island: int, num_fragments: int) -> Any:
    names = yield operations.Names("contributions")
    known = yield from right(island, num_fragments)
    published = list(known.published)
    for name in names:
      fragment, owner, _, step = map(int, name.split("."))
      if owner == island:
        published[fragment] = max(published[fragment], step)
    return known._replace(published=tuple(published))

  return survey


def timed_before_look(right: Any) -> Any:
  """A lease is judged by the time before a look that took long."""

  def acquire(key: str, owner: str, watch: Any, clock: Any) -> Any:
    now = clock()
    return right(key, owner, watch, lambda: now)

  return acquire


def token_from_lease(right: Any) -> Any:
  """A token that was given out and is in no head yet is given out again."""

  def draw(key: str, above: int) -> Any:
    yield from ()
    return above + 1

  return draw


def token_must_be_readable(right: Any) -> Any:
  """Nobody draws a token while the newest one drawn cannot be read."""

  def draw(key: str, above: int) -> Any:
    yield operations.Read(f"{key}.token", records.DrawnToken)
    return (yield from right(key, above))

  return draw


def heads_without_tokens(right: Any) -> Any:
  """After a lost or damaged lease tokens start from 1 again."""

  def newest(key: str) -> Any:
    yield from ()
    return 0

  return newest


def waiting_ends(right: Any) -> Any:
  """A failure of the store ends who waits for the lease."""

  def waiting(self: Any, wanted: Any) -> Any:
    while not self.token:
      try:
        self.token = yield from lease.acquire(
          keys.SYNCER_LEASE, self._owner, self._watch, self._clock
        )
      except operations.FAILURES:
        return False
      yield 0.9
    self.hold(self.renewing())
    return True

  return waiting


def told_once(right: Any) -> Any:
  """A verdict that could not be written is not written again."""

  def tell(self: Any, verdict: Any) -> Any:
    try:
      yield from right(self, verdict)
    except OSError:
      self.untold.clear()
      raise

  return tell


def not_rewritten(right: Any) -> Any:
  """The payload of a commit that may have succeeded is deleted unasked."""

  def rewrite(held: Any) -> Any:
    yield from ()
    return held

  return rewrite


def heads_with(**wrong: Any) -> Callable[[Any], Any]:
  """A leader's heads have a field that is wrong."""

  def plant(right: Any) -> Any:
    def init(self: Any, token: int, make: Any, each: Any) -> None:
      right(self, token, lambda **fields: make(**(fields | wrong)), each)

    return init

  return plant


def attempt_raises(right: Any) -> Any:
  """What fails of one fragment ends a look at all that comes after it."""
  return lambda self, what, procedure: procedure


def look_gives_up(right: Any) -> Any:
  """A look that failed is made again, whole."""

  def look(self: Any) -> Any:
    try:
      return (yield from right(self))
    except operations.FAILURES:
      return watching.Seen(None, None)

  return look


def unexpected_at_once(right: Any) -> Any:
  """What nobody foresaw is not tried again."""

  def failed(self: Any, error: Exception, now: float = 0.0) -> Any:
    if not isinstance(error, operations.FAILURES):
      raise error
    return right(self, error, now)

  return failed


def only_on_the_grid(right: Any) -> Any:
  """After a publication off the grid a fragment is due at a grid point."""

  def publish(self: Any, fragment: int, trigger: Any) -> Any:
    action = right(self, fragment, trigger)
    self._off_grid.clear()
    return action

  return publish


def lost_is_remembered(right: Any) -> Any:
  """A publication that was pushed out is never forgotten."""

  def submit(self: Any, action: Any, content: Any) -> Any:
    dropped = right(self, action, content)
    for old, reason in dropped:
      if reason != "superseded":
        self.lost = outbox.Entry(old, None, "lost")
    return dropped

  return submit


def lost_is_needed(right: Any) -> Any:
  """Every saved state counts on a publication that was pushed out."""

  def ticket(self: Any, positions: Any) -> Any:
    found = right(self, positions)
    lost = [self.lost] if hasattr(self, "lost") else []
    return found._replace(needed=(*found.needed, *lost))

  return ticket


def unreadable_ends_search(right: Any) -> Any:
  """A saved state that cannot be read ends the search for one."""

  def newest_saved(self: Any, num_fragments: int, standing: Any) -> Any:
    for saved in self.saved_states():
      marker = self.marker_of(saved)
      if self.is_of_this_timeline(saved, marker, standing):
        return marker, self.restore(saved)
    return None, None

  return newest_saved


def given_up_while_open(right: Any) -> Any:
  """A state is given up if what it counts on is still on its way."""

  def save(self: Any, job: saving.Job) -> Any:
    if outbox.settled(job.ticket) is None:
      raise saving.LostError("not yet")
    return (yield from right(self, job))

  return save


def part_pushed_out(right: Any) -> Any:
  """A plain save takes the place of whatever waits."""

  def submit(self: Any, job: saving.Job) -> None:
    self._jobs = [job]

  return submit


def answer_not_taken_back(right: Any) -> Any:
  """Whether somebody calls is looked up before an answer, and not after it."""

  def answer(request: Any, state: Any, content: Any) -> Any:
    key = keys.peer_request_key(request.island)
    asked, _ = yield operations.Read(key, records.PeerRequest)
    if asked != request:
      return False
    yield operations.WritePayload(state.payload, content)
    key = keys.peer_state_key(request.island, request.incarnation)
    yield operations.Write(key, state)
    return True

  return answer


def no_procedure(value: Any) -> Callable[[Any], Any]:
  """Gives the same without a look at the store."""

  def plant(right: Any) -> Any:
    def procedure(*args: Any) -> Any:
      yield from ()
      return value

    return procedure

  return plant


def constant(value: Any) -> Callable[[Any], Any]:
  """Gives the same whatever it is asked."""

  return lambda right: lambda *args, **kwargs: value


def merge_never_ends(right: Any) -> Any:
  """The fifth merge of a leader stands still."""

  def merging(self: Any) -> Any:
    self._merges_begun = getattr(self, "_merges_begun", 0) + 1
    if self._merges_begun == 5:
      yield 1e6
    yield from right(self)

  return merging


def handed_back_early(right: Any) -> Any:
  """A merge counts as done when it is asked for."""

  def merge(self: Any) -> Any:
    while True:
      while self._asked is None:
        yield None
      asked, self._asked = self._asked, None
      self._merged = None, None
      self.wake()
      yield from self.merging()
      yield asked

  return merge


def stamped_as_closed(right: Any) -> Any:
  """A version is stamped with the cut there was before its merge."""

  def close_round(self: Any, *args: Any) -> Any:
    cut, make = self.cut, self._make
    self._make = lambda **fields: make(**(fields | {"cut": cut}))
    try:
      yield from right(self, *args)
    finally:
      self._make = make

  return close_round


def found_beside_broken_forgotten(right: Any) -> Any:
  """A look that meets a record it cannot read does nothing with the others."""

  def look(self: Any) -> Any:
    found, broken = yield from right(self)
    return ([] if broken else found), broken

  return look
