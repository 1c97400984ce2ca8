"""jobkit board [RUN ...]: TensorBoard for some runs, on this machine alone, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobkit.cli.arguments import add_selection, chosen_runs, found_runs, is_filtered
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, InputError, JobkitError
from jobkit.run.rundir import RunDir
from jobkit.run.usage import show_examples

ADDRESS = "127.0.0.1"
"""TensorBoard asks for no password: whoever can reach it sees all."""

PORT = 6006
"""TensorBoard's own."""

PORTS = 100
"""How many are tried from PORT on."""

START_SECONDS = 60.0
"""How long TensorBoard may take until it answers, as when it is read from a file server for the first time."""

END_SECONDS = 5.0
"""How long it may take to end; then it is killed."""

OUTPUT = ".output"
"""The file of its folder that has what it prints."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    parser.add_argument("--port", type=int, metavar="N", help=f"(default: the first free one from {PORT} on)")
    show_examples(
        parser,
        "'digits*' --where 'params.lr>=0.03'  the curves of some runs, in one TensorBoard",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve the chosen runs, or all, until Ctrl-C."""
    if arguments.run_names or is_filtered(arguments):
        runs = chosen_runs(arguments)
    else:
        runs = [one.open() for one in found_runs(arguments)]
    if not runs:
        print("no runs: there is nothing to show", file=sys.stderr)
        return EXIT_FINISHED
    port = _port(arguments.port)
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="jobkit-board-") as folder:
        link(runs, Path(folder))
        output = Path(folder) / OUTPUT
        with _tensorboard(Path(folder), port, output) as process:
            try:
                _wait_until_it_answers(process, port, output)
                print(f"TensorBoard of {_named(runs)}: http://localhost:{port}/", flush=True)
                print(f"from another machine: ssh -L {port}:localhost:{port} {socket.gethostname()}", file=sys.stderr)
                print("Ctrl-C ends it", file=sys.stderr)
                process.wait()
            except KeyboardInterrupt:
                return EXIT_FINISHED
    print(f"TensorBoard ended by itself, with exit code {process.returncode}", file=sys.stderr)
    return EXIT_FAILED


def link(runs: Sequence[RunDir], folder: Path) -> None:
    """Make a folder of links to the runs' curves, by their names; one that has none yet is shown once it has."""
    for one in runs:
        place = folder / one.name
        number = 1
        while place.is_symlink():  # of another runs directory
            number += 1
            place = folder / f"{one.name}-{number}"
        place.symlink_to(one.tensorboard)


def _named(runs: Sequence[RunDir]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def _port(wanted: int | None) -> int:
    """A port that is free, or that was asked for; InputError where there is none."""
    if wanted is not None and not 0 < wanted < 1 << 16:
        raise InputError(f"--port: found {wanted}, allowed: 1 to 65535")
    for port in range(PORT, PORT + PORTS) if wanted is None else (wanted,):
        with contextlib.closing(socket.socket()) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((ADDRESS, port))
            except OSError as error:
                if wanted is not None:
                    raise InputError(
                        f"--port {wanted}: {error.strerror}; without --port the first free one is taken"
                    ) from None
                continue
            return port
    raise InputError(f"no port from {PORT} to {PORT + PORTS - 1} is free; give one with --port")


@contextlib.contextmanager
def _tensorboard(folder: Path, port: int, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """TensorBoard, as long as this context; what it prints goes to a file."""
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(folder),
        "--host",
        ADDRESS,
        "--port",
        str(port),
    ]
    with output.open("wb") as file:
        # In a session of its own: Ctrl-C is for this process, which ends it.
        process = subprocess.Popen(
            command, stdout=file, stderr=file, start_new_session=True, preexec_fn=_end_with_parent
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """In TensorBoard's process: end when this one is killed, which then cannot end it."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    """Raise JobkitError where TensorBoard ends, or does not answer in time."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise JobkitError(f"TensorBoard ended with exit code {process.returncode}: {_said(output)}")
        with contextlib.suppress(OSError), socket.create_connection((ADDRESS, port), 1.0):
            return
        time.sleep(0.1)
    raise JobkitError(f"TensorBoard does not answer after {START_SECONDS:.0f} s: {_said(output)}")


def _said(output: Path) -> str:
    """The last line that it printed."""
    lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it has printed nothing")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A closed terminal, and a SIGTERM, end this as Ctrl-C does: TensorBoard would live on, and its folder stay."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]  # a shell lets what it starts in the background ignore SIGINT
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []  # else of nohup
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
