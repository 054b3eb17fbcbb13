"""Names and fields of tape events.

The tape is the record of a run: one JSON object a line, one file per role and
incarnation under `tape/`. Everything a report shows is computed from it and
from the metric logs, so a crashed run reports as well as a finished one.

Every line carries `event`, `role`, `incarnation` and `wall_secs` (Unix time,
for pictures only; no decision compares wall clocks).
"""

# Written by the controller.
RUN_STARTED = "run_started"  # method, islands (M), total_tokens, token (of the
#   controller's lease); once for each session of a run
ISLAND_STARTED = "island_started"  # island, island_incarnation, pid, cores
ISLAND_READY = "island_ready"  # island, island_incarnation, step
ISLAND_DIED = "island_died"  # island, island_incarnation, cause; not for one
#   that left as it was told
ISLAND_RESTART = "island_restart"  # island, attempt, delay_secs
SLICES_CHANGED = "slices_changed"  # island, present: slices that an elastic
#   job has from its next life on
SYNCER_STARTED = "syncer_started"  # pid, seat ("syncer", "standby", ...)
SYNCER_DIED = "syncer_died"  # cause, seat, led (whether it was the leader)
EVALUATOR_STARTED = "evaluator_started"  # pid, cores
EVALUATOR_DIED = "evaluator_died"  # cause
REATTACHED = "reattached"  # peer (a role), peer_incarnation, pid, step (None
#   for a syncer): it outlived the controller that started it, and this one
#   has taken it up
FAULT_INJECTED = "fault_injected"  # kind, target, at_tokens
PROGRAM_DISPATCHED = "program_dispatched"  # island, seq, program, args
PROGRAM_DONE = "program_done"  # island, seq, program, result
CUT_REQUESTED = "cut_requested"  # cut, islands (that are to take part)
CUT_COMPLETED = "cut_completed"  # cut, secs, islands (island -> step), versions
#   ([P], of the heads)
CUT_ABANDONED = "cut_abandoned"  # cut, reason
RESTORED = "restored"  # cut, epoch, version_from ([P], the cut's versions),
#   version_to ([P], versions the heads were set to), reinjected (keys of
#   contributions that wait again), steps (island -> step of the cut), why,
#   torn (whether it is because the ends of tapes are lost), passed_over (list
#   of dicts: cut, reason): the run was set back to a cut. One that is finished
#   by a second attempt may be told twice, with one epoch
NOT_RESTORED = "not_restored"  # fragments, reason: damage stands, and there is
#   no cut without it; the other fragments go on
CONFIG_CHANGED = "config_changed"  # changes (field -> [before, after]): what
#   the user changed, between two sessions or while the run was on
RUN_STOPPING = "run_stopping"  # reason
RUN_FINISHED = "run_finished"  # status ("finished"|"stopped"|"failed"|
#   "killed"), reason

# Written by an island. A step range (first_step, step] is open on the left.
STARTED = "started"  # step, restored_from, tokens_per_step, kind,
#   relative_speed, paced_step_secs (0: runs at its own speed), topology,
#   devices (chips), share, total_tokens, of an elastic job present (slices that
#   it has), replicas (all there are) and scheduled (steps of such a batch that
#   its schedules have gone), of "eager" updates own_rate (of its own outer
#   steps), cores, environ, software, checkpoint
#   and peer (whose state it took, or null), base_versions, base_digests,
#   initial_by ([island, incarnation] that made it, for a version 0), epoch,
#   passed_over, unsent_from_step: for each fragment the step after which
#   progress is still unpublished: at or below `step`, restored progress; above
#   it, the steps up to it will be done again and belong to an earlier
#   publication; answers: of each base version the island's last step in it, and
#   its holes, [first, last] before that which no version has
SUBMITTED = "submitted"  # fragment, base_version, first_step, step: handed to
#   the publisher; what becomes of it is PUBLISHED, PUBLISH_DROPPED or lost with
#   the island
PUBLISHED = "published"  # fragment, base_version, first_step, step, c_tokens,
#   bytes, codec, secs, key, trigger ("schedule"|"follow"|"drain")
PUBLISH_DROPPED = "publish_dropped"  # fragment, first_step, step, reason
ADOPTED = "adopted"  # fragment, version, step, mode, kept_from_step, bytes,
#   secs, digest, lost_from_step, lost_to_step: steps (from, to] given up by it;
#   optionally muted_until: steps up to it that are done after this belong to
#   an earlier publication; with error feedback answer: as in `started`
RESYNCED = "resynced"  # step, offences, fragments (list of dicts: fragment,
#   version, lost_from_step, lost_to_step, optionally muted_until, answer),
#   checkpoint: a quarantined island took the newest global versions in place
#   of its own
EVALUATED = "evaluated"  # target ("global"|"local"), step, loss (nats per
#   token), tokens (held out), bits_per_token, secs; by the evaluator of a run
#   that has one, step (of the island that is furthest) and skipped (evaluations
#   since the one before that were due and not done)
SAVING = "saving"  # step, serial (of this life), cut (0: none): the state was
#   copied at this moment, to be written in the background
CHECKPOINTED = "checkpointed"  # step, serial, secs, bytes, cut (0: none),
#   durable (whether it can be restored), reason (why not)
REBASED = "rebased"  # fragment, step, version: it was muted until this step and
#   is set to its anchor now
POISONED = "poisoned"  # fragment, step: a fault, its values are not finite now
STOPPED = "stopped"  # step, reason

# Written by the syncer.
LEASE_ACQUIRED = "lease_acquired"  # token
ROUND_OPENED = "round_opened"  # fragment, version, island
MERGED = "merged"  # fragment, version, contributions (list of dicts: key,
#   island, incarnation, first_step, step, c_tokens, staleness, weight,
#   waited_secs, arrived_at, norm), token, absent (islands live but not in),
#   opened_at, closed_at, quorum_secs, grace_secs (offered), grace_spent_secs,
#   queued_secs, grace_facts, merge_secs, outer_grad_norm, cosine, digest,
#   bytes, learning_rate (of the outer step). A syncer that takes over tells the
#   newest merge of each fragment again, as a controller does that sets the run
#   back; a version counts once
DISCARDED = "discarded"  # fragment, key, island, island_incarnation,
#   first_step, step, c_tokens, reason (one of few names; details may follow
#   a colon), arrived_at
QUARANTINED = "quarantined"  # island, island_incarnation, fragment, reason,
#   offences (in a row), suspended_secs (refused unseen for so long)
GLOBAL_DAMAGED = "global_damaged"  # fragment, version, reason: the syncer
#   cannot read the newest version, so the fragment has no merges until the run
#   is set back to a cut; once for each version
HEAD_HEALED = "head_healed"  # fragment, version: the store had damaged or lost
#   its head, and the leading syncer has put it back
MEMBER_JOINED = "member_joined"  # island
MEMBER_LOST = "member_lost"  # island

# Written by every role, every minute and at its end.
STORE_REQUESTS = "store_requests"  # reads, writes, lists, deletes, over_secs:
#   what its process has asked of the store, as `requests.Counter` counts

# A line of metrics/island-<m>.jsonl: step, loss, tokens (of this step),
# grad_norm, update_norm, learning_rate (if known), task (its own scalars),
# step_secs (compute, without pacing), gap_secs (since the previous step ended;
# none for the first step and after an evaluation, checkpoint or drain),
# wall_secs, incarnation.
