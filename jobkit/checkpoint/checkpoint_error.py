"""What goes wrong with a checkpoint, as the one error that its users catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jobkit.errors import CheckpointError
from jobkit.group import RankError, RankGroup, describe
from jobkit.run.disk_errors import disk_errno


@contextmanager
def as_checkpoint_error(what: str, ranks: RankGroup | None = None) -> Iterator[None]:
    """Raise what goes wrong inside as CheckpointError(`what: reason`), which keeps the number of the disk's error.

    Where `ranks` do it together the reason names the one that failed, on that rank too. A CheckpointError stays as it
    is.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        is_own = ranks is not None and ranks.world_size > 1 and not isinstance(error, RankError)
        who = f"rank {ranks.rank}: " if ranks is not None and is_own else ""
        wrapped = CheckpointError(f"{what}: {who}{describe(error)}")
        wrapped.errno = disk_errno(error) or None
        raise wrapped from error
