"""`python -m jobkit.worker EXP.yaml` under a launcher: the run of a submission, begun and continued by either."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.project import (
    Project,
    assert_each_step_once,
    causes,
    describe,
    logged_steps,
    status,
    step,
    wait_for,
    weights,
)

from jobkit.addresses import free_port

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
TWO = (*TORCHRUN, "--nproc-per-node=2", "-m")
ALONE = (sys.executable, "-m")
HOLDS = """
import os, time

from jobkit.worker.stop import STOP_SIGNALS

first = []


def at_step(ctx, step):
    first.append(step)
    while os.environ.get("HOLD") and step >= first[0] + 6 and not STOP_SIGNALS.pending:
        time.sleep(0.02)
    if os.environ.get("HOLD"):
        time.sleep(0.1)  # ranks agree a few times a second: not after all the steps that are left
    time.sleep(float(os.environ.get("SLEEP", "0")))
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        (ctx.run_dir / f"devices_{ctx.rank}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path / "project")
    (made.path / "orders.py").write_text(HOLDS)
    return made


def start(
    project: Project, launcher: tuple[str, ...], *words: str, **environment: str
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """`LAUNCHER jobkit.worker WORDS` in the project, ended at the latest with the test."""
    return ended(
        subprocess.Popen(
            [*launcher, "jobkit.worker", *words],
            cwd=project.path,
            env=project.env | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    )


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=120)


def launch(
    project: Project, launcher: tuple[str, ...], *words: str, expect: int | None = 0, **environment: str
) -> tuple[str, str]:
    """What it printed, to standard output and error, when it has ended with `expect`; None for any code but 0."""
    with start(project, launcher, *words, **environment) as process:
        printed, errors = process.communicate(timeout=600)
    right = process.returncode != 0 if expect is None else process.returncode == expect
    assert right, f"{process.returncode}\n{printed}\n{errors}"
    return printed, errors


def interrupt(project: Project, launcher: tuple[str, ...], *words: str) -> Path:
    """Let it train some steps more and stop it; returns the run directory."""
    before = status(project.runs[-1])["step"] if project.runs else 0
    with start(project, launcher, *words, HOLD="1") as process:
        wait_for("a run", lambda: process.poll() is not None or project.runs)
        run = project.runs[-1]
        wait_for("some steps", lambda: process.poll() is not None or step(run) >= before + 5, run)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=600)
    assert process.returncode != 0, f"{printed}\n{errors}\n{describe(run)}"
    return run


# Input

BAD = {
    "an unknown key": ("toy.yaml", "parms.steps=3"),
    "no such function": ("toy.yaml", "task=mytask:trian"),
    "no such file": ("toys.yaml",),
}


@pytest.mark.parametrize("words", BAD.values(), ids=BAD)
def test_bad_input_is_said_in_the_words_of_a_submission_and_nothing_is_started(
    project: Project, words: tuple[str, ...]
) -> None:
    _, alone = launch(project, ALONE, *words, expect=2)
    submitted = project.jobkit("submit", *words, "--local", expect=2).stderr
    assert alone.splitlines()[-1] == submitted.splitlines()[-1]
    assert alone.splitlines()[-1].startswith("error: ") and not project.runs


@pytest.mark.parametrize("word", ["parms.steps=3", "parallel.tensor=3"], ids=["an unknown key", "cannot be spread so"])
def test_bad_input_is_said_once_by_all_ranks_together(project: Project, word: str) -> None:
    _, errors = launch(project, TWO, "toy.yaml", word, expect=None)
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, errors
    assert not project.runs


def test_machines_that_were_given_different_configs_are_refused(project: Project) -> None:
    with contextlib.ExitStack() as both:
        ranks = agents(project, both, "toy.yaml", "params.steps=4", last="params.steps=5")
        errors = [process.communicate(timeout=600)[1] for process in ranks]
    assert all(process.returncode for process in ranks)
    assert "was given another params (toy-" in errors[0] and "than rank 0" in errors[0]
    assert not list(project.path.glob("*/runs/*"))


def test_help_and_an_argument_of_an_old_launcher(project: Project) -> None:
    printed, _ = launch(project, ALONE, "--help")
    assert "torchrun" in printed and "--local-rank" not in printed
    for word in ("--local-rank=0", "--local_rank=0"):
        launch(project, ALONE, word, "toy.yaml", "params.steps=2", "--fresh")
    assert [run.name[-2:] for run in project.runs][1:] == ["-2"]


# A task


def test_a_run_goes_from_torchrun_to_a_submission_and_back_without_repeating_a_step(project: Project) -> None:
    two = ("toy.yaml", "resources.nodes=1")
    run = interrupt(project, TWO, *two)
    assert status(run)["state"] == "interrupted" and causes(run) == ["user"]

    project.env["HOLD"] = "1"
    with project.start("submit", *two, "--local") as process:
        wait_for("its attempt", lambda: len(status(run)["attempts"]) == 2 or process.poll() is not None, run)
        before = status(run)["step"]
        wait_for("some steps", lambda: step(run) > before or process.poll() is not None, run)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=600)
    assert process.returncode == 75, f"{printed}\n{errors}\n{describe(run)}"
    assert "continuing toy-" in errors

    _, errors = launch(project, TWO, *two, HOLD="")
    assert f"{run.name} goes on from step" in errors
    assert project.runs == [run] and causes(run) == ["user", "user", "finished"]
    assert_each_step_once(run, 60, ranks=2)

    printed, _ = launch(project, TWO, *two)
    assert printed.count("already finished at step 60") == 1
    assert "already finished" in project.jobkit("submit", *two, "--local").stdout

    launch(project, TWO, *two, "--fresh", HOLD="")
    again = project.runs[-1]
    assert again.name == f"{run.name}-2" and weights(again) == weights(run)


def test_a_second_launch_of_a_run_that_trains_says_where_and_starts_nothing(project: Project) -> None:
    with start(project, ALONE, "toy.yaml", HOLD="1") as first:
        wait_for("a run", lambda: first.poll() is not None or project.runs)
        wait_for("a step", lambda: step(project.runs[0]) > 0, project.runs[0])
        printed, _ = launch(project, ALONE, "toy.yaml")
        assert "already running: process" in printed
        assert "already running" in project.jobkit("submit", "toy.yaml", "--local").stdout
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=600)
    assert first.returncode == 75 and len(status(project.runs[0])["attempts"]) == 1


FAILS = """
def at_step(ctx, step):
    if (step, ctx.rank) == (12, 1):
        raise ValueError("no good")
"""


@pytest.mark.parametrize("where", ["in the task", "in its import"])
def test_a_failure_shows_its_traceback_once_and_the_same_command_continues(project: Project, where: str) -> None:
    (project.path / "orders.py").write_text(FAILS if where == "in the task" else "raise ValueError('no good')")
    _, errors = launch(project, TWO, "toy.yaml", "checkpoint.every=5", expect=1)
    assert errors.count("ended after another rank") == 1
    assert errors.count('orders.py", line') == 1, errors
    (run,) = project.runs
    assert status(run)["state"] == "failed" and "ValueError: no good" in status(run)["error"]
    (project.path / "orders.py").write_text("def at_step(ctx, step): pass\n")
    launch(project, TWO, "toy.yaml", "checkpoint.every=5")
    first = status(run)["attempts"][1]["first_step"]
    assert (status(run)["state"], first) == ("finished", 10 if where == "in the task" else 0)
    assert logged_steps(run) == list(range(60))


KILLS = """
import os, signal, time
from pathlib import Path


def at_step(ctx, step):
    marker, durable = Path("killed"), ctx.run_dir / "checkpoints/step_00000010"
    if (step, ctx.rank) == (12, 1) and not marker.exists():
        while not durable.exists():
            time.sleep(0.02)
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_restart_by_torchrun_continues_though_the_command_says_fresh(project: Project) -> None:
    (project.path / "orders.py").write_text(KILLS)
    launcher = (*TORCHRUN, "--nproc-per-node=2", "--max-restarts=2", "-m")
    launch(project, launcher, "toy.yaml", "checkpoint.every=5", "--fresh")
    (run,) = project.runs
    assert [one["first_step"] for one in status(run)["attempts"]] == [0, 10], describe(run)
    assert status(run)["state"] == "finished" and logged_steps(run) == list(range(60))


# A command

WITH_INIT = """\
import jobkit
import mytask

ctx = jobkit.init(name="ignored", params={"sleep": 0.0})
ctx.finish(mytask.train(ctx))
"""
BARE = """\
import json, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")  # at the MASTER_ADDR and MASTER_PORT that it was told
total = torch.ones(1)
dist.all_reduce(total)
run, rank = Path(os.environ["JOBKIT_RUN"]), int(os.environ["RANK"])
(run / f"told_{os.environ['JOBKIT_ATTEMPT']}_{rank}.json").write_text(json.dumps([total.item(), sys.argv[1:]]))
if "wait" in os.environ.get("DO", ""):
    time.sleep(600)
if "fail" in os.environ.get("DO", "") and rank == 1:
    os._exit(3)  # an interpreter that ends with a process group may die in gloo's threads
dist.barrier()
"""


@pytest.fixture
def commands(project: Project) -> Project:
    (project.path / "bare.py").write_text(BARE)
    (project.path / "with_init.py").write_text(WITH_INIT)
    text = (project.path / "toy.yaml").read_text()
    (project.path / "toy.yaml").write_text(text.replace("task: mytask:train", "command: [python, bare.py, --lr, '1']"))
    return project


INIT = ("toy.yaml", "command=[python, with_init.py]", "resources.nodes=1")


def test_a_command_with_init_goes_from_torchrun_to_a_submission_and_ends_with_the_uninterrupted_weights(
    commands: Project,
) -> None:
    run = interrupt(commands, TWO, *INIT)
    assert status(run)["state"] == "interrupted" and causes(run) == ["user"], describe(run)
    interrupt(commands, TWO, *INIT)
    commands.jobkit("submit", *INIT, "--local")
    assert commands.runs == [run] and causes(run) == ["user", "user", "finished"]
    assert_each_step_once(run, 60, ranks=2)
    launch(commands, TWO, *INIT, "--fresh")
    assert weights(commands.runs[-1]) == weights(run)


def test_a_bare_command_finds_its_process_group_and_finishes_its_run(commands: Project) -> None:
    launch(commands, TWO, "toy.yaml")
    (run,) = commands.runs
    assert [json.loads((run / f"told_1_{rank}.json").read_text()) for rank in (0, 1)] == [[2.0, ["--lr", "1"]]] * 2
    assert status(run)["state"] == "finished"
    printed, _ = launch(commands, TWO, "toy.yaml")
    assert printed.count("already finished") == 1


def test_a_bare_command_that_fails_on_one_rank_fails_the_run_and_starts_again(commands: Project) -> None:
    _, errors = launch(commands, TWO, "toy.yaml", expect=1, DO="fail")
    (run,) = commands.runs
    assert status(run)["state"] == "failed" and status(run)["error"] == "rank 1 ended with exit code 3", describe(run)
    assert "has failed: rank 1 ended with exit code 3" in errors
    launch(commands, TWO, "toy.yaml")
    assert causes(run) == ["crashed", "finished"]


def test_a_bare_command_that_is_stopped_says_that_it_has_no_checkpoint(commands: Project) -> None:
    with start(commands, ALONE, "toy.yaml", DO="wait") as process:
        wait_for("its start", lambda: process.poll() is not None or list(commands.path.glob("runs/*/told_1_0.json")))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    assert "jobkit has no checkpoint of it" in errors
    (run,) = commands.runs
    assert status(run)["state"] == "interrupted" and causes(run) == ["user"]
    launch(commands, ALONE, "toy.yaml")
    assert status(run)["state"] == "finished"


# Two machines that share nothing but a network: folders of their own, and devices of other numbers

Nodes = tuple[int, ...]


def agents(
    project: Project,
    stack: contextlib.ExitStack,
    *words: str,
    last: str = "",
    nodes: tuple[int, ...] = (0, 1),
    **env: str,
) -> list[subprocess.Popen[str]]:
    """A torchrun on each machine, as two people would type it; `last` is one more word on the last."""
    port, started = free_port(), []
    for place, node in enumerate(nodes):
        machine = Project(project.path / f"machine{node}", {"CUDA_VISIBLE_DEVICES": ("0,1", "6,7")[node]})
        for file in (*project.path.glob("*.py"), project.path / "toy.yaml"):
            shutil.copy(file, machine.path / file.name)
        place_of = [f"--nnodes={len(nodes)}", f"--node-rank={place}", "--nproc-per-node=1"]
        at = ["--master-addr=127.0.0.1", f"--master-port={port}", "-m"]
        own = [last] if last and node == nodes[-1] else []
        started.append(stack.enter_context(start(machine, (*TORCHRUN[:3], *place_of, *at), *words, *own, **env)))
    return started


def machine_run(project: Project, node: int) -> Path:
    (run,) = project.path.glob(f"machine{node}/runs/toy-*")
    return run


@pytest.mark.parametrize("kind", ["task", "command"])
def test_two_machines_without_a_shared_disk_lose_one_and_continue(project: Project, kind: str) -> None:
    words = ("toy.yaml", "checkpoint.every=5")
    if kind == "command":
        (project.path / "with_init.py").write_text(WITH_INIT)
        words = (*words, "task=''", "command=[python, with_init.py]")
    with contextlib.ExitStack() as both:
        first = agents(project, both, *words, SLEEP="0.5")
        wait_for("a run", lambda: list(project.path.glob("machine0/runs/*/config.yaml")) or first[0].poll() is not None)
        assert first[0].poll() is None, first[0].communicate()
        run = machine_run(project, 0)
        wait_for("a checkpoint", lambda: (status(run).get("checkpoint") or 0) >= 5 or first[0].poll() is not None, run)
        lost = ranks_of(project.path / "machine1")
        first[1].kill()  # the machine's power: its agent and its ranks at once
        for pid in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        said = [process.communicate(timeout=600) for process in first]
    assert first[0].returncode != 0, said
    kept = status(run)["checkpoint"]
    assert status(run)["state"] in ("failed", "interrupted") and kept >= 5, describe(run)

    alone = Project(project.path / "alone")
    shutil.copytree(project.path / "machine1", alone.path, symlinks=True, dirs_exist_ok=True)
    launch(alone, ALONE, *words, CUDA_VISIBLE_DEVICES="")  # machine 0 is gone for good: the other has all it needs
    (left,) = alone.runs
    assert (status(left)["state"], status(left)["attempts"][0]["first_step"]) == ("finished", kept), describe(left)

    with contextlib.ExitStack() as both:
        second = agents(project, both, *words)
        said = [process.communicate(timeout=600) for process in second]
    assert [process.returncode for process in second] == [0, 0], said
    assert status(run)["state"] == "finished", describe(run)
    assert status(run)["attempts"][1]["first_step"] == kept
    assert logged_steps(run) == list(range(60))
    for node, visible in ((0, "0,1"), (1, "6,7")):
        assert list(machine_run(project, node).glob("checkpoints/step_00000060/manifest.json"))
        assert (machine_run(project, node) / f"devices_{node}").read_text() == visible


def begun_alone(project: Project) -> tuple[Project, Path]:
    """Machine 0, on which the run has trained some steps alone and stopped; and the run there."""
    machine = Project(project.path / "machine0", {"CUDA_VISIBLE_DEVICES": "0,1"})
    shutil.copy(project.path / "orders.py", machine.path / "orders.py")
    return machine, interrupt(machine, ALONE, "toy.yaml")


def test_a_new_machine_joins_with_a_copy_of_the_run_directory(project: Project) -> None:
    machine, run = begun_alone(project)
    kept = status(run)["checkpoint"]
    shutil.copytree(machine.path / "runs", project.path / "machine1" / "runs", symlinks=True)
    with contextlib.ExitStack() as both:
        ranks = agents(project, both, "toy.yaml")
        said = [process.communicate(timeout=600) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert f"goes on from step {kept}" in said[0][1]
    assert logged_steps(run) == list(range(60)) and status(run)["state"] == "finished"


def test_a_machine_that_has_lost_its_disk_is_refused_and_nothing_begins_at_step_0(project: Project) -> None:
    machine, run = begun_alone(project)
    with contextlib.ExitStack() as both:
        ranks = agents(project, both, "toy.yaml")
        said = [process.communicate(timeout=600)[1] for process in ranks]
    assert all(process.returncode for process in ranks)
    assert said[0].count("error: no step has a checkpoint on every node's disk") == 1, said
    assert "jobkit/worker" not in said[0] and status(run)["state"] == "failed"
    launch(machine, ALONE, "toy.yaml")
    assert logged_steps(run) == list(range(60))


def ranks_of(folder: Path) -> list[int]:
    """Processes that were started in a machine's folder, torchrun itself left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            if (entry / "cwd").resolve() == folder and b"torch.distributed.run" not in words:
                found.append(int(entry.name))
    return found
