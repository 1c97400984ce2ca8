"""A YAML's `command:` under a launcher: each rank runs the program beside it, and rank 0 records how the run ended.

The process that the launcher has started stays: without jobkit.init in the program nobody else could say that the run
has finished. Signals are passed on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from datetime import timedelta
from typing import Literal

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from jobkit.addresses import free_port
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, InputError
from jobkit.log import log
from jobkit.run import processes, records
from jobkit.run.command_line import find_program
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.own_outputs import place_outputs
from jobkit.run.records import Failure
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.supervisor.diagnosis import EndCause, own_failure
from jobkit.worker.determinism import set_variables
from jobkit.worker.disks import DISKS, Disks
from jobkit.worker.guard import Guard
from jobkit.worker.rendezvous import Rendezvous
from jobkit.worker.restarts import outlives_ranks

LOOK_SECONDS = 0.1
"""Between two looks at the program and at the signals that have come."""

REPORT_SECONDS = 10.0
"""How long rank 0 waits for what the others say, where one has failed or all were told to stop. Launchers give the
ranks 30 s between SIGTERM and SIGKILL."""

SAVE_SECONDS = 30.0
"""What a program gets to end after that of another rank has failed."""

FAILED = "failed"
"""In the store: how the program of the rank ended that has failed first."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How the program of one rank has ended."""

    rank: int
    state: Literal["finished", "stopped", "failed"]
    code: int
    """As subprocess has it: below 0 for a signal."""


def run_command(found: Rendezvous, run: RunDir, config: Config, attempt: int, disks: Disks) -> int:
    """Run `config.command` on all ranks of a rendezvous, and return the exit code of this one: 0, 1 or 75."""
    assert found.store is not None
    signals = _Signals()
    store = PrefixStore("jobkit/ends", found.store)
    words = place_outputs(config, run).command
    program = found.group.all_or_none(lambda: _program(words[0]))
    environment = _environment(found, run, config, attempt, disks)
    guard = Guard()  # ends what the program leaves when this process has ended, or was killed
    child = subprocess.Popen([program, *words[1:]], env=environment, start_new_session=True)
    guard.watch([child.pid])
    code, others_failed = _wait(child, signals, store, found.topology.world_size)
    own = Ended(found.topology.rank, _state(code, is_told=signals.is_told or others_failed), code)
    if own.state == "failed" and not _is_first_failed(store, own):
        own = dataclasses.replace(own, state="stopped")  # by the end of the other one's connections
    _tell(store, own)
    if own.rank != 0:
        return {"finished": EXIT_FINISHED, "failed": EXIT_FAILED, "stopped": EXIT_RESUMABLE}[own.state]
    return _record_end(run, attempt, _all_ends(own, store, found.topology.world_size, signals), signals)


def _program(name: str) -> str:
    program = find_program(name)
    if program is None:
        raise InputError(f"command: {name}: no such program on this machine")
    return program


def _environment(found: Rendezvous, run: RunDir, config: Config, attempt: int, disks: Disks) -> dict[str, str]:
    """What the program gets: the place of its rank, its run, and where it can form its process group."""
    topology = found.topology
    environment = {
        **os.environ,
        "JOBKIT_RUN": str(run.path),
        "JOBKIT_ATTEMPT": str(attempt),
        "JOBKIT_SCHEDULER": "local",
        "PYTHONUNBUFFERED": "1",
        DISKS: json.dumps(disks),
    }
    if topology.world_size == 1 or not outlives_ranks():  # else torchrun's own store is there for the program too
        port = found.group.on_main(free_port)  # MASTER_PORT itself is in use: the ranks talk over it
        environment |= topology.environment(os.environ["MASTER_ADDR"], port)
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    set_variables(config.deterministic, environment)
    return environment


class _Signals:
    """The signals to stop that this process has received, for its program."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.is_told = False
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.numbers.append(number)
        self.is_told = True

    def take(self) -> list[int]:
        """Those that have come since the last call."""
        taken, self.numbers = self.numbers, []
        return taken


def _wait(child: subprocess.Popen[bytes], signals: _Signals, store: Store, world_size: int) -> tuple[int, bool]:
    """(the program's exit code, whether it was ended because another rank's has failed)."""
    others_failed, until, next_look = False, float("inf"), 0.0
    told = _Told(child)
    ended = threading.Thread(target=child.wait, daemon=True)
    ended.start()
    while ended.is_alive():
        for number in signals.take():
            told.tell(number)
        told.tell_the_rest()
        if world_size > 1 and not others_failed and time.monotonic() > next_look:
            others_failed = _has_failed(store)
            if others_failed:
                told.tell(signal.SIGTERM)
                until = time.monotonic() + SAVE_SECONDS
            next_look = time.monotonic() + 5 * LOOK_SECONDS
        if time.monotonic() > until:
            child.kill()
        ended.join(LOOK_SECONDS)  # no longer than the program lives: which rank has failed first is told by the order
    return child.returncode, others_failed


class _Told:
    """Passes signals on to those processes of a program that have a handler for them.

    One without, as a shell, gets it when they have ended: it does not go on with its next line.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        self.saving: list[int] = []
        self.rest: int | None = None

    def tell(self, number: int) -> None:
        self.saving = processes.that_catch([self.child.pid], number)
        for pid in self.saving:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.rest = None if self.child.pid in self.saving else number

    def tell_the_rest(self) -> None:
        if self.rest is not None and not any(map(processes.lives, self.saving)):
            self.child.send_signal(self.rest)
            self.rest = None


def _has_failed(store: Store) -> bool:
    try:
        return store.check([FAILED])
    except RuntimeError:  # with rank 0, or torchrun's agent: the store has gone
        return True


def _state(code: int, *, is_told: bool) -> Literal["finished", "stopped", "failed"]:
    if code == EXIT_RESUMABLE or is_told:
        return "stopped"
    return "failed" if code else "finished"


def _is_first_failed(store: Store, own: Ended) -> bool:
    """Tell that this rank's program has failed; False where that of another rank had before."""
    text = _text(own)
    try:
        return store.compare_set(FAILED, "", text) == text.encode()
    except RuntimeError:  # the store has gone, and nobody can say
        return True


def _tell(store: Store, own: Ended) -> None:
    with contextlib.suppress(RuntimeError):
        store.set(f"ended/{own.rank}", _text(own))


def _text(ended: Ended) -> str:
    return json.dumps(dataclasses.asdict(ended))


def _all_ends(own: Ended, store: Store, world_size: int, signals: _Signals) -> list[Ended]:
    """How the programs of all ranks ended, as far as they say so."""
    found, since = {own.rank: own}, time.monotonic()
    store.set_timeout(timedelta(seconds=REPORT_SECONDS))
    while len(found) < world_size:
        for rank in set(range(world_size)) - set(found):
            if store.check([f"ended/{rank}"]):
                found[rank] = Ended(**json.loads(store.get(f"ended/{rank}")))
        goes_on = all(one.state == "finished" for one in found.values()) and not signals.is_told
        since = time.monotonic() if goes_on else since
        if time.monotonic() > since + REPORT_SECONDS:
            break
        time.sleep(LOOK_SECONDS)
    with contextlib.suppress(RuntimeError):  # the store has gone
        if store.check([FAILED]):  # whose process may have been killed since
            first = Ended(**json.loads(store.get(FAILED)))
            found[first.rank] = first
    return [found[rank] for rank in sorted(found)]


def _record_end(run: RunDir, attempt: int, ends: list[Ended], signals: _Signals) -> int:
    """On rank 0: record how the run ended, unless a jobkit.init in the program has; returns the exit code."""
    now = run.status()
    current, ended = now.attempt, now.state
    failed = next((one for one in ends if one.state == "failed"), None)
    if current is not None and current.ended is not None:
        pass
    elif failed is not None:
        cause = own_failure(run, attempt) or _cause_of(failed)
        failure, ended = cause.failure, State.FAILED
        run.record(
            Event.FAILED, attempt=attempt, cause=cause.cause, error=failure.error, failure=records.known(failure)
        )
        log.warning("%s has failed: %s", run.name, failure.error)
    elif all(one.state == "finished" for one in ends):
        ended = State.FINISHED
        run.record(Event.FINISHED, attempt=attempt)
        log.info("%s: finished", run.name)
    else:
        request, ended = run.stop_request(attempt), State.INTERRUPTED
        run.record(Event.INTERRUPTED, attempt=attempt, cause=request.cause if request is not None else "user")
        if current is not None and current.resumed is None:
            log.warning(
                "%s: your program was told to stop, and jobkit has no checkpoint of it: the same command starts it "
                "again, from its beginning or a checkpoint of its own",
                run.name,
            )
    return {State.FINISHED: EXIT_FINISHED, State.FAILED: EXIT_FAILED}.get(ended, EXIT_RESUMABLE)


def _cause_of(ended: Ended) -> EndCause:
    if ended.code < 0:
        name = signal.Signals(-ended.code).name
        return EndCause("killed", Failure(rank=ended.rank, error=f"rank {ended.rank} was killed by {name}"))
    error = f"rank {ended.rank} ended with exit code {ended.code}"
    return EndCause("crashed", Failure(rank=ended.rank, error=error))
