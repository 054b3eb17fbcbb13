"""Names and fields of tape events.

The tape is the record of a run: one JSON object a line, one file per role and
incarnation under `tape/`. Everything a report shows is computed from it and
from the metric logs, so a crashed run reports as well as a finished one.

Every line carries `event`, `role`, `incarnation` and `wall_secs` (Unix time,
for pictures only; no decision compares wall clocks).
"""

# Written by the controller.
RUN_STARTED = "run_started"  # method, islands (M), total_tokens; once for
#   each session of a run
ISLAND_STARTED = "island_started"  # island, island_incarnation, pid, cores
ISLAND_READY = "island_ready"  # island, island_incarnation, step
ISLAND_DIED = "island_died"  # island, island_incarnation, cause; not for one
#   that left as it was told
ISLAND_RESTART = "island_restart"  # island, attempt, delay_secs
SYNCER_STARTED = "syncer_started"  # pid
SYNCER_DIED = "syncer_died"  # cause
FAULT_INJECTED = "fault_injected"  # kind, target, at_tokens
PROGRAM_DISPATCHED = "program_dispatched"  # island, seq, program, args
PROGRAM_DONE = "program_done"  # island, seq, program, result
RUN_STOPPING = "run_stopping"  # reason
RUN_FINISHED = "run_finished"  # status ("finished"|"stopped"|"failed"|
#   "killed"), reason

# Written by an island. A step range (first_step, step] is open on the left.
STARTED = "started"  # step, restored_from, tokens_per_step, kind,
#   relative_speed, paced_step_secs (0: runs at its own speed), topology,
#   devices (chips), share; optionally unsent_from_step: a list, for each
#   fragment the step after which restored progress is still unpublished
SUBMITTED = "submitted"  # fragment, first_step, step: handed to the publisher;
#   what becomes of it is PUBLISHED, PUBLISH_DROPPED or lost with the island
PUBLISHED = "published"  # fragment, base_version, first_step, step, c_tokens,
#   bytes, codec, secs, key, trigger ("schedule"|"follow"|"drain")
PUBLISH_DROPPED = "publish_dropped"  # fragment, first_step, step, reason
ADOPTED = "adopted"  # fragment, version, step, mode, bytes, secs, digest,
#   lost_from_step, lost_to_step: steps (from, to] given up by adopting
EVALUATED = "evaluated"  # target ("global"|"local"), step, loss (nats per
#   token), tokens (held out), bits_per_token, secs
CHECKPOINTED = "checkpointed"  # step, secs, durable (else: being written)
STOPPED = "stopped"  # step, reason

# Written by the syncer.
LEASE_ACQUIRED = "lease_acquired"  # token
ROUND_OPENED = "round_opened"  # fragment, version, island
MERGED = "merged"  # fragment, version, contributions (list of dicts: key,
#   island, incarnation, first_step, step, c_tokens, staleness, weight,
#   waited_secs), absent (islands live but not in), quorum_secs,
#   grace_secs (offered), grace_spent_secs, merge_secs, outer_grad_norm,
#   bytes. A syncer that takes over tells the newest merge of each fragment
#   again if its own tape may lack it; a version counts once
DISCARDED = "discarded"  # fragment, key, island, island_incarnation,
#   first_step, step, c_tokens, reason (one of few names; details may follow
#   a colon)
MEMBER_JOINED = "member_joined"  # island
MEMBER_LOST = "member_lost"  # island

# A line of metrics/island-<m>.jsonl: step, loss, tokens (of this step),
# step_secs (compute, without pacing), gap_secs (since the previous step ended;
# none for the first step and after an evaluation, checkpoint or drain),
# wall_secs, incarnation.
