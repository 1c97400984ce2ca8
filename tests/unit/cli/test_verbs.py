"""status, logs, wait, cancel, preempt and the `jobkit` command itself, on run directories without a job."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.journals import START, TOKEN, began, ended, finished, make_run, submitted

from jobkit.cli import arguments as arguments_of_verbs
from jobkit.cli import cancel, preempt, wait
from jobkit.cli.cancel import _journal_cancel
from jobkit.cli.main import VERBS, main
from jobkit.cli.status import describe, slow_ranks
from jobkit.errors import SchedulerTimeout
from jobkit.run import journal, records
from jobkit.run.files import write_json
from jobkit.run.journal import Journal, read_status
from jobkit.run.records import Cancelled, Event, Progress
from jobkit.run.rundir import RunDir
from jobkit.run.runs import sweep_cancel_file, sweep_lock, verified_file
from jobkit.run.view import view
from jobkit.slurm import commands, jobs
from jobkit.slurm.jobs import Job
from jobkit.supervisor import notify

NAME = "toy-11f5f19c"


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "is_available", lambda: False)
    monkeypatch.setattr(cancel, "ASK_SECONDS", 0.05)
    monkeypatch.setenv("JOBKIT_RUNS", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


Capture = pytest.CaptureFixture[str]

# The command itself


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["lst"], "did you mean 'list'?"),
        (["toy.yaml"], "submit toy.yaml"),
        (["status"], "RUN"),
        (["wait", NAME, "--timeot", "3"], "did you mean '--timeout'?"),
        (["wait", NAME, "--names", "x"], "arguments: --names x\n"),
        (["submit", "exp.yaml", "--lr", "3"], "params.learning_rate=3\n"),
        (["submit", "exp.yaml", "--params.steps=3"], "params.steps=3\n"),
        (["submit", "exp.yaml", "--seed", "4", "--n-heads=8"], "by seed=4; a value is set by params.n_heads=8\n"),
        (["verify", "exp.yaml", "--nodes", "2"], "resources.nodes=2\n"),
        (["submit", "exp.yaml", "--warm"], "params.warm=...\n"),
        (["submit", "none.yaml", "--lr", "3"], "params.lr=3\n"),
        (["submit", "exp.yaml", "--detatch"], "did you mean '--detach'?"),
        (["wait", NAME, "--timeout", "soon"], "'soon'"),
        (["cancel", "tooy"], "RUN: found 'tooy'"),
        (["list", "--json", "--csv"], "--csv"),
    ],
)
def test_a_mistake_takes_two_lines_at_most(
    words: list[str], part: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("exp.yaml").write_text("name: toy\ntask: toy:train\nparams: {learning_rate: 1, steps: 10, n_heads: 3}\n")
    try:
        code = main(words)
    except SystemExit as end:
        code = int(str(end.code))
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and part in error and error.count("\n") <= 2


def test_help_shows_every_verb_and_imports_only_what_it_needs() -> None:
    code = (
        "import sys; from jobkit.cli.main import main; main(['--help']); print([n for n in sys.modules if n in HEAVY])"
    )
    heavy = "HEAVY = {'yaml', 'omegaconf', 'submitit', 'rich', 'logging', 'asyncio', 'subprocess'}\n"
    text = subprocess.run([sys.executable, "-c", heavy + code], capture_output=True, text=True, check=True).stdout
    assert all(verb in text for verb in VERBS)
    assert text.splitlines()[-1] == "[]"


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "submit"])
def test_each_verb_has_help(verb: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0 and VERBS[verb] in capsys.readouterr().out


def test_a_module_of_the_users_folder_hides_none_of_python(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')")
    (tmp_path / "secrets.py").write_text("raise SystemExit('the wrong secrets')")
    done = subprocess.run([sys.executable, "-m", "jobkit", "list"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_shows_no_traceback(tmp_path: Path) -> None:
    run = make_run(tmp_path, NAME, submitted(), began())
    with run.alive_lock():
        command = [sys.executable, "-m", "jobkit", "logs", "-f", NAME]
        run.logs(1).mkdir(parents=True)
        run.rank_log(1, 0).write_text("hello\n")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "hello\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    # CPython ends by the signal, which is 130 for a shell, where it came within an exec, as a dataclass is made by.
    assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in error


# status


def _steps(first: int, last: int, durable: int) -> dict[str, Any]:
    return {"first_step": first, "last_step": last, "durable_step": durable, "loop_began": START + 10}


def test_status_shows_attempts_steps_and_what_to_type(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        NAME,
        submitted(),
        began(nodes=["node1", "node2"]),
        ended(
            "killed",
            "in_place",
            error="SIGKILL\nmore",
            rank=3,
            node="node2",
            avoid={"node2": 9e9},
            **_steps(0, 60, 50),
        ),
        began(2, how="in place", time=START + 61),
        ended(
            "crashed",
            "fail",
            2,
            START + 99,
            samples=[*range(20)],
            traceback="Trace\n  x",
            avoid={"node2": 9e9},
            **_steps(50, 70, 50),
        ),
    )
    text = "\n".join(describe(view(run), None, START + 100))
    for part in (
        f"{NAME}: failed",
        "attempt 1 (start): killed, steps 0 to 60, 0:00:55 on node1, node2",
        "node node2: SIGKILL",
        "10 steps repeated",
        "excluded nodes: node2",
        "0, 1, 2, 3, 4, 5, 6, 7 and 12 more",
        "Trace\n  x",
        f"resume {NAME}",
    ):
        assert part in text
    assert "more\n" not in text.partition("Trace")[0].replace("12 more", "")


def test_status_for_programs_is_json_without_nan(tmp_path: Path, capsys: Capture) -> None:
    config = {"params": {"clip": math.inf, "augment": None, "sizes": []}}
    run = make_run(tmp_path, NAME, submitted(config=config), began(), ended(last_step=5), finished({"loss": math.nan}))
    records.write(run.progress_file, Progress(attempt=1, time=START, step=5, values={"loss": math.inf}))
    assert main(["status", NAME, "--json"]) == 0
    value = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (value["state"], value["result"], value["progress"]["values"]) == (
        "finished",
        {"loss": None},
        {"loss": None},
    )
    assert [account["attempt"] for account in value["accounts"]] == [1]
    assert value["submitted"]["config"] == {"params": {"clip": None, "augment": None, "sizes": []}}


def test_status_of_a_running_run_has_its_warnings(tmp_path: Path) -> None:
    run = make_run(tmp_path, NAME, submitted(), began())
    progress = Progress(attempt=1, time=START + 20, step=7, total_steps=9, warnings=["one GPU is slow"])
    with run.alive_lock():
        lines = describe(view(run), progress, START + 20)
        assert lines[0] == f"{NAME}: running, step 7 of 9" and "warning: one GPU is slow" in lines
        assert "slow" not in str(describe(view(run), Progress(attempt=9, time=0, warnings=["slow"]), START))
        validates = Progress(attempt=1, time=START, step=7, total_steps=9, steps_per_second=2.0, outside_since=START)
        assert describe(view(run), validates, START + 250)[0].endswith("step 7 of 9, outside a step since 0:04:10")


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([0.4, 0.4, 1.0, 0.4], [(2, "b")]),
        ([1.0, 0.4], [(0, "a")]),
        ([0.4, 0.5, 0.55, 0.4], []),  # below the factor
        ([0.01, 0.01, 0.05, 0.01], []),  # a small part of a step
        (None, []),
    ],
)
def test_a_slow_rank_is_named_with_its_node(
    tmp_path: Path, seconds: list[float] | None, slow: list[tuple[int, str]]
) -> None:
    run = make_run(tmp_path, NAME, submitted(), began(nodes=["a", "b"]))
    progress = Progress(attempt=1, time=START, rank_seconds=seconds, steps_per_second=0.9)
    with run.alive_lock():
        assert [(named["rank"], named["node"]) for named in slow_ranks(view(run), progress)] == slow
        assert slow_ranks(view(run), replace(progress, attempt=2)) == []


# logs


def _printed(run: RunDir, attempt: int, rank: int, out: str, err: str = "") -> None:
    run.logs(attempt).mkdir(parents=True, exist_ok=True)
    run.rank_log(attempt, rank).write_text(out)
    run.rank_log(attempt, rank, "err").write_text(err)


@pytest.mark.parametrize(
    ("words", "out", "err"),
    [
        ([], "one\ntwo", ["--- attempt 1, rank 0", "oops", "--- attempt 2, rank 0"]),
        (["--attempt", "2"], "two", ["--- attempt 2, rank 0"]),
        (["--rank", "1"], "other\n", ["--- attempt 1, rank 1"]),
        (["--err"], "oops\n", ["--- attempt 1, rank 0"]),
    ],
    ids=["all", "--attempt", "--rank", "--err"],
)
def test_logs(tmp_path: Path, capsys: Capture, words: list[str], out: str, err: list[str]) -> None:
    run = make_run(tmp_path, NAME, submitted(), began(), ended("killed", "in_place"), began(2), ended(attempt=2))
    _printed(run, 1, 0, "one\n", "oops\n")
    _printed(run, 1, 1, "other\n")
    _printed(run, 2, 0, "two")  # killed within a line
    assert main(["logs", NAME, *words]) == 0
    answer = capsys.readouterr()
    assert (answer.out.strip(), answer.err.splitlines()) == (out.strip(), err)


@pytest.mark.parametrize(("words", "key"), [(["--attempt", "7"], "--attempt"), (["--rank", "7"], "--rank")])
def test_logs_of_what_is_not_there_are_refused(tmp_path: Path, capsys: Capture, words: list[str], key: str) -> None:
    run = make_run(tmp_path, NAME, submitted(), began(), ended())
    _printed(run, 1, 0, "one\n")
    assert main(["logs", NAME, *words]) == 2
    assert f"error: {key}: " in capsys.readouterr().err


def test_the_jobs_own_output_is_shown_where_no_rank_ever_was(tmp_path: Path, capsys: Capture) -> None:
    run = make_run(tmp_path, NAME, submitted())
    run.submitit.mkdir()
    run.job_log.write_text("module: command not found\n")
    assert main(["logs", NAME]) == 0
    assert capsys.readouterr().out == "module: command not found\n"
    Journal(run).append(began())
    run.logs(1).mkdir(parents=True)
    run.srun_log(1).write_text("srun: error\n")
    assert main(["logs", NAME]) == 0
    assert capsys.readouterr().out == "module: command not found\nsrun: error\n"


def test_following_ends_with_the_run_and_has_its_exit_code(tmp_path: Path, capsys: Capture) -> None:
    run = make_run(tmp_path, NAME, submitted(), began())
    _printed(run, 1, 0, "")

    def train() -> None:
        data = "Schön 你\nlast".encode()
        with run.rank_log(1, 0).open("ab") as log:
            for byte in data:  # characters arrive in parts
                log.write(bytes([byte]))
                log.flush()
                time.sleep(0.01)
        Journal(run).append(ended("crashed", "fail"))

    with run.alive_lock():
        thread = threading.Thread(target=train)
        thread.start()
        code = main(["logs", "-f", NAME])
    thread.join()
    assert (code, capsys.readouterr().out) == (1, "Schön 你\nlast\n")


@pytest.mark.parametrize("words", [["logs", "-f"], ["wait"]])
def test_the_first_look_of_a_command_that_waits_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    make_run(tmp_path, NAME, submitted(), began(), ended(), finished())
    looks, events, verb = [], journal.events, importlib.import_module(f"jobkit.cli.{words[0]}")

    def fail_once(run: RunDir) -> Iterator[Event]:
        looks.append(run)
        if len(looks) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return events(run)

    def chosen(arguments: argparse.Namespace) -> list[RunDir]:
        runs = arguments_of_verbs.chosen(arguments)
        monkeypatch.setattr(journal, "events", fail_once)  # once the run is known
        return runs

    monkeypatch.setattr(verb, "chosen", chosen)
    assert main([*words, NAME]) == 0
    assert len(looks) > 1


# wait


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([[ended(), finished()], [ended(), finished()]], 0),
        ([[ended(), finished()], [ended("timeout", "stop")]], 75),
        ([[ended("crashed", "fail")], [ended("timeout", "stop")]], 1),
        ([[ended(), finished()], [Cancelled()]], 75),
        ([[ended(), finished()], []], 75),  # lost
    ],
)
def test_wait_has_the_exit_code_of_the_worst(tmp_path: Path, events: list[list[Event]], code: int) -> None:
    for number, more in enumerate(events):
        make_run(tmp_path, f"toy-{number:08}", submitted(), began(), *more)
    assert main(["wait", "toy-*"]) == code


def test_wait_says_how_each_run_ends_as_soon_as_it_does(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = make_run(tmp_path, "toy-00000000", submitted(), began())
    make_run(tmp_path, "toy-00000001", submitted(), began(), finished({"loss": 1}))
    said: list[str] = []

    def fail(seconds: float) -> None:  # in its first pause: not before it has looked once
        said.append(capsys.readouterr().out)
        Journal(running).append(ended("crashed", "fail"))

    monkeypatch.setattr(wait.time, "sleep", fail)
    with running.alive_lock():
        assert main(["wait", "toy-*"]) == 1
    said.append(capsys.readouterr().out)
    assert [line.split()[:2] for line in said] == [["toy-00000001:", "finished"], ["toy-00000000:", "failed"]]


def test_wait_goes_on_while_the_controller_is_away(
    tmp_path: Path, slurm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "ASK_SECONDS", 0.1)
    slurm["error"] = SchedulerTimeout("no answer")
    make_run(tmp_path, NAME, submitted("slurm"), began())
    assert main(["wait", NAME, "--timeout", "2"]) == 124
    threading.Timer(1.0, slurm.update, [{"state": "COMPLETED", "error": None}]).start()
    assert main(["wait", NAME, "--timeout", "60"]) == 75  # its job is gone, and nothing recorded why


def test_wait_gives_up_in_time(tmp_path: Path) -> None:
    run = make_run(tmp_path, NAME, submitted(), began())
    with run.alive_lock():
        assert main(["wait", NAME, "--timeout", "1s"]) == 124


@pytest.mark.parametrize(("text", "seconds"), [("60", 60), ("10min", 600), ("2h", 7200)])
def test_a_bare_number_is_of_seconds_where_somebody_waits(text: str, seconds: int) -> None:
    parser = argparse.ArgumentParser()
    wait.add_arguments(parser)
    assert parser.parse_args([NAME, "--timeout", text]).timeout == seconds


# cancel and preempt


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A Slurm of one job, whose state is `state`; scancel ends it."""
    answers: dict[str, Any] = {"state": "PENDING", "cancelled": [], "error": None}

    def queue(users: str, timeout: float) -> list[Job]:
        if answers["error"]:
            raise answers["error"]
        return [Job("17", answers["state"], "Priority", None, None, "", "main", TOKEN)]

    def scancel(*job_ids: str) -> None:
        answers["cancelled"] += job_ids
        answers["state"] = "CANCELLED"

    monkeypatch.setattr(commands, "is_available", lambda: True)
    monkeypatch.setattr(commands, "is_here", lambda cluster: cluster == "here")
    monkeypatch.setattr(jobs, "queue", queue)
    monkeypatch.setattr(jobs, "cancel", scancel)
    return answers


@pytest.mark.parametrize("events", [[], [began()]], ids=["it waits", "Slurm has put it back"])
def test_a_job_in_the_queue_is_cancelled_and_the_run_with_it(
    tmp_path: Path, slurm: dict[str, Any], events: list[Event]
) -> None:
    run = make_run(tmp_path, NAME, submitted("slurm"), *events)
    notify.keep(run, f"echo $JOBKIT_STATE >>{tmp_path}/told")
    assert main(["cancel", NAME]) == 0
    assert (slurm["cancelled"], read_status(run).state) == (["17"], "cancelled")
    assert main(["cancel", NAME]) == 0  # no mistake
    assert slurm["cancelled"] == ["17"]
    assert (tmp_path / "told").read_text() == "cancelled\n", "once; no supervisor lives that would"


def test_a_controller_that_is_away_keeps_a_queued_run_but_not_a_running_one(
    tmp_path: Path, slurm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm["error"] = SchedulerTimeout("no answer")
    monkeypatch.setattr(cancel, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(cancel, "KILLED_SECONDS", 0.0)
    queued = make_run(tmp_path, NAME, submitted("slurm"))
    assert main(["cancel", NAME]) == 1
    assert read_status(queued).state == "queued" and queued.request("cancel") is None
    Journal(queued).append(began())
    assert main(["cancel", NAME]) == 1  # its supervisor was asked, and did not answer yet
    assert read_status(queued).state == "running"
    assert (
        main(["cancel", NAME, "--no-grace"]) == 0
    )  # neither it nor the cluster answers: a person says that they are gone
    request = queued.request("cancel")
    assert request is not None and (request.submission, request.attempt, request.grace) == (1, 1, 0.0)
    assert read_status(queued).state == "cancelled"


def _supervisor(run: RunDir, kind: str, *events: Event) -> Callable[[], None]:
    """Start a thread that answers a request as a supervisor does; returns what ends it."""
    held = ExitStack()
    held.enter_context(run.alive_lock())

    def serve() -> None:
        while run.request(kind) is None:
            time.sleep(0.01)
        with run.submit_lock():  # no command sees the journal between two of them
            for event in events:
                Journal(run).append(event)
        held.close()

    thread = threading.Thread(target=serve)
    thread.start()
    return thread.join


@pytest.mark.parametrize(
    ("events", "state", "part"),
    [
        ([ended("cancelled", "stop", last_step=60), Cancelled(user="this_job")], "cancelled", "cancelled at step 60"),
        ([ended(), finished()], "finished", "ended before it could be cancelled"),
        ([ended("timeout", "stop", last_step=60)], "cancelled", "cancelled at step 60"),
        ([ended("crashed", "fail")], "failed", "ended before it could be cancelled"),
        ([], "cancelled", "cancelled"),  # its job died without a word
    ],
)
def test_a_running_run_is_cancelled_by_its_supervisor(
    tmp_path: Path, capsys: Capture, events: list[Event], state: str, part: str
) -> None:
    run = make_run(tmp_path, NAME, submitted(), began())
    (run.checkpoints / "step_00000050").mkdir(parents=True)
    join = _supervisor(run, "cancel", *events)
    assert main(["cancel", NAME]) == 0
    join()
    assert read_status(run).state == state and part in capsys.readouterr().out


def test_a_run_that_another_command_continued_is_left_alone(tmp_path: Path, capsys: Capture) -> None:
    run = make_run(tmp_path, NAME, submitted(), began())
    join = _supervisor(run, "cancel", ended("timeout", "stop"), submitted(token="jobkit:toy:2:ffffff", number=2))
    assert main(["cancel", NAME]) == 0
    join()
    assert "another command continued it" in capsys.readouterr().out and read_status(run).state == "queued"


def test_a_supervisor_that_does_not_answer(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel, "PATIENCE_SECONDS", 0.2)
    run = make_run(tmp_path, NAME, submitted(), began())
    with run.alive_lock():
        assert main(["cancel", NAME]) == 1
    assert read_status(run).state == "running" and "still running" in capsys.readouterr().out


def test_a_cancel_on_another_host_waits_for_an_answer_and_frees_what_is_gone(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(cancel, "KILLED_SECONDS", 0.2)
    run = make_run(tmp_path, NAME, submitted(host="elsewhere"))
    for event in (None, began()):
        if event is not None:
            Journal(run).append(event)
        assert main(["cancel", NAME]) == 1
        said = capsys.readouterr().out
        assert "on host elsewhere" in said and f"cancel --no-grace {NAME}" in said
        assert run.request("cancel") is not None, "its supervisor may live"
    assert main(["cancel", "--no-grace", NAME]) == 0
    assert read_status(run).state == "cancelled"


def test_a_sweep_is_cancelled_before_its_first_run_exists(tmp_path: Path) -> None:
    file = tmp_path / "toy-7cbedaba.sweep"
    file.write_text(f"{NAME}\n")
    assert main(["cancel", file.name]) == 2, "nothing makes its runs"
    with sweep_lock(file):
        assert main(["cancel", file.name]) == 0
    assert sweep_cancel_file(file).exists()


@pytest.mark.parametrize(
    ("follows", "words", "grace", "shows"),
    [
        ("in_place", [], None, "from step 60 or later"),
        ("requeue", [], None, "from step 40 or later"),  # the memory goes with the job
        ("fail", ["--no-grace"], 0.0, "jobkit resume"),
    ],
)
def test_preempt_waits_for_the_end_of_the_attempt(
    tmp_path: Path, capsys: Capture, follows: str, words: list[str], grace: float | None, shows: str
) -> None:
    run = make_run(tmp_path, NAME, submitted(), began())
    end = ended("preempted", follows, last_step=70, durable_step=40, first_step=50, snapshot_step=60)
    join = _supervisor(run, "preempt", end)
    assert main(["preempt", NAME, *words]) == 0
    join()
    request = run.request("preempt")
    assert request is not None and request.grace == grace
    assert shows in capsys.readouterr().out


def test_preempt_looks_again_while_the_run_directory_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, NAME, submitted(), began())
    away = tmp_path / "away"
    monkeypatch.setattr(RunDir, "ask", lambda *_: run.path.rename(away))  # as by a mount that ends then

    def bring_back(seconds: float) -> None:
        away.rename(run.path)
        Journal(run).append(ended("preempted", "in_place"))

    monkeypatch.setattr(preempt.time, "sleep", bring_back)
    with run.alive_lock():
        assert main(["preempt", NAME]) == 0


@pytest.mark.parametrize("verb", ["cancel", "resume", "preempt"])
def test_several_runs_are_acted_on_only_when_a_person_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    over = [] if verb == "cancel" else [ended(), finished()]
    made = [make_run(tmp_path, f"toy-{number:08}", submitted(), began(), *over) for number in range(2)]
    for run in made:
        run.config_file.write_text("name: toy\ncommand: ['true']\n")
        run.code.symlink_to(tmp_path)
    before = [read_status(run).state for run in made]
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main([verb, "toy-*"]) == 2
    assert [read_status(run).state for run in made] == before
    assert main([verb, "toy-*", "-y"]) == (1 if verb == "preempt" else 0)
    assert [read_status(run).state for run in made] == (["cancelled"] * 2 if verb == "cancel" else before)


WITH_A_FINISHED_RUN = {
    **{verb: [verb, NAME] for verb in ("status", "logs", "wait", "cancel", "resume", "preempt", "list", "report")},
    "diff": ["diff", NAME, NAME],
    "rm": ["rm", NAME, "--dry-run"],
}


@pytest.mark.parametrize("verb", WITH_A_FINISHED_RUN)
def test_runs_are_looked_for_in_the_folder_that_is_named(tmp_path: Path, verb: str) -> None:
    run = make_run(tmp_path / "elsewhere", NAME, submitted(), began(), ended(), finished())
    run.config_file.write_text("name: toy\ncommand: ['true']\n")
    run.code.symlink_to(tmp_path)
    _printed(run, 1, 0, "one\n")
    words = WITH_A_FINISHED_RUN[verb]
    assert main(words) == 2
    assert main([*words, "--runs-dir", str(tmp_path / "elsewhere")]) == (1 if verb == "preempt" else 0)


def test_doctor_looks_at_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobkit.slurm.commands.run", lambda *words, **options: pytest.fail("asked Slurm"))
    assert main(["doctor", "--local"]) == 0


def test_doctor_looks_at_the_folder_that_is_named(tmp_path: Path, capsys: Capture) -> None:
    assert main(["doctor", "--local", "--runs-dir", str(tmp_path / "elsewhere")]) == 0
    assert str(tmp_path / "elsewhere") in capsys.readouterr().out


def test_doctor_looks_at_the_cluster_that_is_named(capsys: Capture) -> None:
    assert main(["doctor", "--cluster", "slrum"]) == 2
    assert "did you mean 'slurm'?" in capsys.readouterr().err


@pytest.mark.parametrize("events", [[], [began()], [began(), ended("timeout", "stop")]])
def test_there_is_nothing_to_preempt(tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preempt, "PATIENCE_SECONDS", 0.0)
    run = make_run(tmp_path, NAME, submitted(), *events)  # with [began()] it is lost
    assert main(["preempt", NAME]) == 1
    assert run.request("preempt") is None


def test_the_page_for_agents_names_every_command(capsys: Capture) -> None:
    assert main(["--help-agent"]) == 0
    page = capsys.readouterr().out
    assert page == (Path(__file__).parents[3] / "AGENTS.md").read_text(encoding="utf-8")
    assert [verb for verb in VERBS if f"`python -m jobkit {verb} " not in page and f"jobkit {verb}`" not in page] == []


def test_status_of_a_lost_run_says_why_its_job_could_not_begin_and_what_to_type(tmp_path: Path) -> None:
    run = make_run(tmp_path, NAME, submitted())
    run.submitit.mkdir()
    run.failed_starts.write_text("x\n")
    run.job_log.write_text("module: command not found\n")
    text = "\n".join(describe(view(run), None, START + 100))
    assert all(words in text for words in ("lost", "module: command not found", f"resume {NAME}"))


def test_status_names_a_difference_at_step_0(tmp_path: Path) -> None:
    dead = ended("killed", "in_place", first_step=0, last_step=3)
    compared = ended("finished", "stop", 2, first_step=0, last_step=9, repeated=3, compared=3, differs_at=0)
    run = make_run(tmp_path, NAME, submitted(), began(), dead, began(2), compared, finished())
    assert "step 0 logged other values" in "\n".join(describe(view(run), None, START + 100))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"equal": True, "nondeterministic": False}, "equal"),
        ({"equal": False, "nondeterministic": False}, "it differs"),
        ({"equal": False, "nondeterministic": True}, "two straight runs"),
    ],
)
def test_status_says_how_the_last_verification_of_this_code_ended(
    tmp_path: Path, answer: dict[str, bool], words: str
) -> None:
    run = make_run(tmp_path, NAME, submitted(code="0123"), began(), ended(), finished())
    file = verified_file(tmp_path, "0123", run.name)
    file.parent.mkdir()
    write_json(file, {"time": START, **answer}, durable=False)
    (line,) = [line for line in describe(view(run), None, START + 100) if "verified" in line]
    assert words in line


def test_cancel_of_a_run_without_a_job_waits_as_long_as_its_ranks_may_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(cancel, "KILLED_SECONDS", None)  # as long as they take to die is no question here
    run = make_run(tmp_path, NAME, submitted(), began())
    with run.alive_lock():
        assert main(["cancel", NAME]) == 1


def test_a_cancel_leaves_a_run_alone_that_another_submission_has_continued(tmp_path: Path) -> None:
    run = make_run(tmp_path, NAME, submitted(), began())
    before, token = view(run), "jobkit:toy:2:ffffff"
    later = submitted(token=token, number=2), began(2, token=token), ended("stopped", "stop", 2)
    for event in (ended("timeout", "stop"), *later):
        Journal(run).append(event)
    assert (_journal_cancel(before).state, read_status(run).state) == ("interrupted", "interrupted")


def test_wait_gives_up_on_a_sweep_that_still_makes_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "LOOK_SECONDS", None)  # at once: it never looks again
    file = tmp_path / "toy-7cbedaba.sweep"
    file.write_text(f"{NAME}\n")
    make_run(tmp_path, NAME, submitted(), began(), ended(), finished())
    with sweep_lock(file):
        assert main(["wait", file.name, "--timeout", "0"]) == 124


@pytest.mark.parametrize(
    ("begun", "code"),
    [(3, 0), (2, 75), (0, 75)],
    ids=["all runs", "two of three", "none"],
)
def test_runs_of_a_sweep_that_never_ran_are_no_success(tmp_path: Path, capsys: Capture, begun: int, code: int) -> None:
    names = [f"toy-0000000{number}" for number in range(3)]
    (tmp_path / "toy.sweep").write_text("\n".join(names))
    for name in names[:begun]:
        run = make_run(tmp_path, name, submitted(), began(), ended(), finished())
        run.config_file.write_text("name: toy\ncommand: ['true']\n")
    line = f"{3 - begun} run(s) have not begun: {', '.join(names[begun:])}; " if begun < 3 else ""
    assert main(["wait", "toy.sweep"]) == code
    output, said = capsys.readouterr()
    assert (output.splitlines(), said.startswith(line)) == ([f"{name}: finished" for name in names[:begun]], True)
    if begun:
        assert main(["resume", "-y", "toy.sweep"]) == main(["logs", "-f", "toy.sweep"]) == code
        assert capsys.readouterr().err.count(line) == 2 or not line
        assert main(["status", "toy.sweep"]) == main(["list", "toy.sweep"]) == 0
        assert capsys.readouterr().err.count(line) == 2 or not line


def test_a_mistyped_name_is_no_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "toy.sweep").write_text(NAME)
    assert main(["wait", "tooy", "toy.sweep"]) == main(["wait", "tooy.sweep"]) == 2
