"""A rank of a YAML's `command:` becomes that program, with RANK, WORLD_SIZE, MASTER_ADDR and the others set.

    agent --fork--> rank --exec--> python <snapshot>/train.py --out=<run directory>/outputs

The program has the rank's process id, so that signals reach it directly, and its exit code is the rank's: 0 is
finished, 75 is stopped.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jobkit.addresses import interface_towards
from jobkit.errors import InputError
from jobkit.worker import snapshot_path
from jobkit.worker.rank import Rank
from jobkit.worker.signals import STOP_SIGNALS

_PROGRAMS = (".py", ".sh")

# `python -m MODULE` with the snapshot in the place of the current folder, which Python puts first on its import path.
_RUN_MODULE = """\
import runpy, sys
code, module = sys.argv.pop(1), sys.argv.pop(1)
sys.path[0] = code
runpy._run_module_as_main(module)
"""


def become_command(rank: Rank) -> NoReturn:
    """Replace this process by the program of the run's `command:`. Raises InputError if there is no such program."""
    from jobkit.run.load import with_run_dir

    code, source = rank.run.code.resolve(), Path.cwd()
    words: list[str] = with_run_dir(rank.config.command, rank.run.path)
    if words != rank.config.command:
        rank.run.outputs.mkdir(exist_ok=True)
    words = in_snapshot(words, code, source)
    program = shutil.which(words[0])
    if program is None:
        raise InputError("no such program on this node", key="command", found=words[0])
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **snapshot_path.environment(code, source, os.environ)}
    # Gloo would resolve the name of the host to find its interface; on many clusters names do not resolve.
    if interface := interface_towards(environment["MASTER_ADDR"]):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    sys.stdout.flush()
    sys.stderr.flush()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.execve(program, [program, *words[1:]], environment)  # a Python knows its environment by the path of argv[0]


def in_snapshot(words: Sequence[str], code: Path, source: Path) -> list[str]:
    """The words of a command that was typed in `source`, with its programs and modules taken from the snapshot.

    Python puts the folder of `train.py`, and for `-m` the current one, before PYTHONPATH.
    """
    copied = [_copy_of(word, code, source) for word in words]
    if re.fullmatch(r"(.*/)?python[\d.]*", words[0]) and "-m" in words:
        index = words.index("-m")
        if index + 1 < len(words) and all(word.startswith("-") for word in words[1:index]):
            copied[index : index + 2] = ["-c", _RUN_MODULE, str(code), words[index + 1]]
    return copied


def _copy_of(word: str, code: Path, source: Path) -> str:
    """The copy of a program file in the snapshot; any other word as it is."""
    path = source / word
    if word.endswith(_PROGRAMS) and path.is_relative_to(source):
        copy = code / path.relative_to(source)
        if ".." not in copy.parts and copy.is_file():
            return str(copy)
    return word
