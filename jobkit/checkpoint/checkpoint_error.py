"""What goes wrong with a checkpoint, as the one error that its users catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from jobkit.errors import CheckpointError
from jobkit.group import describe
from jobkit.run.disk_errors import disk_errno


@contextmanager
def as_checkpoint_error(what: str) -> Iterator[None]:
    """Raise what goes wrong inside as CheckpointError(`what: reason`), which keeps the number of the disk's error.

    Where ranks did it together the reason names the first that failed. A CheckpointError stays as it is.
    """
    try:
        yield
    except CheckpointError:
        raise
    except CheckpointException as error:  # torch's, with what each rank raised; not an Exception
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise _checkpoint_error(f"{what}: rank {rank}: {describe(cause)}", cause) from error
    except Exception as error:
        raise _checkpoint_error(f"{what}: {describe(error)}", error) from error


def _checkpoint_error(message: str, cause: BaseException) -> CheckpointError:
    error = CheckpointError(message)
    error.errno = disk_errno(cause) or None
    return error
