"""What a rank that fails leaves for the end of the attempt to find: error_<rank>.json and stacks, beside its log."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from jobkit.errors import DistributedError, HardwareFault, InputError, JobkitError, NotFinite, UsageError
from jobkit.log import log
from jobkit.run import device_kinds, records
from jobkit.run.device_kinds import unit
from jobkit.run.disk_errors import is_full
from jobkit.run.records import FailureReport
from jobkit.run.rundir import RunDir
from jobkit.worker.caller import is_of_library
from jobkit.worker.heartbeat import peak_bytes
from jobkit.worker.launcher import Topology

STACKS_SIGNAL = signal.SIGUSR1
"""Makes each process of a rank write all its stacks to the rank's error log; see supervisor/watchdog.py."""

MAX_TRACEBACK = 8000
MAX_SAMPLES = 256
"""Characters and samples that are kept: the journal and status.json, which are read again and again, hold them."""


def show_stacks_when_asked() -> None:
    """Let STACKS_SIGNAL print stacks, from C: also where a thread that holds the interpreter never lets go of it."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    os.register_at_fork(after_in_child=_show_no_stacks)


def _show_no_stacks() -> None:
    """A loader's worker gets the rank's signals too, and would write into the middle of the rank's stacks."""
    faulthandler.unregister(STACKS_SIGNAL)
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)


class MistakesInALine:
    """An excepthook for scripts: an error that tells the user what to do is shown in a line, without a traceback."""

    def __init__(self) -> None:
        self._show = sys.excepthook

    @classmethod
    def install(cls) -> None:
        """Once in a process."""
        if not isinstance(sys.excepthook, cls):
            sys.excepthook = cls()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, JobkitError):
            self._show(kind, error, trace)
            return
        places = [(frame, line) for frame, line in traceback.walk_tb(trace) if not _is_of_library(frame)]
        where = f"{places[-1][0].f_code.co_filename}:{places[-1][1]}: " if places else ""
        print(f"error: {'' if str(error).startswith(where) else where}{error}", file=sys.stderr)


def _is_of_library(frame: FrameType) -> bool:
    return is_of_library(frame.f_globals.get("__name__"), frame.f_code.co_filename)


def write_report(
    run: RunDir, attempt: int, topology: Topology, error: BaseException, step: int | None, samples: Sequence[int]
) -> None:
    """Write down what happened, where, in which step (None outside the loop) and to which samples."""
    if isinstance(error, NotFinite):  # on a device it is known some steps later
        step, samples = error.step, error.samples
    report = FailureReport(
        time=time.time(),
        rank=topology.rank,
        node_index=topology.node,
        node=(error.node if isinstance(error, HardwareFault) else None) or os.environ.get("SLURMD_NODENAME"),
        error=f"{type(error).__name__}: {error}{_advice(error)}".strip(),
        traceback="".join(traceback.format_exception(error))[-MAX_TRACEBACK:],
        step=step,
        samples=list(samples[:MAX_SAMPLES]),
        alone=isinstance(error, DistributedError),
        disk=is_full(error),
        final=_would_fail_again(error),
        not_finite=True if isinstance(error, NotFinite) and error.repeats else None,
        faulty_node=error.node if isinstance(error, HardwareFault) else None,
        **_memory(error),
    )
    try:
        records.write(run.error_file(attempt, topology.rank), report)
    except OSError as problem:
        log.warning("the error could not be written down: %s", problem)


def _would_fail_again(error: BaseException) -> bool:
    if isinstance(error, NotFinite):
        return not error.repeats
    return isinstance(error, (UsageError, InputError)) or _has_no_deterministic_form(error)


def _has_no_deterministic_form(error: BaseException) -> bool:
    """Whether torch has refused an operation because the YAML asks for `deterministic: true`."""
    return isinstance(error, RuntimeError) and "torch.use_deterministic_algorithms(" in str(error)


def _advice(error: BaseException) -> str:
    return "; set `deterministic: warn` to go on without it" if _has_no_deterministic_form(error) else ""


def _memory(error: BaseException) -> dict[str, Any]:
    torch = sys.modules.get("torch")  # a command's rank may never import it
    if torch is not None and (device := _device_without_memory(torch, error)):
        from jobkit.train.devices import peak_memory

        return {"out_of_memory": device, "peak_bytes": peak_memory()}
    # Without memory even torch's allocator on the CPU raises a plain RuntimeError.
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return {"out_of_memory": "host", "peak_bytes": peak_bytes()}
    return {"peak_bytes": peak_bytes()}


def _device_without_memory(torch: Any, error: BaseException) -> str | None:
    """What a person calls the accelerator whose memory was too small; None where that is not the error."""
    # Without a device of its kind torch names the one that it was built for.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Older torch_npu's `NPU out of memory. Tried to allocate`, MPS's and drivers' errors have no class of their own.
    by_message = accelerator is not None and isinstance(error, RuntimeError) and "out of memory" in str(error)
    if not by_message and not isinstance(error, torch.OutOfMemoryError):
        return None
    return unit(device_kinds.AUTO if accelerator is None else accelerator.type)
