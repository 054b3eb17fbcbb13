"""Bugs planted on purpose: who checks the checker.

Each replaces one piece of the protocol by a wrong one, in this process, for as
long as the context lasts. Production code knows nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import wrong_control
import wrong_judgement
import wrong_pieces

from diloco import workers
from diloco.controller import core as controller_core
from diloco.controller import (
  damage,
  fleet,
  move,
  resources,
  supervisor,
  wind_down,
)
from diloco.islands import (
  comeback,
  hands,
  outbox,
  peer_protocol,
  runner,
  saving,
  watching,
)
from diloco.islands import core as island_core
from diloco.islands import protocol as island_protocol
from diloco.snapshots import cut_parts, cuts, lease, records, restore
from diloco.syncer import chores, cutting, grace, heads, leader, leadership
from diloco.syncer import core as syncer_core
from diloco.syncer import protocol as syncer_protocol
from diloco.verification import kernel, syncer_role

Plant = wrong_pieces.Plant


@contextlib.contextmanager
def bug(name: str) -> Iterator[None]:
  """Plants a bug while the context lasts."""
  plant = PLANTS[name]
  with contextlib.ExitStack() as stack:
    for part in (plant, *_DEFENCES.get(name, ())):
      wrong = part.make(getattr(part.where, part.name))
      stack.enter_context(mock.patch.object(part.where, part.name, wrong))
    yield


PLANTS: dict[str, Plant] = {
  "takes_up_nobody": Plant(
    "a controller that follows another starts roles that live",
    fleet.Fleet,
    "begun",
    wrong_control.takes_up_nobody,
  ),
  "refused_start_forgotten": Plant(
    "a start that the machine refused is not tried again",
    fleet.Fleet,
    "refused",
    wrong_control.refused_start_forgotten,
  ),
  "death_in_its_start_forgotten": Plant(
    "a role that dies before it is ready is not started again",
    supervisor.Supervisor,
    "died",
    wrong_control.death_in_its_start_forgotten,
  ),
  "damage_unheard": Plant(
    "the controller does not hear that a fragment stands still",
    damage.DamageWatch,
    "told",
    wrong_pieces.constant(None),
  ),
  "failed_return_forgotten": Plant(
    "a return to a cut that the store refused is not tried again",
    controller_core.ControllerCore,
    "_failed",
    wrong_control.failed_return_forgotten,
  ),
  "gives_nobody_up": Plant(
    "a role that dies again and again is started for ever",
    supervisor.Supervisor,
    "died",
    wrong_control.gives_nobody_up,
  ),
  "too_few_go_on": Plant(
    "a run of which too few are left is not ended",
    controller_core.ControllerCore,
    "_check_anybody_left",
    wrong_pieces.constant(None),
  ),
  "ends_with_the_first": Plant(
    "a run ends with the first role that is given up",
    controller_core.ControllerCore,
    "_check_anybody_left",
    wrong_control.ends_with_the_first,
  ),
  "first_error_ends": Plant(
    "a run ends with the first role that fails early",
    controller_core.ControllerCore,
    "_check_first_error",
    wrong_control.first_error_ends,
  ),
  "alike_forgiven": Plant(
    "a role that fails early in the same words is started again and again",
    controller_core.ControllerCore,
    "_check_first_error",
    wrong_pieces.constant(None),
  ),
  "steps_settle_nobody": Plant(
    "an island's deaths are never forgiven, however far it gets",
    supervisor.Supervisor,
    "trained",
    wrong_pieces.constant(None),
  ),
  "settled_at_any_step": Plant(
    "an island's deaths are forgiven with its next step",
    supervisor.Supervisor,
    "trained",
    wrong_control.settled_at_any_step,
  ),
  "hurdle_forgotten": Plant(
    "an island's deaths are forgiven before it is past where it died",
    supervisor.Supervisor,
    "died",
    wrong_control.hurdle_forgotten,
  ),
  "slice_kept": Plant(
    "an island that dies again and again stays on its slice",
    resources.ResourceManager,
    "slice_lost",
    wrong_pieces.constant(None),
  ),
  "slices_forgotten": Plant(
    "a controller that follows another does not know who runs where",
    resources.ResourceManager,
    "rebind",
    wrong_pieces.constant(None),
  ),
  "merges_settle_nobody": Plant(
    "deaths before a merge count with those after it",
    supervisor.Supervisor,
    "settled",
    wrong_pieces.constant(None),
  ),
  "hanging_borne": Plant(
    "the controller kills nobody for its silence",
    supervisor.Supervisor,
    "_hangs",
    wrong_pieces.constant(""),
  ),
  "deaf_to_signs_of_life": Plant(
    "the controller takes only readiness for a sign of life",
    supervisor.Supervisor,
    "heard",
    wrong_pieces.constant(None),
  ),
  "drained_unpublished": Plant(
    "an island that drains publishes nothing",
    hands.Hands,
    "publish_all",
    wrong_pieces.constant(None),
  ),
  "leader_not_asked": Plant(
    "a session ends before the leader has merged what was published last",
    wind_down.WindDown,
    "_ask_leader",
    wrong_control.leader_not_asked,
  ),
  "lost_program_forgotten": Plant(
    "what went with a channel at the end is not asked again",
    wind_down.WindDown,
    "_again",
    wrong_control.not_asked_again,
  ),
  "nobody_awaited": Plant(
    "a session ends without an answer to anything",
    wind_down.WindDown,
    "_ask",
    wrong_control.nobody_awaited,
  ),
  "not_saved_at_the_end": Plant(
    "a session ends without saved states",
    wind_down.WindDown,
    "_ask_islands",
    wrong_control.not_saved_at_the_end,
  ),
  "moved_while_alive": Plant(
    "a run is moved without a look whether it lives",
    move.Move,
    "_refuse_living",
    wrong_pieces.no_procedure(None),
  ),
  "moved_from_the_oldest": Plant(
    "a run that is moved goes back further than it must",
    move.Move,
    "moving",
    wrong_control.moved_from_the_oldest,
  ),
  "moved_as_it_was": Plant(
    "a run that is moved keeps what its tapes do not tell",
    move.Move,
    "moving",
    wrong_control.moved_as_it_was,
  ),
  "any_directory": Plant(
    "a run goes on in a directory that it was moved out of",
    move,
    "check_home",
    wrong_pieces.constant(None),
  ),
  "last_evaluation_not_asked": Plant(
    "a session ends without a last evaluation",
    wind_down.WindDown,
    "_final_eval",
    wrong_control.last_evaluation_not_asked,
  ),
  "first_one_evaluates": Plant(
    "only one island is asked for the last evaluation",
    wind_down.WindDown,
    "_final_eval",
    wrong_control.first_one_evaluates,
  ),
  "first_figure_kept": Plant(
    "an island answers with an earlier evaluation",
    runner.ProgramRunner,
    "_evaluate",
    wrong_control.first_figure_kept,
  ),
  "leader_leaves_first": Plant(
    "the leader leaves before those that wait for its lease",
    wind_down.WindDown,
    "_stop",
    wrong_control.leader_leaves_first,
  ),
  "drained_at_once": Plant(
    "a leader says that it has drained before it has merged all",
    leader.Leader,
    "__setattr__",
    wrong_control.drained_at_once,
  ),
  "commit_without_fence": Plant(
    "a commit reads the head's generation anew before its compare-and-set",
    syncer_protocol,
    "commit",
    wrong_pieces.commit_without_fence,
  ),
  "commit_result_ignored": Plant(
    "a compare-and-set that failed counts as a commit",
    syncer_protocol,
    "commit",
    wrong_pieces.commit_ignores_result,
  ),
  "commit_tried_again": Plant(
    "a commit whose fate is unknown is made once more",
    syncer_protocol,
    "commit",
    wrong_pieces.commit_tried_again,
  ),
  "token_not_raised": Plant(
    "a new leader does not raise the tokens of the heads",
    syncer_protocol,
    "fence",
    wrong_pieces.fence_keeps_token,
  ),
  "healed_without_lease": Plant(
    "a damaged head is put back by whoever believes that it leads",
    syncer_protocol,
    "leads",
    wrong_pieces.heal_without_lease,
  ),
  "healed_in_doubt": Plant(
    "a damaged head is put back although a later one may have been there",
    syncer_protocol,
    "heal",
    wrong_pieces.heal_in_doubt,
  ),
  "head_before_payload": Plant(
    "the head moves before the payload it points to is written",
    syncer_protocol,
    "close_round",
    wrong_pieces.head_before_payload,
  ),
  "record_before_payload": Plant(
    "the commit record is written before its payload",
    island_protocol,
    "publish",
    wrong_pieces.record_before_payload,
  ),
  "live_payload_deleted": Plant(
    "a new leader deletes payloads whose publisher is still at work",
    syncer_protocol,
    "abandoned",
    wrong_pieces.abandoned_without_clock,
  ),
  "newer_deleted": Plant(
    "a new leader that is deposed meanwhile deletes what its successor made",
    chores,
    "_is_older",
    wrong_pieces.constant(True),
  ),
  "base_deleted": Plant(
    "retention deletes versions that contributions still start from",
    chores,
    "versions_kept",
    wrong_pieces.constant(0),
  ),
  "foreign_clock": Plant(
    "a lease is judged by the clock of the machine that renews it",
    lease.LeaseWatch,
    "expired",
    wrong_pieces.expired_by_foreign_clock,
  ),
  "counters_kept": Plant(
    "an island's counters are not reset when it adopts a version",
    island_core.IslandCore,
    "_adopt",
    wrong_pieces.counters_kept,
  ),
  "merged_twice": Plant(
    "the syncer does not check contributions against the vector clock",
    syncer_core.SyncerCore,
    "_admit",
    wrong_pieces.admit_without_clock,
  ),
  "passed_over_forgotten": Plant(
    "what is listed after later steps were merged is deleted without a word",
    syncer_core,
    "_is_passed_over",
    wrong_pieces.constant(False),
  ),
  "supersession_dropped": Plant(
    "overlapping contributions of one island are all merged",
    syncer_core.SyncerCore,
    "_supersede",
    wrong_pieces.constant([]),
  ),
  "grace_over_slack": Plant(
    "the grace window is longer than the slack",
    grace.AdaptiveGrace,
    "grace_secs",
    lambda right: lambda self, facts: facts.step_secs,
  ),
  "quorum_of_contributions": Plant(
    "the quorum counts contributions in place of islands",
    syncer_core.SyncerCore,
    "_present",
    lambda right: lambda self, state: set(state.waiting),
  ),
  "muted_publishes": Plant(
    "a restarted island publishes rows again that it published before",
    comeback,
    "decide",
    wrong_pieces.not_muted,
  ),
  "rows_skipped": Plant(
    "a restarted island goes on after the furthest row of any fragment",
    comeback,
    "decide",
    wrong_pieces.resume_from_furthest,
  ),
  "older_than_clock": Plant(
    "a restarted island believes its saved state, not the vector clock",
    comeback,
    "decide",
    wrong_pieces.resume_from_saved,
  ),
  "optimizer_stale": Plant(
    "an island takes its own saved optimizer, however old",
    comeback,
    "decide",
    wrong_pieces.own_optimizer,
  ),
  "peer_behind": Plant(
    "an island takes the optimizer of a peer older than the vector clock",
    peer_protocol,
    "can_serve",
    wrong_pieces.constant(True),
  ),
  "saved_too_early": Plant(
    "a saved state counts before what it takes for published is",
    outbox,
    "settled",
    wrong_pieces.constant(True),
  ),
  "epoch_ignored": Plant(
    "a contribution from before a return to a cut is taken in",
    syncer_core.SyncerCore,
    "_admit",
    wrong_pieces.any_epoch,
  ),
  "cut_by_the_deposed": Plant(
    "a deposed leader that does not know it takes its part in a cut",
    cuts,
    "_is_deposed",
    wrong_pieces.no_procedure(False),
  ),
  "cut_taken_late": Plant(
    "the syncer takes its part after what made it aware of the cut",
    syncer_core.SyncerCore,
    "_arrived",
    wrong_pieces.cut_after_admission,
  ),
  "cut_unstamped": Plant(
    "contributions do not say which cut their island has taken part in",
    island_core.IslandCore,
    "_publish",
    wrong_pieces.unstamped,
  ),
  "cut_without_channel": Plant(
    "what was on its way is left out of a cut",
    cutting,
    "_is_of_the_channel",
    wrong_pieces.constant(False),
  ),
  "cut_unpinned": Plant(
    "payloads that a cut points to are deleted once they are merged",
    cutting.CutKeeper,
    "is_pinned",
    wrong_pieces.constant(False),
  ),
  "cuts_unlisted": Plant(
    "a new leader knows only the cuts that are listed, and what is listed",
    cutting.CutKeeper,
    "_all_looks",
    lambda right: lambda self, taken: self._looks(),
  ),
  "cut_unverified": Plant(
    "a restore does not read what the cut points to",
    restore,
    "choose",
    wrong_pieces.chosen_unread,
  ),
  "timeline_not_given_up": Plant(
    "a return leaves the cuts after the one gone back to as they are",
    restore,
    "_give_up_cuts",
    wrong_pieces.only_open_cuts_given_up,
  ),
  "cuts_all_damaged": Plant(
    "of old cuts none is kept that lacks a version the newest has",
    cuts,
    "expired",
    wrong_pieces.expired_by_number,
  ),
  "key_not_compared": Plant(
    "a record that lies under another's key is believed",
    records,
    "check_key",
    wrong_pieces.constant(None),
  ),
  "lost_head_made_anew": Plant(
    "a new leader makes a fragment anew whose head is lost",
    syncer_protocol,
    "fence",
    wrong_pieces.lost_head_made_anew,
  ),
  "failed_merge_given_up": Plant(
    "a merge that failed is not tried again",
    syncer_core.SyncerCore,
    "_failed",
    wrong_pieces.constant([]),
  ),
  "superseded_lost": Plant(
    "what is superseded while no round is open is not deleted",
    syncer_core.SyncerCore,
    "_evaluate",
    wrong_pieces.superseded_lost,
  ),
  "survey_by_name": Plant(
    "a restarted island counts records from before a return to a cut",
    island_protocol,
    "survey",
    wrong_pieces.survey_by_name,
  ),
  "timed_before_look": Plant(
    "a lease is judged by the time before a look that took long",
    lease,
    "acquire",
    wrong_pieces.timed_before_look,
  ),
  "token_unfenced": Plant(
    "a token that was given out and is in no head yet is given out again",
    lease,
    "draw",
    wrong_pieces.token_from_lease,
  ),
  "token_restarts": Plant(
    "after a lost or damaged lease tokens start from 1 again",
    lease,
    "_newest_of_heads",
    wrong_pieces.heads_without_tokens,
  ),
  "deposed_goes_back": Plant(
    "a controller whose lease was taken goes on to set the run back",
    restore,
    "_refuse_deposed",
    wrong_pieces.constant(None),
  ),
  "epoch_not_held": Plant(
    "a controller does not keep its predecessors from going back",
    restore,
    "hold",
    wrong_pieces.constant(()),
  ),
  "token_stays_damaged": Plant(
    "nobody draws a token while the newest one drawn cannot be read",
    lease,
    "draw",
    wrong_pieces.token_must_be_readable,
  ),
  "lease_stays_damaged": Plant(
    "nobody takes a lease that nobody can read",
    lease.LeaseWatch,
    "unreadable",
    wrong_pieces.constant(False),
  ),
  "lease_damages_alike": Plant(
    "a lease damaged twice counts as damaged from the first time on",
    lease.LeaseWatch,
    "unreadable",
    wrong_pieces.damages_alike,
  ),
  "cut_of_any_epoch": Plant(
    "a cut asked for before a return to a cut is still taken part in",
    cuts.Look,
    "is_open_in",
    lambda right: lambda self, epoch: self.is_open,
  ),
  "told_once": Plant(
    "a verdict that could not be written is not written again",
    chores.Chores,
    "_tell",
    wrong_pieces.told_once,
  ),
  "verdict_not_repeated": Plant(
    "an island does not hear of a verdict that the store lost",
    chores.Chores,
    "remind",
    wrong_pieces.constant(()),
  ),
  "offence_not_told": Plant(
    "an island whose values are refused does not hear of it",
    syncer_core.SyncerCore,
    "_offence",
    wrong_pieces.constant([]),
  ),
  "failed_merge_left": Plant(
    "the payload of a merge that failed is not deleted",
    heads.Heads,
    "_sweep",
    wrong_pieces.constant(()),
  ),
  "unheard_commit_undone": Plant(
    "the payload of a commit that may have succeeded is deleted unasked",
    syncer_protocol,
    "rewrite",
    wrong_pieces.not_rewritten,
  ),
  "head_unstamped": Plant(
    "a new version does not say which cut its syncer has taken part in",
    heads.Heads,
    "__init__",
    wrong_pieces.heads_with(cut=0),
  ),
  "head_of_first_epoch": Plant(
    "a new version forgets that the run was set back",
    heads.Heads,
    "__init__",
    wrong_pieces.heads_with(epoch=0),
  ),
  "litter_forgotten": Plant(
    "a contribution that could not be deleted is never deleted",
    chores.Chores,
    "tidy",
    wrong_pieces.constant(()),
  ),
  "one_stops_all": Plant(
    "a damaged fragment ends an island's look at all that comes after it",
    watching.Watch,
    "_attempt",
    wrong_pieces.attempt_raises,
  ),
  "thread_ends_unseen": Plant(
    "an error nobody foresaw ends a thread, and its process goes on",
    kernel.Kernel,
    "ended",
    wrong_pieces.constant(None),
  ),
  "hung_leader_leads": Plant(
    "a leader whose main thread hangs goes on renewing its lease",
    leadership.Leadership,
    "hung",
    lambda right: property(lambda self: False),
  ),
  "waiting_ends": Plant(
    "a standby that met a failure of the store waits no more",
    leadership.Leadership,
    "waiting",
    wrong_pieces.waiting_ends,
  ),
  "damage_waits_for_a_merge": Plant(
    "a damaged version is found out by the next merge only",
    heads.Heads,
    "_read_if_it_stays",
    wrong_pieces.no_procedure(None),
  ),
  "merge_never_ends": Plant(
    "a merge stands still for ever",
    syncer_role._Leader,
    "merging",
    wrong_pieces.merge_never_ends,
  ),
  "merge_hang_unseen": Plant(
    "a leader counts as getting on although its merge does not",
    leadership.Leadership,
    "check",
    lambda right: lambda self, merging=False: right(self),
  ),
  "handed_back_early": Plant(
    "the thread that merges hands back what it has yet to do",
    leader.Leader,
    "merge",
    wrong_pieces.handed_back_early,
  ),
  "stamped_as_closed": Plant(
    "a version is stamped with the cut there was before its merge",
    heads.Heads,
    "_close_round",
    wrong_pieces.stamped_as_closed,
  ),
  "found_beside_broken_forgotten": Plant(
    "a look that meets a damaged record forgets what else it found",
    chores.Chores,
    "look",
    wrong_pieces.found_beside_broken_forgotten,
  ),
  "follow_delays_grid": Plant(
    "a fragment published off its grid is due at a grid point, not after H",
    island_core.IslandCore,
    "_publish",
    wrong_pieces.only_on_the_grid,
  ),
  "lost_for_good": Plant(
    "after one publication was lost no saved state counts any more",
    outbox.Outbox,
    "submit",
    wrong_pieces.lost_is_remembered,
  ),
  "given_up_while_open": Plant(
    "a saved state is given up for a publication that is on its way",
    saving.Saves,
    "_save",
    wrong_pieces.given_up_while_open,
  ),
  "part_pushed_out": Plant(
    "a part of a cut that waits to be saved gives way to a plain save",
    saving.Saves,
    "submit",
    wrong_pieces.part_pushed_out,
  ),
  "goes_on_unanswered": Plant(
    "an island that is to wait for an answer does not",
    island_core.IslandCore,
    "holds",
    wrong_pieces.constant(False),
  ),
  "others_answer": Plant(
    "an island takes a version without its steps for an answer",
    island_core.IslandCore,
    "_is_answer",
    wrong_pieces.constant(True),
  ),
  "waits_for_ever": Plant(
    "an island waits for an answer for as long as there is none",
    island_core.IslandCore,
    "holds",
    lambda right: lambda self, now: self.unanswered,
  ),
  "saved_of_any_timeline": Plant(
    "an island goes on from a state saved before a return to a cut",
    island_protocol.Search,
    "is_of_this_timeline",
    wrong_pieces.constant(True),
  ),
  "unreadable_ends_search": Plant(
    "a saved state that cannot be read ends the island that comes back",
    island_protocol.Search,
    "_newest_saved",
    wrong_pieces.unreadable_ends_search,
  ),
  "answer_left_behind": Plant(
    "an answer to a peer that has given up is left in the store",
    peer_protocol,
    "answer",
    wrong_pieces.answer_not_taken_back,
  ),
}

PLANTS |= wrong_judgement.PLANTS

# What would make a planted bug harmless, and has to be taken out with it.
_DEFENCES: dict[str, tuple[Plant, ...]] = {
  # The checker's own idea of a consistent cut is asked, not production's.
  **dict.fromkeys(
    (
      "cut_unstamped",
      "head_unstamped",
      "stamped_as_closed",
      "adopted_unstamped",
      "cut_taken_late",
    ),
    (
      Plant(
        "no cut is found inconsistent",
        cut_parts,
        "inconsistency",
        wrong_pieces.constant(""),
      ),
    ),
  ),
  "one_stops_all": (
    Plant(
      "a look that failed is made again",
      watching.Watch,
      "look",
      wrong_pieces.look_gives_up,
    ),
  ),
  "thread_ends_unseen": (
    Plant(
      "what nobody foresaw is not tried again",
      workers.Retry,
      "failed",
      wrong_pieces.unexpected_at_once,
    ),
  ),
  "merge_never_ends": (
    Plant(
      "nobody asks whether it does",
      leadership.Leadership,
      "hung",
      lambda right: property(lambda self: False),
    ),
  ),
  "lost_for_good": (
    Plant("all need it", outbox.Outbox, "ticket", wrong_pieces.lost_is_needed),
  ),
  "told_once": (
    Plant(
      "nobody is reminded", chores.Chores, "remind", wrong_pieces.constant(())
    ),
  ),
  "token_restarts": (
    Plant(
      "nobody knows tokens drawn", lease, "draw", wrong_pieces.token_from_lease
    ),
  ),
  "saved_too_early": (
    Plant(
      "a hole before what was published goes unnoticed",
      comeback,
      "_has_hole",
      wrong_pieces.constant(False),
    ),
  ),
}
