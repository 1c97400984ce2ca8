"""jobkit board [RUN ...]: TensorBoard for some runs, under their names, on this machine alone, until Ctrl-C.

temporary folder: run name -> run/tensorboard (dangling until the run logs) --logdir--> python -m tensorboard.main
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from jobkit.errors import EXIT_FINISHED, InputError, JobkitError, NoSuchRun
from jobkit.run.rundir import RunDir
from jobkit.run.runs import WORDS, find, runs_dir_of, runs_in
from jobkit.usage import program, show_examples

ADDRESS = "127.0.0.1"
"""TensorBoard asks for no password: nobody on another machine shall reach it."""

PORTS = range(6006, 6106)
POLL_SECONDS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="RUN", help=f"{WORDS} (default: all runs)")
    parser.add_argument("--port", type=int, metavar="N", help=f"default: the first free port from {PORTS[0]}")
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="default: $JOBKIT_RUNS or ./runs")
    show_examples(parser, {"'digits*'": "the curves of these runs, and of no others"})


def run(arguments: argparse.Namespace) -> int:
    """Serve the runs until Ctrl-C, SIGTERM or SIGHUP. Raises JobkitError if TensorBoard ends by itself."""
    runs_dir = runs_dir_of(arguments.runs_dir)
    runs = find(arguments.names, runs_dir) if arguments.names else runs_in(runs_dir)
    if not runs:
        raise NoSuchRun(f"no runs in {runs_dir}", hint=f"`{program('submit')} EXP.yaml` makes one")
    port = free_port(PORTS if arguments.port is None else [arguments.port])
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    with tempfile.TemporaryDirectory(prefix="jobkit-board-") as folder, tempfile.TemporaryFile() as log:
        link(runs, Path(folder))
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--host", ADDRESS, "--port", str(port)]
        # In its folder no queue.py of the user hides Python's.
        with subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process:
            try:
                _wait_for_answer(process, port)
                if process.poll() is None:
                    print(f"http://{ADDRESS}:{port}/ shows {len(runs)} run(s) until Ctrl-C; on another machine first:")
                    print(f"ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}", flush=True)
                process.wait()
            except KeyboardInterrupt:
                return EXIT_FINISHED
            finally:
                process.terminate()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().rpartition("\n")[2]
    raise JobkitError(f"TensorBoard has ended with exit code {process.returncode}: {said}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def free_port(ports: Iterable[int]) -> int:
    """Return the first port that is free. Raises InputError."""
    for port in ports:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((ADDRESS, port))
            except (OSError, OverflowError) as error:
                reason = error
            else:
                return port
    raise InputError(f"port {port}: {reason}", key="--port", hint="give the number of a free port")


def link(runs: Iterable[RunDir], folder: Path) -> None:
    """Make a link for each run by its name; by its whole path for a second run of that name in another runs directory.

    A link to a folder that does not exist yet shows the run once it has logged.
    """
    for run in runs:
        place = folder / run.name
        place = folder / "_".join(run.path.parts[1:]) if place.is_symlink() else place
        place.symlink_to(run.tensorboard)


def _wait_for_answer(process: subprocess.Popen[bytes], port: int) -> None:
    """Return when TensorBoard takes connections, or has ended."""
    while process.poll() is None:
        with socket.socket() as trial:
            if trial.connect_ex((ADDRESS, port)) == 0:
                return
        time.sleep(POLL_SECONDS)
