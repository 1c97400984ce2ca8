"""Which checkpoints of a run are there: a person may have removed some that the journal tells of."""

from __future__ import annotations

from jobkit.checkpoint.store import Store
from jobkit.run.rundir import RunDir


def where_deleted(run: RunDir, step: int) -> str:
    """What to add to a checkpoint's step where it is not there any more: from where the run continues instead."""
    store = Store(run.checkpoints)
    begins = Store(run.start_from, missing_seconds=0)
    if store.has(step) or begins.has(step):
        return ""
    left = store.steps() or begins.steps()
    then = f"it continues from step {left[0]}" if left else "there is none; it begins again at step 0"
    return f", which is not in {run.checkpoints} any more: {then}"
