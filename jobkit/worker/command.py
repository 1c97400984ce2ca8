"""One rank of a YAML's `command:`: it becomes that program, with RANK, WORLD_SIZE, MASTER_ADDR and the like set."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from submitit.core.job_environment import JobEnvironment

from jobkit.addresses import RENDEZVOUS_SECONDS, announce, answering, free_port, interface_towards, new_token
from jobkit.errors import DistributedError, JobkitError
from jobkit.run.command_line import find_program, is_python, target
from jobkit.run.own_outputs import place_outputs
from jobkit.run.rundir import RunDir
from jobkit.worker.determinism import set_variables
from jobkit.worker.failure import write_report
from jobkit.worker.launcher import Topology, topology_of
from jobkit.worker.startup import jobkit_snapshot
from jobkit.worker.stop import STOP_SIGNALS

_UNREACHED = "ES"
"""Options of a Python that runs no sitecustomize of ours, and yet looks in the current folder."""

# What `python -m` does, by the function that does it, with the snapshot where it would put the current folder.
_RUN_MODULE = """\
import runpy, sys
code, module = sys.argv.pop(1), sys.argv.pop(1)
if not sys.path[0]:
    sys.path[0] = code
runpy._run_module_as_main(module)
"""

_IN_SNAPSHOT = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt")
"""Files named on the command line that are taken from the snapshot: programs, and what they may be configured by."""

_WRITTEN = re.compile(r"-o|(?!.*conf)(.*[-_.])?(out|save|log|dump|write|export|result|metric).*", re.IGNORECASE)
"""Options whose file is an output, to be found where it was typed."""


def become_command(path: str) -> NoReturn:
    """Replace this process by the command of the run directory `path`: the launcher's signals then reach it directly.

    JOBKIT_RUN and JOBKIT_ATTEMPT, by which a jobkit.init() in it knows its run, are set already.
    """
    run, attempt = RunDir(path), int(os.environ["JOBKIT_ATTEMPT"])
    config = run.config()
    topology = topology_of(JobEnvironment())
    try:
        topology.check(config.resources.ranks_per_node, config.resources.fewest_nodes, config.resources.nodes)
        # Where the program can form its process group: MASTER_ADDR and MASTER_PORT.
        find_port = _tell_port if topology.rank == 0 else _ask_for_port
        address, port = find_port(topology, run.rendezvous_file(attempt))
        source, code = Path(os.environ["JOBKIT_SOURCE"]), Path(os.environ["JOBKIT_CODE"])
        copied = dataclasses.replace(config, command=in_snapshot(config.command, source, code))
        words = place_outputs(copied, run).command
        program = find_program(words[0])  # its path becomes argv[0], by which a Python knows its environment
        if program is None:
            raise JobkitError(f"command: {words[0]}: no such program on this node")
        environment = {**os.environ, **topology.environment(address, port), "PYTHONUNBUFFERED": "1"}
        environment.update(jobkit_snapshot.environment(str(source), str(code), os.environ))
        set_variables(config.deterministic, environment)
        if interface := interface_towards(address):
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        _become([program, *words[1:]], environment, is_told=lambda: run.stop_request(attempt) is not None)
    except BaseException as error:
        write_report(run, attempt, topology, error, None, ())
        raise


def _tell_port(topology: Topology, file: Path) -> tuple[str, int]:
    token, port, waited_for = new_token(), free_port(), set(range(1, topology.world_size))
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    with socket.create_server(("", 0), backlog=topology.world_size) as server:
        address = announce(file, server.getsockname()[1], token, topology.nodes)
        while waited_for:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(map(str, sorted(waited_for)))
                raise DistributedError(f"rank(s) {missing} did not come within {RENDEZVOUS_SECONDS:g} s") from None
            with contextlib.suppress(OSError, ValueError), connection:
                connection.settimeout(
                    3
                )  # whoever connects and says nothing, as a port scan, must not hold up the ranks
                asking = connection.recv(64).decode().split()  # nothing, where only an address was tried
                if asking[:1] == [token]:
                    connection.sendall(str(port).encode())
                    waited_for.discard(int(asking[1]))
    file.unlink(missing_ok=True)
    return address, port


def _ask_for_port(topology: Topology, file: Path) -> tuple[str, int]:
    for address, port, token in answering(file):
        # 30 s: rank 0 answers one rank after the other, each of which may take 3 s to speak.
        with contextlib.suppress(OSError, ValueError), socket.create_connection((address, port), 30) as connection:
            connection.sendall(f"{token} {topology.rank}".encode())
            return address, int(connection.recv(64))
    raise AssertionError("unreachable")


def in_snapshot(command: Sequence[str], source: Path, code: Path) -> list[str]:
    """`command`, typed in `source`, with the user's files taken from the snapshot `code`.

    The module of `python -m` is, too, by the sitecustomize in worker/startup; here where a Python does not run that.
    """
    words = [command[0]]
    for before, word in itertools.pairwise(command):
        name, sign, value = word.rpartition("=")  # --config=conf.yaml
        option = name if sign else before if before.startswith("-") else ""
        copy = None if _WRITTEN.fullmatch(option) else _copy_of(value, source, code)
        words.append(f"{name}{sign}{copy}" if copy else word)
    own = code / _relative(command[0], source)
    if "/" in command[0] and own.is_file() and os.access(own, os.X_OK):
        words[0] = str(own)
    runs = target(command) if is_python(command[0]) else None
    if runs is not None and runs.kind == "module" and any(map(_is_unreached, command[1 : runs.index - 1])):
        words[runs.index - 1 : runs.index + 1] = ["-c", _RUN_MODULE, str(code), runs.text]
    return words


def _copy_of(word: str, source: Path, code: Path) -> Path | None:
    if not word.endswith(_IN_SNAPSHOT):
        return None
    copy = code / _relative(word, source)
    with contextlib.suppress(OSError):  # too long for a name: statements that end with one
        return copy if copy.resolve().is_relative_to(code.resolve()) and copy.is_file() else None
    return None


def _is_unreached(option: str) -> bool:
    return option.startswith("-") and option[1:2] not in "-WX" and not set(_UNREACHED).isdisjoint(option)


def _relative(word: str, source: Path) -> str:
    """An absolute path below the folder where the command was typed, as it could have been typed there."""
    return os.path.relpath(word, source) if Path(word).is_absolute() and Path(word).is_relative_to(source) else word


def _become(words: Sequence[str], environment: Mapping[str, str], is_told: Callable[[], bool]) -> NoReturn:
    """`is_told` says whether the attempt was asked to stop: a signal that came before there were handlers is lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # After the handlers are the system's again, so that none comes in between and is lost.
    if STOP_SIGNALS.signal is not None:  # it came before there was a program to get it
        os.kill(os.getpid(), STOP_SIGNALS.signal)
    if is_told():
        os.kill(os.getpid(), signal.SIGTERM)
    os.execve(words[0], list(words), dict(environment))
