"""jobkit verify: exact programs are proven, each forgotten state is named, and nobody is accused wrongly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness.runs import Project, wait_until
from harness.training import training_project

from jobkit.run.journal import read_status
from jobkit.run.rundir import RunDir
from jobkit.verify.compare import course_of, read_trace

HARNESS = Path(__file__).parents[1] / "harness"
YAML = "name: forgetful\ntask: forgetful_task:{task}\nparams: {{steps: 100, forgets: nothing}}\n"


def verify(
    folder: Path, *words: str, task: str = "train", ranks: int = 1, environment: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    yaml = YAML.format(task=task) + f"resources: {{tasks_per_node: {ranks}}}\n"
    made = Project(folder, environment, yaml, plain=False)
    for name in ("training_task.py", "forgetful_task.py"):
        shutil.copy(HARNESS / name, folder)
    done = made.jobkit("verify", str(made.yaml), *words, "--local", "--steps", "15", "--json", check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_program_with_batch_norm_in_ddp_is_exact(tmp_path: Path) -> None:
    """Its words are compared with the journal of the run that it interrupted."""
    code, report = verify(tmp_path, ranks=2)
    assert (code, report["equal"], report["missing"]) == (0, True, ["evaluation", "epoch end"]), report
    assert "over 15 steps: 3 interruptions, steps repeated: 2;" in report["lines"][0]
    (path,) = tmp_path.glob("runs/.verify/*/interrupted-*")
    ends = [attempt.ended for attempt in read_status(RunDir(path)).attempts if attempt.ended is not None]
    assert [ended.cause for ended in ends] == ["killed", "killed", "unknown", "finished"]
    saved = [(ended.durable_step or 0, following.first_step) for ended, following in pairwise(ends)]
    assert [first > durable for durable, first in saved if first is not None].count(True) == 1, "one from memory"
    assert sum((ended.last_step or 0) - (following.first_step or 0) for ended, following in pairwise(ends)) == 2


SPREAD = {
    "shards": ["precision=bf16", "parallel=zero3"],
    "stages": ["parallel={pipeline: all, microbatches: 2}"],
    "compression": ["comm.hook=powersgd"],
}


@pytest.mark.parametrize("way", SPREAD)
def test_a_program_that_is_spread_is_exact(tmp_path: Path, way: str) -> None:
    code, report = verify(tmp_path, *SPREAD[way], ranks=2)
    assert (code, report["equal"]) == (0, True), report


def test_ddp_of_the_program_itself_is_exact_on_three_ranks(tmp_path: Path) -> None:
    code, report = verify(tmp_path, task="train_own_ddp", ranks=3)
    assert (code, report["equal"], report["missing"]) == (0, True, ["evaluation"]), report


def test_objects_may_be_tracked_in_turn(tmp_path: Path) -> None:
    code, report = verify(tmp_path, "params.steps=12", task="track_in_turn")
    assert (code, report["equal"]) == (0, True), report
    assert "over 12 steps" in report["lines"][0] and "the 15 " in report["lines"][0]


def test_what_training_makes_comes_back(tmp_path: Path) -> None:
    code, report = verify(tmp_path, "checkpoint.weights=trainable", task="train_parts", ranks=2)
    assert (code, report["equal"]) == (0, True), report


def test_averaged_weights_are_state_although_they_require_no_gradient(tmp_path: Path) -> None:
    code, report = verify(tmp_path, "checkpoint.weights=trainable", task="train_teacher")
    assert (code, report["equal"]) == (0, True), report
    code, report = verify(tmp_path, "checkpoint.weights=trainable", "params.forgets=teacher", task="train_teacher")
    assert (code, report["difference"]) == (1, {"kind": "restored state", "name": "model.teacher.weight"}), report


def test_streams_of_a_loader_are_exact(tmp_path: Path) -> None:
    code, report = verify(tmp_path, task="train_stream", ranks=2)
    assert (code, report["missing"]) == (0, ["epoch end"]), report
    assert "samples" in report["lines"][0], "a stream has no ids: its batches are compared"
    (straight,) = tmp_path.glob("runs/.verify/*/straight-*")
    evaluations = course_of(read_trace(RunDir(straight))).evaluations
    assert set(evaluations) - {0} == {5, 10, 15}, "each third of the steps, and not each 20"


def test_epochs_over_foreign_loaders_are_exact(tmp_path: Path) -> None:
    code, report = verify(tmp_path, task="train_epochs", ranks=2)
    assert (code, report["missing"]) == (0, ["evaluation"]), report


FORGOTTEN = {
    "moving average": ("values", "train/loss", "average", "average, worst = "),
    "scheduler": ("state", "optimizer.groups.0.lr", "scheduler", "scheduler = "),
    "result": ("result", "worst", "worst", "average, worst = "),
    "patience": ("end", "", "patience", "for patience, _ in"),
}
"""The first difference, the name of what was forgotten, and the line that makes it."""


@pytest.mark.parametrize("forgets", FORGOTTEN)
def test_a_forgotten_state_is_named(tmp_path: Path, forgets: str) -> None:
    code, report = verify(tmp_path, f"params.forgets={forgets}")
    assert code == 1
    assert not report["is_nondeterministic"]
    kind, name, expression, code = FORGOTTEN[forgets]
    assert report["difference"] == {"kind": kind, "name": name}, report
    first = report["found"][0]
    lines = (HARNESS / "forgetful_task.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if code in text)
    assert (first["expression"], first["place"]) == (expression, f"forgetful_task.py:{line}"), report
    assert f"{expression}={expression}" in first["to_type"]
    assert f"{expression}={expression}" in "\n".join(report["lines"])


def test_an_average_that_nothing_reads_is_found(tmp_path: Path) -> None:
    code, report = verify(tmp_path, "params.forgets=ema", task="train_average", ranks=3)
    assert (code, report["equal"], report["difference"]) == (1, False, None), report
    (found,) = [item for item in report["found"] if item["is_finding"]]
    assert (found["expression"], found["to_type"]) == ("ema", "ctx.track(ema=ema) before the loop, in train_average()")
    code, report = verify(tmp_path, task="train_average", ranks=3)
    assert (code, [item for item in report["found"] if item["is_finding"]]) == (0, []), report


SCRIPT = """
import random, torch, jobkit
torch.seed()
ctx = jobkit.init(seed=None)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ctx.track(model=model, optimizer=optimizer)
random.random()
for _ in ctx.steps(20):
    loss = model(torch.rand(2, 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ctx.log({"loss": loss})
ctx.finish({"loss": loss.item()})
"""


def test_a_script_without_a_seed_is_verified_with_one(tmp_path: Path) -> None:
    made = Project(tmp_path, yaml="name: script\ncommand: [python, script.py]\nseed: null\n", plain=False)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = made.jobkit("verify", str(made.yaml), "--local", "--json", check=False)
    assert json.loads(done.stdout)["equal"], done.stdout


def test_two_verifications_of_an_experiment_do_not_disturb_each_other(tmp_path: Path) -> None:
    project = training_project(tmp_path)
    words = ("verify", str(project.yaml), "--local", "--steps", "6", "--json")
    both = [project.start(*words, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [json.loads(process.communicate()[0])["equal"] for process in both] == [True, True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_verification_that_is_stopped_leaves_no_run_behind(
    tmp_path: Path, no_process_left: None, number: int
) -> None:
    project = training_project(tmp_path)
    words = ("--local", "--steps", "90", "params.steps=100", "+params.step_seconds=10")
    process = project.start("verify", str(project.yaml), *words)
    begun = "runs/.verify/*/straight-*/logs/1/rank_0.out"
    (log,) = wait_until(lambda: list(tmp_path.glob(begun)), "a rank")
    process.send_signal(number)
    assert process.wait() == 130
    launch = project.launch(log.parents[2]).wait_until_over()
    assert launch.causes == ["stopped"]


def test_files_outside_the_run_directory_are_named(tmp_path: Path) -> None:
    file = tmp_path / "losses.csv"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    _, report = verify(tmp_path, f"+params.file={file}", environment={**os.environ, "TMPDIR": str(temporary)})
    assert report["equal"]
    assert report["lines"][-1].endswith(f": {file}")


def test_the_programs_own_nondeterminism_is_blamed_on_no_state(tmp_path: Path) -> None:
    code, report = verify(tmp_path, "params.forgets=random at import")
    assert code == 1
    assert report["is_nondeterministic"], report


def test_a_run_is_verified_from_its_checkpoint_with_its_own_code(tmp_path: Path) -> None:
    made = Project(tmp_path, yaml=YAML.format(task="train") + "checkpoint: {every: 40}\n", plain=False)
    for name in ("training_task.py", "forgetful_task.py"):
        shutil.copy(HARNESS / name, tmp_path)
    made.jobkit("submit", str(made.yaml), "--local")
    (tmp_path / "forgetful_task.py").write_text("raise SystemExit('another version')")
    run = next(iter((tmp_path / "runs").glob("forgetful-*")))
    refused = made.jobkit("verify", f"{run.name}@100", "--json", check=False)
    assert (refused.returncode, "80" in refused.stderr) == (2, True)  # no step is left after the last checkpoint
    done = made.jobkit("verify", run.name, "--steps", "12", "--json")
    report = json.loads(done.stdout)
    assert report["equal"], report
    status = json.loads(made.jobkit("status", run.name, "--json").stdout)
    assert status["verified"]["equal"] is True
    (noted,) = (tmp_path / "runs" / ".verified").iterdir()
    assert noted.stem.endswith(run.name[-8:])  # a run with other values has not been verified
