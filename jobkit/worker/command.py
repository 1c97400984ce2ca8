"""A rank of a YAML's `command:` becomes that program, with RANK, WORLD_SIZE, MASTER_ADDR and the others set.

    agent --fork--> rank --exec--> python <snapshot>/train.py --out=<run directory>/outputs
    torchrun, mpirun, srun --> python -m jobkit.worker --run_command--> python train.py, its child

Under an agent the program has the rank's process id, so that signals reach it directly. Its exit code is the rank's: 0
is finished, 75 is stopped.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jobkit.addresses import interface_towards
from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE, InputError
from jobkit.loop.rank import Rank
from jobkit.run import records
from jobkit.run.records import RankReport
from jobkit.wire.pages import Phase
from jobkit.wire.signals import STOP_SIGNALS
from jobkit.worker import snapshot_path
from jobkit.worker.forked import die_with_parent
from jobkit.worker.rendezvous import Reservation

if TYPE_CHECKING:
    from jobkit.worker.foreign_attempt import ForeignAttempt

POLL_SECONDS = 0.1
"""Between two looks at a program that runs as a child."""


def become_command(rank: Rank) -> NoReturn:
    """Replace this process by the program of the run's `command:`. Raises InputError if there is no such program."""
    from jobkit.config.load import with_run_dir

    code, source = rank.run.code.resolve(), Path.cwd()
    words: list[str] = with_run_dir(rank.config.command, rank.run.path)
    if words != rank.config.command:
        rank.run.outputs.mkdir(exist_ok=True)
    words = in_snapshot(words, code, source)
    program = shutil.which(words[0])
    if program is None:
        raise InputError("no such program on this node", key="command", found=words[0])
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **snapshot_path.for_programs(code, source, os.environ)}
    for name, value in rank.config.deterministic_variables.items():
        environment.setdefault(name, value)
    # Gloo would resolve the name of the host to find its interface; on many clusters names do not resolve.
    if interface := interface_towards(environment["MASTER_ADDR"]):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    sys.stdout.flush()
    sys.stderr.flush()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.execve(program, [program, *words[1:]], environment)  # a Python knows its environment by the path of argv[0]


def run_command(begun: ForeignAttempt) -> int:
    """Run the program of `command:` under a launcher that is not jobkit's, and return its exit code.

    Its process group needs a port of its own: this process and its launcher listen at MASTER_PORT.
    """
    from jobkit.config.load import with_run_dir

    rank, ranks = begun.rank, begun.joined.ranks
    reserved = Reservation() if ranks.is_main else None
    port = ranks.broadcast(reserved.port if reserved is not None else None)
    environment = {**os.environ, "MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1"}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    rank.run.outputs.mkdir(exist_ok=True)
    rank.page.beat(rank.attempt, Phase.ENDING, -1)  # a stop is the program's to take
    parent = os.getpid()
    program = subprocess.Popen(
        with_run_dir(rank.config.command, rank.run.path),
        env=environment,
        pass_fds=[rank.page.descriptor],
        start_new_session=True,  # a terminal's Ctrl-C is a stop, which comes by this process
        preexec_fn=lambda: die_with_parent(parent),
    )
    is_told = False
    while (code := program.poll()) is None:
        if rank.stop_asked and not is_told:
            program.terminate()
            is_told = True
        time.sleep(POLL_SECONDS)
    if code == EXIT_FINISHED:  # a program without jobkit.init has finished once it has on all ranks
        ranks.barrier()
    end = records.read(RankReport, rank.run.end_file(rank.attempt, rank.rank))
    if end is None:
        kinds: dict[int, Any] = {EXIT_FINISHED: "finished", EXIT_RESUMABLE: "stopped"}
        facts: dict[str, Any] = {"rank": rank.rank, "attempt": rank.attempt, "time": time.time()}
        end = RankReport(
            kind=kinds.get(code, "failed"), error=f"the program ended with {code}" if code else None, **facts
        )
    begun.close(end, code)
    return code


def in_snapshot(words: Sequence[str], code: Path, source: Path) -> list[str]:
    """The words of a command that was typed in `source`, with each file that the snapshot holds taken from there: a
    program, `conf.yaml`, or `--config=conf.yaml`."""
    return [_in_snapshot(word, code, source) for word in words]


def _in_snapshot(word: str, code: Path, source: Path) -> str:
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    path = source / value
    if value and path.is_relative_to(source):
        copy = code / path.relative_to(source)
        if ".." not in copy.parts and copy.is_file():
            return f"{option}{equals}{copy}"
    return word
