"""`submit --from RUN@STEP`: a run begins with another's checkpoint, and depends on nothing that becomes of that one."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import Project, events, status

from jobkit.checkpoint.store import Manifest
from jobkit.run.config import Config, read_resolved

TASK = """
import json

import torch
from torch import nn


def train(ctx):
    p = ctx.params
    if not p.samples:
        return sum(1 for _ in ctx.steps(1))
    model = ctx.parallelize(nn.Sequential(nn.Linear(4, n := p.get("width", 8)), nn.Dropout(0.1), nn.Linear(n, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=p.lr)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.randn(p.samples, 4)), global_batch_size=8)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    begin, first = ctx.step, None
    for step in ctx.steps(p.steps):
        (x,) = next(loader)
        loss = ctx.backward(model, x, lambda output, x: (output - x).square().mean(), x)
        ctx.update(optimizer)
        ctx.log({"train/loss": loss})
    net = getattr(model, "module", model)
    found = {name: one.double().sum().item() for name, one in net.state_dict().items()}
    counted = int(next(iter(optimizer.state.values()), {"step": 0})["step"])
    return {"begin": begin, "weights": found, "counted": counted, "lr": optimizer.param_groups[0]["lr"]}
"""

YAML = "name: d\ntask: mytask:train\nparams: {steps: 6, lr: 0.01, samples: 40}\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One with a finished run of six steps."""
    made = Project(tmp_path_factory.mktemp("project"))
    (made.path / "mytask.py").write_text(TASK)
    (made.path / "toy.yaml").write_text(YAML)
    made.submit("--local")
    return made


def run_named(project: Project, said: str) -> Path:
    """The run of the line that says what it starts from."""
    name = next(line.split(":")[0] for line in said.splitlines() if ": starts from " in line)
    return project.path / "runs" / name


def test_a_finished_run_is_extended_bit_for_bit_and_needs_the_first_no_more(project: Project) -> None:
    parent = project.run_of()
    project.submit("--local", "params.steps=10")
    whole = status(project.run_of("params.steps=10"))["result"]
    said = project.submit("--local", "--from", parent.name[:6], "params.steps=10").stderr
    run = run_named(project, said)
    assert f"{run.name}: starts from step 6 of {parent.name} (model, optimizer, loader); params.steps 6 -> 10" in said
    assert status(run)["result"] == {**whole, "begin": 6}
    assert status(run)["start_from"] == {"run": parent.name, "step": 6, "weights_only": False}
    assert f"  started from step 6 of {parent.name}\n" in jobkit(project, "status", run.name).stdout
    assert [e["step"] for e in events(run) if e["event"] == "resumed"] == [6]
    weights = run / "start_from" / "step_00000006"
    assert all(file.stat().st_nlink == 2 for file in weights.iterdir() if file.name != "manifest.json"), "linked"
    assert _first_step_on_tensorboard(run) == 6

    # The same command, its recorded form and `resume` mean this run, also when the first is gone.
    aside = parent.rename(project.path / "aside")
    again = jobkit(project, "submit", "toy.yaml", "--local", "--from", f"{parent.name}@6", "params.steps=10")
    assert again.stdout.startswith(f"already finished at step 10/10: {run}")
    shutil.rmtree(run / "checkpoints")
    (run / "events.jsonl").unlink()
    config = read_resolved(run / "config.yaml")
    assert str(config.start_from) == f"step 6 of {parent.name}"
    project.jobkit("submit", "toy.yaml", "--local", "--from", f"{parent.name}@6", "params.steps=10")
    assert status(run)["result"] == {**whole, "begin": 6}
    aside.rename(parent)
    same = jobkit(project, "submit", "toy.yaml", "--local", "--from", parent.name, "params.steps=10")
    assert same.stdout.startswith(f"already finished at step 10/10: {run}")


def _first_step_on_tensorboard(run: Path) -> int:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = EventAccumulator(str(run / "tensorboard")).Reload()
    return int(points.Scalars("train/loss")[0].step)


def test_on_two_ranks_with_another_rate_the_optimizer_takes_it(project: Project) -> None:
    two = ("resources.tasks_per_node=2", "params.steps=9", "params.lr=0.002")
    run = run_named(project, project.submit("--local", "--from", f"{project.run_of().name}@6", *two).stderr)
    result = status(run)["result"]
    assert (result["begin"], result["counted"], result["lr"]) == (6, 9, 0.002)


def test_the_weights_alone_begin_at_step_0(project: Project) -> None:
    own = ("params.steps=0", "params.samples=48")
    refused = project.submit(
        "--local", "--from", f"{project.run_of().name}@6", "params.steps=7", "params.samples=48", expect=1
    )
    assert "the checkpoint's loader has length 40, this one 48" in refused.stderr + refused.stdout
    assert "take its weights alone, with --weights-only" in refused.stderr + refused.stdout
    said = project.submit("--local", "--from", f"{project.run_of().name}@6", "--weights-only", *own).stderr
    assert ": starts from the weights of step 6 of d-" in said and " (model); " in said
    found = status(run_named(project, said))
    assert found["result"]["begin"] == 0
    name = project.run_of().name
    refused = project.submit("--local", "--from", f"{name}@6", "--weights-only", "+params.width=9", expect=1)
    assert "undo that, or begin without them: leave --from out" in refused.stderr
    refused = project.submit("--local", "--from", f"{name}@6", "--weights-only", "params.samples=0", expect=1)
    assert "--weights-only: no module is tracked, so none has taken the weights" in refused.stderr
    parent = status(project.run_of())["result"]["weights"]
    assert found["result"]["weights"] == parent


def test_a_run_that_has_no_more_steps_than_the_other_is_refused_at_once(project: Project) -> None:
    parent, runs = project.run_of(), project.runs
    words = ("--from", f"{parent.name}@6")
    done = jobkit(project, "submit", "toy.yaml", "--local", *words, expect=2)
    assert f"error: {parent.name} has trained to its end at step 6, and d-" in done.stderr
    assert "--weights-only" in done.stderr and project.runs == runs
    (project.path / "mytask.py").write_text(TASK + "\n")  # which may have more
    done = project.submit("--local", *words, expect=1)
    (project.path / "mytask.py").write_text(TASK)
    said = f"UsageError: the run starts from step 6 of {parent.name}, and ctx.steps(6) has nothing left: let it have"
    assert said in done.stderr and len(status(run_named(project, done.stderr))["attempts"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "{parent}@4"), "has no checkpoint of step 4 (it has: 5, 6)"),
        (("--from", "d@x"), "--from d@x: expected RUN or RUN@STEP"),
        (("--from", "nobody"), "no run 'nobody' in"),
        (("--weights-only",), "give --from RUN[@STEP] too"),
        (("start_from.run=gone", "start_from.step=1"), "start_from.run: no run 'gone' in"),
    ],
)
def test_what_cannot_be_started_from_is_told_in_a_line(project: Project, words: tuple[str, ...], said: str) -> None:
    runs = project.runs
    words = tuple(word.replace("{parent}", project.run_of().name) for word in words)
    done = jobkit(project, "submit", "toy.yaml", "--local", "params.steps=99", *words, expect=2)
    assert said in done.stderr and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert project.runs == runs


def test_another_checkpoint_of_the_same_name_is_told(project: Project) -> None:
    parent = project.run_of()
    words = ("submit", "toy.yaml", "--local", "--from", f"{parent.name}@6", "params.steps=8", "--weights-only")
    assert "has begun with another" not in project.jobkit(*words).stderr
    assert "has begun with another" not in jobkit(project, *words).stderr
    file = parent / "checkpoints" / "step_00000006" / "manifest.json"
    before = file.read_text()
    manifest = Manifest.from_json(json.loads(before))
    name, digest = next(iter(manifest.files.items()))
    changed = replace(manifest, files={**manifest.files, name: replace(digest, crc32=digest.crc32 ^ 1)})
    file.write_text(json.dumps(changed.to_json()))  # as of a run that was removed, and trained anew with other code
    said = jobkit(project, *words).stderr
    file.write_text(before)
    assert f"has begun with another checkpoint of step 6 than {parent} has now: --fresh begins with that one" in said


def test_a_damaged_checkpoint_is_not_started_from(project: Project) -> None:
    parent = project.run_of()
    copy = shutil.copytree(parent, project.path / "elsewhere" / parent.name, symlinks=True)
    (damaged,) = (copy / "checkpoints" / "step_00000006").glob("rank_*.bin")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    done = jobkit(project, "submit", "toy.yaml", "--local", "--from", f"{copy}@6", "params.steps=98", expect=2)
    assert "step 6 of" in done.stderr and "has checksum" in done.stderr
    printed = jobkit(project, "submit", "toy.yaml", "--local", "--dry-run", "--from", str(copy), "params.steps=98")
    assert "step: 5" in printed.stdout, "the newest that verifies"


def test_a_command_without_checkpoints_cannot_be_started_from(project: Project) -> None:
    (project.path / "plain.yaml").write_text("name: plain\ncommand: [python, -c, pass]\n")
    project.jobkit("submit", "plain.yaml", "--local")
    done = jobkit(project, "submit", "toy.yaml", "--local", "--from", "plain", "params.steps=97", expect=2)
    assert "its command calls no jobkit.init, so jobkit keeps none" in done.stderr


def test_manifests_say_what_is_tracked(project: Project) -> None:
    manifest = json.loads((project.run_of() / "checkpoints" / "step_00000006" / "manifest.json").read_text())
    assert manifest["extra"]["tracked"] == ["model", "optimizer", "loader"] and manifest["extra"]["modules"] == [
        "model"
    ]


def config_of(project: Project, *words: str) -> tuple[str, Config, str]:
    """Which run a command means, with which config, and what is said of its start."""
    done = jobkit(project, "submit", "toy.yaml", "--local", "--dry-run", *words)
    text, plan = done.stdout.split("---\n")
    file = project.path / "printed.yaml"
    file.write_text(text)
    return plan.split()[2].rpartition("/")[2], read_resolved(file), done.stderr


def test_what_the_other_run_was_given_holds_for_its_forks_too(project: Project) -> None:
    plain = project.run_of()
    project.submit("--local", "params.lr=0.3", "seed=2", "+params.opt={token: abc}")
    parent = next(run for run in project.runs if status(run)["seed"] == 2)
    given = {"params.lr": 0.3, "seed": 2, "params.opt.token": "***"}
    assert status(parent)["given"] == {"values": given, "inherited": []}

    words = ("--from", f"{parent.name}@5", "params.steps=8")
    (project.path / "toy.yaml").write_text(YAML.replace("samples: 40", "samples: 40, wd: 1"))  # holds, as it says
    said = project.submit("--local", *words).stderr
    fork = run_named(project, said)
    there = "as there: params.lr=0.3 seed=2 'params.opt.token=***'"
    assert f"{there}; params.steps 6 -> 8, params.wd - -> 1" in said
    assert f"{parent.name} was given 'params.opt.token=***', which the YAML does not have: added; " in said
    config = read_resolved(fork / "config.yaml")
    assert (config.seed, config.params) == (2, {"steps": 8, "lr": 0.3, "samples": 40, "wd": 1, "opt": {"token": "abc"}})
    assert status(fork)["given"]["inherited"] == list(given)
    name, config, said = config_of(project, "--from", fork.name, "params.steps=9", "params.lr=0.2")
    assert (name, config.seed, config.params["lr"]) != (fork.name, 2, 0.3) and config.params["opt"] == {"token": "***"}
    assert f"{name}: starts from step 8 of {fork.name} (model, optimizer, loader); as there: seed=2 " in said
    assert "; params.steps 8 -> 9, params.lr 0.3 -> 0.2" in said

    done = jobkit(
        project, "submit", "toy.yaml", "--local", "--dry-run", *words, "--sweep", "params.lr=0.1,0.3", "seed=5"
    )
    assert f"\neach starts from step 5 of {parent.name} (model, optimizer, loader); as there: " in done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("token=***" in line and "seed=2" not in line for line in lines[:2])

    sweep = ("params.steps=9", "start_from.step=6", "--sweep", f"start_from.run={plain.name},{parent.name}")
    lines = jobkit(project, "submit", "toy.yaml", "--local", "--dry-run", *sweep).stdout.splitlines()
    assert ["params.lr=0.3 seed=2" in line for line in lines] == [False, True, False]

    # A table may leave out what another line of it says: there each run has what the first one was given.
    (project.path / "points.csv").write_text("params.lr,seed,params.steps\n0.1,,9\n,5,9\n")
    table = ("--from", f"{parent.name}@5", "--sweep-file", "points.csv")
    done = jobkit(project, "submit", "toy.yaml", "--local", "--dry-run", *table)
    found = [("params.lr=0.3" in line, "seed=2" in line) for line in done.stdout.splitlines()[:2]]
    assert found == [(False, True), (True, False)]

    # A run that was given a value of its own is none that this command means, though the YAML has that value.
    said = project.submit("--local", *words, "seed=1").stderr
    text = (project.path / "toy.yaml").read_text()
    (project.path / "toy.yaml").write_text(f"{text}seed: 1\n")
    assert config_of(project, *words)[0] == fork.name != run_named(project, said).name
    assert config_of(project, *words, "seed=1")[0] == run_named(project, said).name
    (project.path / "toy.yaml").write_text(text)

    # What was typed, what was recorded and the YAML's way mean this run, whatever has become of the first one.
    typed = shlex.split(status(fork)["command"])[4:]
    assert "params.lr=0.3" in typed and "seed=2" in typed
    by_yaml = (f"start_from.run={parent.name}", "start_from.step=5", "params.steps=8")
    aside = parent.rename(project.path / "aside")
    assert config_of(project, *words)[0] == config_of(project, *by_yaml)[0] == fork.name
    aside.rename(parent)
    assert config_of(project, *words)[0] == config_of(project, *by_yaml)[0] == fork.name
    journal = (parent / "events.jsonl").read_text()
    (parent / "events.jsonl").write_text(journal.replace('"seed": 2', '"seed": 2, "x": 0').replace('"given"', '"x"'))
    assert config_of(project, *words)[0] == fork.name
    _, config, said = config_of(project, *words, "--fresh")  # of an older jobkit: it says what to type
    assert config.params["lr"] == 0.01 and "; params.steps 6 -> 8, params.lr 0.3 -> 0.01, " in said
    assert "; to have it as there, type params.lr=0.3 " in said and "seed=2" in said.partition("type")[2]
