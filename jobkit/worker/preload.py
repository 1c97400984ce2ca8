"""Imports before a fork: as many as do not keep a parent from forking, which one that starts a thread would."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from jobkit.worker.forked import get_when_parent_ends

DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci")
"""What a process has open that has touched a device."""


def preload(modules: Sequence[str]) -> str | None:
    """Import modules; why a fork afterwards would be no good, where one of them starts a thread or touches a device.

    A fork has none of the threads, and may find locked what they held.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's OpenBLAS starts its threads at the import
    problem = None
    gc.disable()  # what an import makes stays: to look through it while it grows takes 0.8 s of torch's 7
    for name in modules:
        importlib.import_module(name)
        if problem is None and (found := _against_forking()):
            problem = f"importing {name} has {found}"
    # Not collected before: of torch's imports 2 % is garbage, and to find it takes 0.3 s.
    gc.freeze()  # the ranks share this memory until somebody writes to it, as each garbage collection would
    gc.enable()
    return problem


class Trial:
    """Imports modules in a forked process first: one that starts a thread in the parent could not be undone.

    That process, `pid`, calls `leave` at its start. When it has ended, `import_harmless` does the rest here.
    Raises OSError where nothing can be forked.
    """

    def __init__(self, modules: Sequence[str], leave: Callable[[], None]) -> None:
        self._modules = modules
        self.has_ended = False
        # Not a pipe: its other end stays open in what an import has started.
        self._told = tempfile.TemporaryFile()  # noqa: SIM115 - closed where it is read
        self.pid = os.fork()
        if self.pid == 0:
            try:
                get_when_parent_ends(signal.SIGKILL)
                leave()
                self._told.write(json.dumps(find_harmful(self._modules)).encode())
                self._told.flush()
            finally:
                os._exit(0)

    def import_harmless(self, between: Callable[[], object]) -> dict[str, str]:
        """Import what has done no harm, with a call of `between` after each; what is left out, with the reason."""
        with self._told as file:
            file.seek(0)
            data = file.read()
        left_out: dict[str, str] = (
            json.loads(data) if data else dict.fromkeys(self._modules, "its import ended the process")
        )
        gc.disable()
        for name in self._modules:
            if name not in left_out and name not in sys.modules:
                with contextlib.suppress(Exception):  # it is imported again where it is needed, and told there
                    importlib.import_module(name)
                between()
        gc.freeze()
        gc.enable()
        return left_out


def find_harmful(modules: Sequence[str]) -> dict[str, str]:
    """Import modules; those that start a thread or touch a device, and those that cannot be imported, with a reason."""
    harmful: dict[str, str] = {}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for name in modules:
            threads, devices = _threads(), _devices()
            try:
                importlib.import_module(name)
            except BaseException as error:
                harmful[name] = f"{type(error).__name__}: {error}"
            if _threads() > threads:
                harmful[name] = "it starts a thread"
            elif opened := _devices() - devices:
                harmful[name] = f"it opens {min(opened)}"
    return harmful


def _against_forking() -> str | None:
    """What a fork of this process would break."""
    if _threads() > 1:
        return "started a thread"
    return f"opened {min(opened)}" if (opened := _devices()) else None


def _threads() -> int:
    with contextlib.suppress(OSError):
        return len(list(Path("/proc/self/task").iterdir()))
    return 1


def _devices() -> set[str]:
    """The files of devices that this process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(file.readlink()))
    return {name for name in found if name.startswith(DEVICE_FILES)}
