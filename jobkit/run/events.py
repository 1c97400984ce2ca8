"""The events of a run's journal, by name: whoever writes one and whoever reads it takes the name from here."""

from __future__ import annotations

from enum import Enum


class Event(str, Enum):
    """What may happen to a run. The fields of each are read in run/status.py; others are for people."""

    SUBMITTING = "submitting"
    """A submission began; what follows says how it went."""
    SUBMITTED = "submitted"
    SUBMIT_FAILED = "submit_failed"
    WAITING = "waiting"
    """Its own process waits, before the next attempt, for what `for` says."""
    STARTED = "started"
    """An attempt began: it holds the lease."""
    PLACED = "placed"
    """Its ranks are on these nodes; not recorded again where they stay."""
    NODE_LOST = "node_lost"
    """The job's ranks cannot be reached there any more; Slurm may not know yet."""
    RESUMED = "resumed"
    """Its loop began, from a checkpoint, from a snapshot in memory (`memory`) or from step 0."""
    STEPPED = "stepped"
    """It has done its first step."""
    CHECKPOINT = "checkpoint"
    """One is durable."""
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_INTERVAL = "checkpoint_interval"
    """`checkpoint.every: auto` changed how often there is one."""
    SET_ASIDE = "set_aside"
    """A checkpoint that does not verify."""
    REWOUND = "rewound"
    """A person has gone back to a checkpoint: what came after it is in `branch`, and `skip_samples` are left out."""
    EVALUATION_INTERRUPTED = "evaluation_interrupted"
    EVALUATION_RESUMED = "evaluation_resumed"
    STRAGGLER = "straggler"
    STRAGGLER_OVER = "straggler_over"
    INTERRUPTED = "interrupted"
    """An attempt ended before the run did; `cause` is one of run.status.CAUSES."""
    RESTARTED = "restarted"
    """The job keeps its nodes, and the ranks start again on them."""
    REQUEUED = "requeued"
    REQUEUE_FAILED = "requeue_failed"
    EXCLUDED = "excluded"
    """A node that the run will not use again."""
    CANCEL_REQUESTED = "cancel_requested"
    CANCELLED = "cancelled"
    FINISHED = "finished"
    FAILED = "failed"

    __str__ = str.__str__
