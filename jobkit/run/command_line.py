"""The words of a YAML's `command:`: which of them is the user's own code. No torch, and nothing is run."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

OF_RUNS = ("list", "status", "logs", "cancel", "preempt", "wait", "resume", "rm", "board", "rewind", "report", "queue")
"""The verbs that take `--runs-dir`; the words of a `submit` are taken from a whole command line."""


def this_python() -> str:
    """How the interpreter of this process is typed: by its name only where that means this one, as in an activated
    environment; from a folder below the current one without what is above."""
    if shutil.which("python") == sys.executable:
        return "python"
    path, here = Path(sys.executable), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def to_type(verb: str, *words: str) -> str:
    """A command of jobkit's, as it can be typed here: tools/run activates no environment."""
    if verb in OF_RUNS and "--runs-dir" not in words:
        words = (*words, *runs_dir_typed())
    if shutil.which("jobkit") == sys.argv[0]:  # it is what was typed
        return shlex.join(["jobkit", verb, *words])
    module = ["jobkit.submit"] if verb == "submit" else ["jobkit", verb]
    return shlex.join([this_python(), "-m", *module, *words])


def to_follow_or_stop(run: str, *, has_logs: bool = True) -> str:
    """A line with what to type next of a run that is under way; what a launcher has started has no logs of jobkit's."""
    follow = f"{to_type('logs', '-f', run)}   shows its output; " if has_logs else ""
    return f"{follow}{to_type('cancel', run)}   stops it"


def to_install(*packages: str) -> str:
    """What to type to add packages to this Python, without changing its torch.

    Packages, and no extra of jobkit's: the registry has another project of that name. In a clone they come in the
    versions that jobkit is tested with, if its torch is this one.
    """
    from importlib.metadata import PackageNotFoundError, version  # here: few commands ask for it

    words = [this_python(), "-m", "pip", "install"]
    try:
        torch = f"torch=={version('torch')}"
    except PackageNotFoundError:
        return shlex.join([*words, *packages])
    tested, here = Path(__file__).resolve().parents[2] / "tools" / "constraints.txt", Path.cwd()
    if not (tested.is_file() and torch.partition("+")[0] in tested.read_text(encoding="utf-8").splitlines()):
        return shlex.join([*words, *packages, torch])
    return shlex.join(
        [*words, "-c", str(tested.relative_to(here) if tested.is_relative_to(here) else tested), *packages]
    )


def runs_dir_typed() -> list[str]:
    """`--runs-dir DIR` as it stands on this command line: what is to be typed next needs it, too."""
    started = Path(sys.argv[0])
    if "jobkit" not in (started.name, started.parent.name):  # a program of the user's, with options of its own
        return []
    for index, word in enumerate(sys.argv):
        if word.partition("=")[0] == "--runs-dir":
            return sys.argv[index : index + (1 if "=" in word else 2)]
    return []


def own_words() -> list[str]:
    """The words that started this process; those of the script in a process that the script has started itself, by
    multiprocessing, and none in a notebook, which nobody starts by its words."""
    if "ipykernel" in sys.modules:
        return []
    if is_started_by_itself() and "--multiprocessing-fork" in sys.orig_argv:
        return ["python", *sys.argv]
    return list(sys.orig_argv)


def is_started_by_itself() -> bool:
    """Whether the script has started this process, as by torch.multiprocessing.spawn, and not a launcher."""
    import multiprocessing  # here: commands that only look at runs need not import it

    return multiprocessing.parent_process() is not None


@dataclass(frozen=True)
class Target:
    """What a Python on the command line is to run."""

    kind: Literal["script", "module", "code"]
    text: str
    """A path, a dotted name, or statements."""
    index: int
    """Its place among the words; that of `-m` and `-c` is the one before."""


def is_python(program: str) -> bool:
    """Whether a program is a Python, by its name."""
    return re.fullmatch(r"python[\d.]*", Path(program).name) is not None


def target(command: Sequence[str]) -> Target | None:
    """What `[python, options ..., train.py, ...]` runs; None where it would wait for somebody to type."""
    index = 1
    while index < len(command):
        word = command[index]
        if word in ("-m", "-c"):
            kind: Literal["module", "code"] = "module" if word == "-m" else "code"
            return Target(kind, command[index + 1], index + 1) if index + 1 < len(command) else None
        if not word.startswith("-"):
            return Target("script", word, index)
        index += 2 if word in ("-W", "-X", "--check-hash-based-pycs") else 1  # those that take a value
    return None


def find_program(program: str) -> str | None:
    """The file to execute: of this virtual environment, else on PATH; a path as it is. None where there is none."""
    if program in ("python", "python3"):  # the one that jobkit runs in
        return sys.executable
    own = shutil.which(program, path=str(Path(sys.executable).parent)) if sys.prefix != sys.base_prefix else None
    return own or shutil.which(program)
