"""A YAML with `pipeline:`: a run for each stage, which start one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import Project, events, status, wait_for

TASK = """
import json, pathlib

def train(ctx):
    return {"best": {"lr": ctx.params.lr}}

def sample(ctx):
    return {"got": ctx.params.lr, "init": ctx.params.init}
"""

YAML = """\
name: digits
params: {lr: 0.5}
pipeline:
  train: {task: mytask:train, resources: {cpus_per_task: 2}}
  sample:
    task: mytask:sample
    params: {lr: "${run:train.result.best.lr}", init: "${run:train}/final"}
  evaluate: {after: sample, command: [sh, -c, "exit 0"]}
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path / "project", {"JOBKIT_DEVICES_DIR": str(tmp_path / "devices")})
    (made.path / "mytask.py").write_text(TASK)
    (made.path / "digits.yaml").write_text(YAML)
    return made


def runs(project: Project) -> dict[str, Path]:
    """By their stages."""
    return {run.name.split("-")[1]: run for run in project.runs}


def test_all_stages_start_one_after_the_other(project: Project) -> None:
    printed = project.jobkit("submit", "digits.yaml", "--local", "train.params.lr=0.25", "seed=3")
    assert [line for line in printed.stderr.splitlines() if line.startswith("stage")] == [
        "stage train:",
        "stage sample:",
        "stage evaluate:",
    ]
    found = runs(project)
    for run in found.values():
        wait_for("its end", lambda run=run: status(run)["state"] == "finished", run)
    assert status(found["sample"])["result"] == {"got": 0.25, "init": f"{found['train']}/final"}
    assert status(found["sample"])["after"] == [found["train"].name]
    assert status(found["evaluate"])["after"] == [found["sample"].name]
    assert status(found["train"])["params"] == {"lr": 0.25} and status(found["evaluate"])["seed"] == 3
    started = [events(found[stage])[-1]["time"] for stage in ("train", "sample", "evaluate")]
    assert started == sorted(started)
    again = project.jobkit("submit", "digits.yaml", "--local", "train.params.lr=0.25", "seed=3").stdout
    assert again.count("already finished") == 3 and len(project.runs) == 3
    command = status(found["sample"])["command"]
    assert command.endswith("submit digits.yaml train.params.lr=0.25 seed=3 --stage sample --local")
    one = project.jobkit("submit", "digits.yaml", "train.params.lr=0.25", "seed=3", "--stage", "sample", "--local")
    assert f"already finished: {found['sample']}" in one.stdout


def test_a_dry_run_shows_all_stages_and_starts_none(project: Project) -> None:
    printed = jobkit(project, "submit", "digits.yaml", "--local", "--dry-run").stdout
    assert [line for line in printed.splitlines() if line.startswith("name:")] == [
        "name: digits-train",
        "name: digits-sample",
        "name: digits-evaluate",
    ]
    assert project.runs == []


@pytest.mark.parametrize(
    ("before", "after", "words", "said"),
    [
        ("", "", ("--stage", "tain"), "--stage tain: no such stage; did you mean 'train'? (there are: train, sample"),
        ("", "", ("--stage", "sample"), "after: found digits-train-"),
        ("task: mytask:sample", "task: mytask:nosuch", (), "nosuch"),
        ("after: sample", "after: evaluate", (), "evaluate.after: stage evaluate does not come before this one"),
        ("  evaluate: {", "  params: {", (), "pipeline.params: a stage's name has letters"),
        ("{after: sample,", "{name: x,", (), "pipeline.evaluate.name: a stage is named after the file: digits-eval"),
        ("", "", ("--sweep", "params.lr=1,2"), "--sweep is for a sweep, and this is a pipeline"),
        ("", "", ("--from", "x"), "--from is for one run, not for a pipeline"),
        ("", "", ("sample.params.lrr=1",), "params.lrr: there is no such key; did you mean 'params.lr'?"),
    ],
)
def test_what_is_wrong_with_a_stage_starts_none(
    project: Project, before: str, after: str, words: tuple[str, ...], said: str
) -> None:
    (project.path / "digits.yaml").write_text(YAML.replace(before, after) if before else YAML)
    done = jobkit(project, "submit", "digits.yaml", "--local", *words, expect=2)
    assert said in done.stderr and 1 <= len(done.stderr.splitlines()) <= 2, done.stderr
    assert project.runs == []


def test_a_stage_of_a_file_without_stages_is_refused(project: Project) -> None:
    done = jobkit(project, "submit", "toy.yaml", "--local", "--stage", "x", expect=2)
    assert "--stage x: toy.yaml has no `pipeline:`" in done.stderr
    done = jobkit(project, "submit", "toy.yaml", "--local", "pipeline.x.seed=3", expect=2)
    assert "pipeline.x.seed: unknown key" in done.stderr
    assert json.loads(jobkit(project, "list", "--json").stdout) == []
