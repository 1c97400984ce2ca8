"""`${run_dir}` in a YAML: one identity wherever runs live, and the path in the job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobkit.errors import InputError
from jobkit.run import snapshot
from jobkit.run.config import Config, read_resolved, write_resolved
from jobkit.run.experiment import load
from jobkit.run.identity import run_name
from jobkit.run.own_outputs import check_outputs, place_outputs, refuse_misspelt
from jobkit.run.rundir import RunDir

YAML = """\
name: toy
command: [python, train.py, "--out=${run_dir}/outputs", "--log=${params.log}", "-n", "${params.n}"]
params: {log: "${run_dir}/outputs/log.txt", n: 3, nested: {files: ["${run_dir}/a", "b"]}}
"""


def loaded(tmp_path: Path, *overrides: str, text: str = YAML) -> Config:
    (tmp_path / "toy.yaml").write_text(text)
    return load(tmp_path / "toy.yaml", overrides).config


def test_the_config_and_the_identity_have_it_as_it_is_written(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    assert config.command[2:] == ["--out=${run_dir}/outputs", "--log=${run_dir}/outputs/log.txt", "-n", "3"]
    assert config.params["nested"] == {"files": ["${run_dir}/a", "b"]}
    write_resolved(tmp_path / "config.yaml", config)
    assert read_resolved(tmp_path / "config.yaml") == config
    assert load(tmp_path / "config.yaml").config == config
    placed = [place_outputs(config, RunDir(tmp_path / where / run_name(config))) for where in ("a", "b")]
    assert run_name(placed[0]) != run_name(placed[1])  # why it is not put there before the job


def test_in_the_job_it_is_the_run_directory_which_has_a_folder_for_outputs(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "toy-1")
    placed = place_outputs(loaded(tmp_path, "+params.more=${run_dir}/more"), run)
    assert placed.command[2:4] == [f"--out={run.path}/outputs", f"--log={run.path}/outputs/log.txt"]
    assert placed.params["nested"]["files"] == [f"{run.path}/a", "b"]
    assert placed.params["more"] == f"{run.path}/more"
    assert run.outputs.is_dir()
    plain = loaded(tmp_path, text="name: toy\ntask: mytask:train\n")
    other = RunDir(tmp_path / "runs" / "toy-2")
    assert place_outputs(plain, other) is plain and not other.path.exists()


WRONG = {
    "misspelt": (
        "+params.out=${run_dirs}/x",
        "command line: params.out: ${run_dirs}: there is no such key; did you mean 'run_dir'?",
    ),
    "of params": ("+params.out=${params.lgo}", "${params.lgo}: there is no such key; did you mean 'params.log'?"),
    "elsewhere": (
        "inputs=['${run_dir}/data']",
        "inputs: found ${run_dir}, which is known in `command` and `params` only",
    ),
    "by another": (
        "inputs=['${params.log}']",
        "inputs: found ${run_dir}, which is known in `command` and `params` only",
    ),
    "a key of its own": ("run_dir=x", "run_dir: unknown key"),
}


@pytest.mark.parametrize(("override", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        loaded(tmp_path, override)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("folder", ["checkpoints", "code/x", "logs", "cache"])
def test_outputs_in_a_folder_of_jobkits_own_are_refused(tmp_path: Path, folder: str) -> None:
    config = loaded(tmp_path, f"+params.out=${{run_dir}}/{folder}")
    with pytest.raises(InputError, match=rf"params.out: found .*, which is jobkit's own; .*/outputs/{folder[:4]}"):
        check_outputs(config)


def test_names_that_only_begin_as_jobkits_are_a_scripts(tmp_path: Path) -> None:
    check_outputs(loaded(tmp_path, "+params.out=${run_dir}/checkpoints-of-mine", "+params.final=${run_dir}/final"))


def test_params_of_a_script_are_looked_at_too() -> None:
    refuse_misspelt({"text": "${name} and ${HOME}", "out": "${run_dir}"})
    with pytest.raises(InputError, match=r"params.a.out: found \$\{run_dirs\}: there is no such key; did you mean"):
        refuse_misspelt({"a": {"out": "${run_dirs}/x"}})


def test_files_that_a_run_has_probably_written_are_told_from_code(tmp_path: Path) -> None:
    for name, at in {"out.json": 150, "old.txt": 50, "new.py": 150, "late.txt": 250}.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    lines = ["+ out.json", "~ old.txt", "+ new.py", "+ late.txt", "- gone.json"]
    assert snapshot.written_by_run(tmp_path, lines, [(100.0, 200.0)]) == ["+ out.json"]
