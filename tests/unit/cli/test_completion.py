"""`jobkit completion`: what a word may become, and a real bash that asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.journals import make_run, submitted

from jobkit.cli.completion import SCRIPTS, candidates, parser_of
from jobkit.cli.main import VERBS

RUNS = ["digits-aaaaaaaa", "digits-bbbbbbbb", "toy-11f5f19c"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", list(VERBS)),
        ("lo", ["logs"]),
        ("nonsense ", []),
        ("status d", RUNS[:2]),
        ("status toy-11f5f19c ", RUNS),
        ("diff toy-11f5f19c d", RUNS[:2]),
        ("diff toy-11f5f19c digits-aaaaaaaa ", []),
        ("logs --rank 3 t", RUNS[2:]),
        ("logs --rank ", []),
        ("logs toy-11f5f19c --f", ["--follow"]),
        ("wait --runs-dir elsewhere t", RUNS[2:]),
        ("wait --runs-dir ", []),
        ("submit ", []),  # names of files
        ("submit toy.yaml --after d", RUNS[:2]),
        ("submit toy.yaml params.lr=1 --fo", ["--follow"]),
        ("verify t", RUNS[2:]),
        ("verify toy.yaml t", []),
        ("board digits-aaaaaaaa t", RUNS[2:]),
        ("completion ", list(SCRIPTS)),
        ("completion bash --w", []),  # for the scripts alone
    ],
)
def test_what_the_last_word_may_become(line: str, expected: list[str]) -> None:
    assert candidates(line.split(" "), parser_of, lambda words: RUNS) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sta"], ["status"]),
        (["status", "d"], RUNS[:2]),
        (["status", "--runs-dir", "empty", ""], []),
        (["cancel", "sweep"], ["sweep-0a0b0c0d.sweep"]),
        (["wait", "toy", "--"], ["--help", "--runs-dir", "--timeout"]),
        (["submit", ""], []),
    ],
)
def test_bash_completes(tmp_path: Path, words: list[str], expected: list[str]) -> None:
    """The completion function of a real bash, with the variables that bash sets at a Tab."""
    for name in RUNS:
        make_run(tmp_path / "runs", name, submitted())
    (tmp_path / "runs" / "sweep-0a0b0c0d.sweep").write_text(f"{RUNS[0]}\n")
    command = tmp_path / "bin" / "jobkit"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m jobkit "$@"\n')
    command.chmod(0o755)
    script = """
        eval "$(jobkit completion bash)" && complete -p jobkit >&2
        COMP_WORDS=(jobkit "$@") COMP_CWORD=$#
        _jobkit jobkit
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    environment.pop("JOBKIT_RUNS", None)
    command_line = ["bash", "--norc", "-euc", script, "bash", *words]
    done = subprocess.run(command_line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stderr == "complete -o default -F _jobkit jobkit\n"
    assert sorted(done.stdout.split()) == expected
