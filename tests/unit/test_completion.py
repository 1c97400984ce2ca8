"""Words of jobkit's commands are completed by real shells: verbs, options, config keys, files and names of runs."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.project import Project

from jobkit.run.config import Config
from jobkit.run.rundir import RunDir

LINES = {
    "jobkit sta": ["status"],
    "jobkit submit toy.yaml --local params.": ["params.lr=", "params.net.depth="],
    "jobkit submit toy.yaml +params.l": ["+params.lr="],
    "jobkit submit toy.yaml resources.n": ["resources.nodes="],
    "jobkit submit toy.yaml --sweep params.l": ["params.lr="],
    "jobkit submit pipe.yaml train.params.l": ["train.params.lr="],
    "jobkit submit pipe.yaml --stage tr": ["train"],
    "jobkit cancel --state queued,ru": ["queued,running"],
    "jobkit diff toy-1": ["toy-11111111"],
    "jobkit submit toy.yaml --det": ["--detach"],
    "jobkit submit to": ["toy.yaml"],
    "jobkit cancel toy-1 toy": ["toy-11111111", "toy-22222222"],
    "jobkit logs --runs-dir elsewhere other": ["other-33333333"],
    "jobkit nosuch x": [],
    "jobkit submit missing.yaml params.": [],
}

BASH = """
eval "$(jobkit completion bash)"
COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9; COMPREPLY=()
_python_argcomplete jobkit
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """With a YAML, two runs and one in another folder; the shells find `jobkit` on PATH."""
    project = Project(tmp_path)
    (tmp_path / "toy.yaml").write_text("name: toy\ntask: mytask:train\nparams: {lr: 1, net: {depth: 2}}\n")
    (tmp_path / "pipe.yaml").write_text("name: p\nparams: {lr: 1}\npipeline: {train: {}, test: {}}\n")
    for path in ("runs/toy-11111111", "runs/toy-22222222", "elsewhere/other-33333333"):
        run = RunDir(tmp_path / path)
        run.path.mkdir(parents=True)
        run.write_config(Config(name="toy", task="mytask:train"))
    project.env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{project.env['PATH']}"
    return project


def asked(project: Project, *command: str) -> list[str]:
    done = subprocess.run(command, cwd=project.path, env=project.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return sorted(line.split("\t")[0].strip() for line in done.stdout.splitlines() if line.strip())


@pytest.mark.parametrize(("line", "words"), LINES.items(), ids=list(LINES))
def test_bash_completes_a_word(project: Project, line: str, words: list[str]) -> None:
    assert asked(project, "bash", "-c", BASH, "bash", line) == words


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_words(project: Project) -> None:
    for line in ("jobkit sta", "jobkit submit toy.yaml --local params.", "jobkit cancel toy-1 toy"):
        assert asked(project, "fish", "-c", f"jobkit completion fish | source; complete -C '{line}'") == LINES[line]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_words_as_they_are_typed(project: Project) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(project.path)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**project.env, "TERM": "dumb", "PS1": "> "})
    try:
        os.write(terminal, b'autoload -U compinit; compinit -u -D; eval "$(jobkit completion zsh)"; print re""ady\n')
        assert "ready" in shown(terminal, "ready")
        os.write(terminal, b"jobkit sta\t")
        assert "jobkit status" in shown(terminal, "status")
        os.write(terminal, b"toy-2\t")
        assert "toy-22222222" in shown(terminal, "toy-22222222")
    finally:
        os.write(terminal, b"\x03\x04")
        os.close(terminal)
        os.waitpid(pid, 0)


def shown(terminal: int, until: str) -> str:
    """What the terminal prints until a text is there."""
    text = ""
    while until not in text:
        readable, _, _ = select.select([terminal], [], [], 60)
        assert readable, f"no {until!r} in {text!r}"
        text += os.read(terminal, 4096).decode(errors="replace")
    return text
