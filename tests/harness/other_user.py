"""Code that runs as somebody else, who has no rights of the test's user."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

NOBODY = 65534

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(function: Callable[[], T]) -> T:
    """What a function returns in a process of NOBODY's; fails with its traceback where it raises.

    Forked: this user's Python may be where another user cannot read. So what it imports must be imported before.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            answer: tuple[bool, object] = (True, function())
        except BaseException:
            answer = (False, traceback.format_exc())
        with os.fdopen(write_end, "wb") as file:
            pickle.dump(answer, file)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        done, value = pickle.load(file)
    os.waitpid(child, 0)
    assert done, value
    return value  # type: ignore[no-any-return]


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that everybody can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="jobkit-open-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
