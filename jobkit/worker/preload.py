"""Imports before a fork: as many as do not keep a parent from forking, which one that starts a thread would."""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import io
import json
import os
import signal
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing import synchronize
from pathlib import Path
from typing import Any, ClassVar

from jobkit.worker.forked import get_when_parent_ends

COPIES_FOR_ITS_OWN = ("fsspec",)
"""Packages that copy the environment when they are imported, and look for variables of their own only."""

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

    `differing` are environment variables that have other values in each rank: what reads one of them is for a rank to
    import. The process, `pid`, calls `leave` at its start. Raises OSError where nothing can be forked.
    """

    def __init__(self, modules: Sequence[str], differing: Collection[str], leave: Callable[[], None]) -> None:
        self.modules = modules
        self.has_ended = False
        # Not a pipe: its other end stays open in what an import has started.
        self._told = tempfile.TemporaryFile()  # noqa: SIM115 - closed where it is read
        self.pid = os.fork()
        if self.pid == 0:
            try:
                get_when_parent_ends(signal.SIGKILL)
                leave()
                self._told.write(json.dumps(find_harmful(modules, differing)).encode())
                self._told.flush()
            finally:
                os._exit(0)

    def outcome(self) -> tuple[dict[str, str], set[str]]:
        """When it has ended: `find_harmful`'s; all modules where an import has ended the process."""
        with self._told as file:
            file.seek(0)
            data = file.read()
        if not data:
            return dict.fromkeys(self.modules, "its import ended the process"), set(self.modules)
        reasons, harmful = json.loads(data)
        return reasons, set(harmful)


def import_more(modules: Sequence[str], between: Callable[[], object]) -> None:
    """Import modules in a process that forks ranks meanwhile, with a call of `between` after each."""
    gc.disable()
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # it is imported again where it is needed, and told there
                importlib.import_module(name)
            between()
    gc.freeze()
    gc.enable()


class _WatchedEnviron(os._Environ[str]):
    """os.environ that notes what is read of it: a variable by its name, or all by a copy."""

    read: ClassVar[set[str]] = set()
    copied: ClassVar[set[str]] = set()
    _copying: ClassVar[deque[str]] = deque()

    def __iter__(self) -> Iterator[str]:
        names = list(super().__iter__())
        self._copying.clear()
        self._copying.extend(names)
        callers = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None)]
        copier = next(
            (name for name in callers if name not in (__name__, "os", "collections.abc", "_collections_abc")), ""
        )
        if copier.partition(".")[0] not in COPIES_FOR_ITS_OWN:
            self.copied.add(copier)
        return iter(names)

    def __getitem__(self, key: str) -> str:
        if self._copying and self._copying[0] == key:
            self._copying.popleft()
        else:
            self._copying.clear()
            self.read.add(key)
        return super().__getitem__(key)


def find_harmful(modules: Sequence[str], differing: Collection[str] = ()) -> tuple[dict[str, str], list[str]]:
    """Import modules; those that are not for a parent to import, with a reason, and these with all that they import.

    They leave behind what ranks would share or a fork would break, read one of some environment variables, or cannot be
    imported.
    """
    reasons: dict[str, str] = {}
    harmful: dict[str, str] = {}
    os.environ.__class__ = _WatchedEnviron
    semaphores, imported = _watch_semaphores(), _watch_imports()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for name in modules:
            if name in harmful:
                continue
            threads, opened, handlers, before = _threads(), _open_files(), _signal_handlers(), set(sys.modules)
            for watched in (_WatchedEnviron.read, _WatchedEnviron.copied, semaphores, imported):
                watched.clear()
            imported.update(".".join(name.split(".")[:end]) for end in range(1, name.count(".") + 1))
            try:
                importlib.import_module(name)
            except BaseException as error:
                reasons[name] = f"it cannot be imported ({type(error).__name__}: {error})"
            if _threads() > threads:
                reasons[name] = "it starts a thread"
            elif _has_children():
                reasons[name] = "it starts a process"
            elif new := _open_files() - opened:
                reasons[name] = f"it keeps {min(new)} open"
            elif semaphores:
                reasons[name] = "it makes a lock of multiprocessing, which all ranks would share"
            elif _signal_handlers() != handlers:
                reasons[name] = "it installs a signal handler"
            elif told := _WatchedEnviron.read.intersection(differing):
                reasons[name] = f"it reads {min(told)}, which differs from rank to rank"
            elif _WatchedEnviron.copied:
                reasons[name] = "it copies the environment, which differs from rank to rank"
            elif known := imported.intersection(harmful):
                reasons[name] = harmful[min(known)]
            if name in reasons:  # any of what it has imported may have done it
                harmful.update(dict.fromkeys({name, *(set(sys.modules) - before)}, reasons[name]))
    return reasons, sorted(harmful)


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
    return {name for name in _open_files() if name.startswith(DEVICE_FILES)}


def _open_files() -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(file.readlink()))
    return {name for name in found if not name.startswith("/proc/")}  # the folder that is being read


def _has_children() -> bool:
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8"))
    return False


def _signal_handlers() -> list[Any]:
    return [signal.getsignal(number) for number in signal.valid_signals()]


def _watch_semaphores() -> set[int]:
    """A set that grows with each lock of multiprocessing that is made from here on."""
    made: set[int] = set()
    make = synchronize.SemLock.__init__

    def counted(self: Any, *args: Any, **options: Any) -> None:
        made.add(id(self))
        make(self, *args, **options)

    synchronize.SemLock.__init__ = counted  # type: ignore[method-assign]
    return made


def _watch_imports() -> set[str]:
    """A set that grows with each module that an import statement names from here on, also one that is there already."""
    named: set[str] = set()
    do_import = builtins.__import__

    def noted(
        name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
    ) -> Any:
        module = do_import(name, globals, locals, fromlist or (), level)
        found = name if level == 0 else module.__name__
        named.update({found, *(f"{found}.{one}" for one in fromlist or ())})
        return module

    builtins.__import__ = noted
    return named
