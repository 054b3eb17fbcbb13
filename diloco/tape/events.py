"""Names of tape events.

The tape is the record of a run: one JSON object a line, one file per role and
incarnation under `tape/`. Everything a report shows is computed from it and
from the metric logs, so a crashed run reports as well as a finished one.

`docs/tape.md` has what every line means and all its fields, those of metric
logs too; `diloco.tape.schema` has the kinds of those that readers look at.
"""

# Written by the controller.
RUN_STARTED = "run_started"
ISLAND_STARTED = "island_started"
ISLAND_READY = "island_ready"
ISLAND_DIED = "island_died"
ISLAND_RESTART = "island_restart"
SLICES_CHANGED = "slices_changed"
SYNCER_STARTED = "syncer_started"
SYNCER_DIED = "syncer_died"
EVALUATOR_STARTED = "evaluator_started"
EVALUATOR_DIED = "evaluator_died"
REATTACHED = "reattached"
FAULT_INJECTED = "fault_injected"
PROGRAM_DISPATCHED = "program_dispatched"
PROGRAM_DONE = "program_done"
CUT_REQUESTED = "cut_requested"
CUT_COMPLETED = "cut_completed"
CUT_ABANDONED = "cut_abandoned"
RESTORED = "restored"
NOT_RESTORED = "not_restored"
CONFIG_CHANGED = "config_changed"
RUN_STOPPING = "run_stopping"
RUN_FINISHED = "run_finished"

# Written by an island; one of a global evaluation by the evaluator, if any.
STARTED = "started"
SUBMITTED = "submitted"
PUBLISHED = "published"
PUBLISH_DROPPED = "publish_dropped"
ADOPTED = "adopted"
RESYNCED = "resynced"
EVALUATED = "evaluated"
SAVING = "saving"
CHECKPOINTED = "checkpointed"
REBASED = "rebased"
POISONED = "poisoned"
STOPPED = "stopped"

# Written by the syncer.
LEASE_ACQUIRED = "lease_acquired"
ROUND_OPENED = "round_opened"
MERGED = "merged"
DISCARDED = "discarded"
QUARANTINED = "quarantined"
GLOBAL_DAMAGED = "global_damaged"
HEAD_HEALED = "head_healed"
MEMBER_JOINED = "member_joined"
MEMBER_LOST = "member_lost"

# Written by every role, every minute and at its end.
STORE_REQUESTS = "store_requests"
