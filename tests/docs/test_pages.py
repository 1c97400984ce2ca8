"""Every command of the pages is run, page by page, in a folder of its own.

    page --blocks--> `# name.py` first in a python, yaml or csv block: a file is written
                     ```sh         the block, which must end with 0
                     ```console    each `$ ` line, with 0 or the number below `$ echo $?`
                     ```text       nothing

Words after `sh` or `console`: `slurm` runs it on the tests' Slurm, `dry-run` adds --dry-run to each submission, and any
other word names a program without which the block is left out. `^C` in the output of a command presses Ctrl-C once the
run trains. Each line that a page shows must be one of the command's: numbers with a point may differ by a twentieth, as
they depend on the processor, columns may be wider or narrower, as a long name in another line makes them so (a fast
machine ends a run before its first `perf/` curve), and lines with times, sizes and attempts are left out.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.runs import Project, wait_until

from jobkit.run.rundir import RunDir

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/README.md")])

BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w./-]+\.\w+)$")
OF_A_MACHINE = re.compile(
    r"^(sudo|git clone|pip install|python -m venv|source .*activate|eval .*slurmbox|.*slurmbox down)"
)
"""Lines that prepare a machine: the tests run on a prepared one."""


OF_A_MOMENT = re.compile(
    r"\.\.\.|\^C|\d:\d\d|[\d?] s\b(?!\))|\d [kMG]i?B\b|\battempt \d+ |\brank \d+ on |stopped at step|^step \d+/"
)
"""What is in lines whose numbers are others each time."""

NUMBER = re.compile(r"(\d+\.\d+(?:e-\d+)?)")


def is_shown(line: str, output: str) -> bool:
    """Return whether a line of a page is in a command's output, but for seconds, the last digits and the columns."""
    shown = _plain(line)
    words, numbers = NUMBER.split(shown)[::2], NUMBER.findall(shown)
    for other in output.splitlines():
        plain = _plain(other)
        if NUMBER.split(plain)[::2] == words:
            pairs = zip(numbers, NUMBER.findall(plain), strict=True)
            if all(math.isclose(float(one), float(two), rel_tol=0.05) for one, two in pairs):
                return True
    return False


def _plain(line: str) -> str:
    return re.sub(" {3,}", "  ", re.sub(r" \(\d+ s\)", "", line.strip()))


@dataclass
class Command:
    """Lines that bash runs together."""

    text: str
    words: list[str]
    """Of the block's first line."""
    code: int = 0
    ctrl_c: bool = False
    shown: Sequence[str] = ()
    """Lines of its output that the page shows."""


def commands_of(text: str) -> Iterator[Command | tuple[str, str]]:
    """Yield the commands of a page, and (name, content) of its files, in order."""
    for kind, words, body in BLOCK.findall(text):
        first = FILE.match(body.partition("\n")[0])
        if first and kind in ("python", "yaml", "csv", "json"):
            yield first[1], body
        elif kind == "sh":
            lines = [line for line in body.splitlines() if not OF_A_MACHINE.match(line)]
            yield Command("set -e\n" + "\n".join(lines), words.split())
        elif kind == "console":
            yield from _typed(body, words.split())


def _typed(body: str, words: list[str]) -> Iterator[Command]:
    """Yield the commands of a block with `$ ` lines and output."""
    pending: Command | None = None
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        while line.endswith("\\"):
            more, _, output = output.partition("\n")
            line += f"\n{more.removeprefix('> ')}"
        shown = [text for text in output.splitlines() if text.strip() and not OF_A_MOMENT.search(text)]
        if line == "echo $?" and pending is not None:
            pending.code = int(output.split()[0])
            continue
        if pending is not None:
            yield pending
        pending = None if OF_A_MACHINE.match(line) else Command(line, words, ctrl_c="^C" in output, shown=shown)
    if pending is not None:
        yield pending


class Shell:
    """Runs commands one after the other, each with the folder and the variables that the one before has left."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment, self.state = folder, environment, folder.parent / "state"

    def run(self, command: Command, extra: dict[str, str]) -> None:
        text = command.text.replace("tools/run ", "python -m jobkit.submit ")
        if "dry-run" in command.words:
            text = re.sub(r"(-m jobkit[. ]submit|jobkit submit)\b", r"\1 --dry-run", text)
        keep = f'code=$?; {{ export -p | grep -v SLURM_CONF; echo "cd \\"$PWD\\""; }} >{self.state}; exit $code'
        script = f"set -a; [ -e {self.state} ] && . {self.state}\ntrap '{keep}' EXIT\n{text}\n"
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment | extra,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if command.ctrl_c:
            wait_until(lambda: process.poll() is not None or self._trains(), f"a step of {text}")
            os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == command.code, f"{text}\nexit code {process.returncode}\n{output}"
        assert [line for line in command.shown if not is_shown(line, output)] == [], f"{text}\n{output}"

    def _trains(self) -> bool:
        runs = [RunDir(path.parent) for path in self.folder.glob("runs/*/progress.json")]
        return any(run.alive_lock().is_held() and ((run.progress() and run.progress().step) or 0) > 0 for run in runs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)).replace("/", "_"))
def test_the_commands_of_a_page_run(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest, no_process_left: None
) -> None:
    parts = list(commands_of(page.read_text(encoding="utf-8")))
    if not any(isinstance(part, Command) for part in parts):
        return
    folder, on_slurm = tmp_path / "page", {}
    if any("slurm" in part.words for part in parts if isinstance(part, Command)):
        make: Callable[..., Project] = request.getfixturevalue("on_slurm")  # it cancels what a page leaves
        on_slurm = {
            "SLURM_CONF": make(request.getfixturevalue("slurm"), folder="page", plain=False).environment["SLURM_CONF"]
        }
    for name in ("experiments", "examples", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tools").symlink_to(ROOT / "tools")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JOBKIT_", "SLURM_"))}
    environment |= {
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    shell = Shell(folder, environment)
    for part in parts:
        if isinstance(part, tuple):
            (folder / part[0]).parent.mkdir(parents=True, exist_ok=True)
            (folder / part[0]).write_text(part[1], encoding="utf-8")
        elif all(word in ("slurm", "dry-run") or shutil.which(word) for word in part.words):
            shell.run(part, on_slurm if "slurm" in part.words else {})
