"""`command:` runs any script under jobkit; one with jobkit.init() in it is as safe as a task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.project import Project, assert_each_step_once, describe, events, names, status, step, wait_for, weights
from harness.repository import write
from slurm_cluster import Cluster

from jobkit.run.command_line import target
from jobkit.run.rundir import RunDir
from jobkit.supervisor.watchdog import OUTSIDE_LOOP_SECONDS, Watch
from jobkit.worker.command import in_snapshot

TRAIN = """\
import jobkit
import mytask

ctx = jobkit.init(name="ignored", params={"sleep": 0.0, "steps": 1})
ctx.finish(mytask.train(ctx))
"""

WAIT_FOR_THE_STOP = """
import time

from jobkit.worker.stop import STOP_SIGNALS


def at_step(ctx, step):
    while (ctx.attempt, step) == (1, 25) and not STOP_SIGNALS.pending:
        time.sleep(0.02)
"""

FAIL_ONCE = """
import time


def at_step(ctx, step):
    time.sleep(0.5 if ctx.attempt == 1 else 0.1 if ctx.attempt == 2 else 0)
    if (ctx.attempt, step, ctx.rank) == (2, 20, 1):
        1 / 0
"""

# A script that knows nothing of jobkit, not even torch.
BARE = """\
import json, os, sys, time
from pathlib import Path

family = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
told = {name: os.environ[name] for name in family}
told |= {"arguments": sys.argv[1:], "file": __file__, "cwd": os.getcwd(), "python": sys.executable}
attempt, rank = os.environ["JOBKIT_ATTEMPT"], os.environ["RANK"]
Path(os.environ["JOBKIT_RUN"], f"told_{attempt}_{rank}.json").write_text(json.dumps(told))
while attempt == "1" and os.environ.get("WAIT"):
    time.sleep(0.1)
sys.exit(int(os.environ.get("EXIT", "0")) if rank == "1" else 0)
"""


PARSING = """\
import argparse, os
from pathlib import Path

Path(os.environ["JOBKIT_RUN"], f"began_{os.environ['JOBKIT_ATTEMPT']}").touch()
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.parse_args()
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path / "project")
    (made.path / "scripts").mkdir()
    (made.path / "scripts" / "train.py").write_text(TRAIN)
    (made.path / "mytask.py").rename(made.path / "scripts" / "mytask.py")
    (made.path / "bare.py").write_text(BARE)
    (made.path / "toy.yaml").write_text(
        "name: toy\ncommand: [python, bare.py, --lr, '${params.lr}']\nparams: {lr: 1e-3, steps: 60}\n"
        "resources: {nodes: 2, tasks_per_node: 2}\nclusters: {slurm: {partition: low}}\n"
    )
    return made


WITH_INIT = ("command=[python, scripts/train.py]", "resources.tasks_per_node=1")
"""Two ranks, each of which imports torch."""


def told(run: Path, attempt: int = 1, ranks: int = 4) -> list[dict[str, str]]:
    """What the ranks of the bare script were told."""
    return [json.loads((run / f"told_{attempt}_{rank}.json").read_text()) for rank in range(ranks)]


# A script without jobkit.init


def test_a_script_that_knows_nothing_of_jobkit_is_told_its_place_and_finishes_its_run(project: Project) -> None:
    project.submit("--local")
    (run,) = project.runs
    assert status(run)["state"] == "finished", describe(run)
    for rank, one in enumerate(told(run)):
        assert [int(one[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [
            *(rank, 4, rank % 2, 2)
        ]
        assert one["GROUP_RANK"] == str(rank // 2)
        assert one["arguments"] == ["--lr", "0.001"]
        assert Path(one["file"]).is_relative_to(run / "code")
        assert (one["cwd"], one["python"]) == (str(project.path), sys.executable)
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in told(run)}) == 1
    assert "already finished" in project.submit("--local").stdout


def test_a_script_that_fails_is_tried_again_within_its_budget(project: Project) -> None:
    project.env["EXIT"] = "3"
    project.submit("--local", "retry.crash=2", expect=1)
    (run,) = project.runs
    assert status(run)["state"] == "failed"
    assert [attempt["cause"] for attempt in status(run)["attempts"]] == ["crashed", "crashed"]
    assert "rank 1 ended with exit code 3" in status(run)["error"]


def test_a_script_that_does_not_know_its_options_is_not_tried_again(project: Project) -> None:
    (project.path / "bare.py").write_text(PARSING)
    said = project.submit("--local", "command=[python, bare.py, --lrr, 1]", expect=1).stderr
    (run,) = project.runs
    assert len(status(run)["attempts"]) == 1 and len(list(run.glob("began_*"))) == 1
    assert "bare.py: error: unrecognized arguments: --lrr 1 (would fail again: not retried)" in said


LOOKING = """\
import argparse, os

parser = argparse.ArgumentParser()
parser.add_argument("--data")
if os.environ["JOBKIT_ATTEMPT"] == "1":
    parser.error(f"--data: {parser.parse_args().data}: no such folder")
"""


def test_a_script_that_refuses_what_is_away_in_the_words_of_its_parser_is_tried_again(project: Project) -> None:
    (project.path / "bare.py").write_text(LOOKING)
    project.submit("--local", "command=[python, bare.py, --data, /data]")
    (run,) = project.runs
    assert [one["cause"] for one in status(run)["attempts"]] == ["crashed", "finished"]


def test_a_script_without_init_is_preempted_and_starts_again_on_this_machine(project: Project) -> None:
    project.env["WAIT"] = "1"
    with project.start("submit", "toy.yaml", "--local") as process:
        wait_for("its start", lambda: project.runs and (project.runs[0] / "told_1_0.json").exists())
        (run,) = project.runs
        told = project.jobkit("preempt", run.name).stdout
        assert process.wait(60) == 0
    assert [attempt["cause"] for attempt in status(run)["attempts"]] == ["preempted", "finished"]
    assert "your program got SIGTERM; jobkit has no checkpoint of it: it starts again by itself" in told


def assert_nothing_of_steps(said: str) -> None:
    """Nobody knows of a step, or of a checkpoint, of a program that knows nothing of jobkit."""
    for words in ("step", "goodput", "writ", "There is no checkpoint", "continues", "start-up"):
        assert words not in said, said


def test_of_a_script_without_init_nothing_is_said_that_jobkit_does_not_know(project: Project) -> None:
    project.env["WAIT"] = "1"
    one = ("resources.nodes=1", "resources.tasks_per_node=1")
    with project.start("submit", "toy.yaml", "--local", *one) as process:
        wait_for("its start", lambda: project.runs and (project.runs[0] / "told_1_0.json").exists())
        (run,) = project.runs
        running = project.jobkit("status", run.name).stdout + project.jobkit("list").stdout
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "your program got SIGTERM; jobkit has no checkpoint of it" in said
    assert "jobkit has no checkpoint of it; the same command starts it again" in said
    ended = project.jobkit("status", run.name).stdout
    cancelled = project.jobkit("cancel", run.name).stdout
    for text in (running.replace("STEP", ""), printed, said, ended, cancelled):
        assert_nothing_of_steps(text.replace(str(run), "").replace(run.name, ""))


def test_a_script_without_init_is_preempted_and_starts_again_on_slurm(project: Project, slurm: Cluster) -> None:
    project.env.update(slurm.env, WAIT="1")
    project.submit("--cluster", "slurm")
    (run,) = project.runs
    wait_for("its start", lambda: (run / "told_1_3.json").exists(), run)
    slurm.preempt(status(run)["job_id"])
    wait_for("the end", lambda: status(run)["state"] in ("finished", "failed"), run)
    assert [attempt["cause"] for attempt in status(run)["attempts"]] == ["preempted", "finished"], describe(run)
    assert [one["GROUP_RANK"] for one in told(run, attempt=2)] == ["0", "0", "1", "1"]


def test_a_script_that_ends_itself_with_the_signal_to_stop_has_failed(project: Project) -> None:
    (project.path / "kill.sh").write_text("trap 'kill 0' EXIT\nsleep 100 &\nexit 1\n")
    one = ("resources.nodes=1", "resources.tasks_per_node=1", "retry.crash=2")
    project.submit("--local", "command=[bash, kill.sh]", *one, expect=1)
    (run,) = project.runs
    assert [attempt["cause"] for attempt in status(run)["attempts"]] == ["killed", "killed"], describe(run)
    assert "rank 0 was killed by signal 15" in status(run)["error"]


def test_a_signal_of_somebodys_own_counts_as_a_kill_and_it_starts_again(project: Project) -> None:
    project.env["WAIT"] = "1"
    with project.start("submit", "toy.yaml", "--local", "resources.nodes=1", "resources.tasks_per_node=1") as process:
        wait_for("its start", lambda: project.runs and (project.runs[0] / "told_1_0.json").exists())
        (run,) = project.runs
        (rank,) = [int(pid) for pid in ranks_of(run)]
        os.kill(rank, signal.SIGTERM)
        assert process.wait(60) == 0
    assert [attempt["cause"] for attempt in status(run)["attempts"]] == ["killed", "finished"]


def ranks_of(run: Path) -> list[str]:
    """Process ids of a run's ranks on this machine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ, words = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"JOBKIT_RUN={run}\0".encode() in environ and b"bare.py" in words:
            found.append(entry.name)
    return found


def test_a_command_that_never_reports_is_not_taken_for_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    silent = Watch(RunDir(tmp_path), 1, "auto", may_be_silent=True)
    task = Watch(RunDir(tmp_path), 1, "auto")
    RunDir(tmp_path).logs(1).mkdir(parents=True)
    assert (silent.look(), task.look()) == (None, None)
    later = now + OUTSIDE_LOOP_SECONDS + 10
    for watch in (silent, task):
        watch._looked = later  # it has looked all the time
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert silent.look() is None
    assert "no progress" in str(task.look())


# A script with jobkit.init


def test_a_script_with_init_is_preempted_here_and_continues_where_it_was(
    project: Project, uninterrupted: Callable[[int], bytes]
) -> None:
    (project.path / "scripts" / "orders.py").write_text(WAIT_FOR_THE_STOP)
    with project.start("submit", "toy.yaml", "--local", *WITH_INIT) as process:
        wait_for("a run", lambda: project.runs)
        (run,) = project.runs
        wait_for("some steps", lambda: step(run) >= 5, run)
        project.jobkit("preempt", run.name)
        assert process.wait(600) == 0, describe(run)
    assert [attempt["cause"] for attempt in status(run)["attempts"]] == ["preempted", "finished"], describe(run)
    assert_each_step_once(run, 60, ranks=2)
    assert "final_loss" in status(run)["result"]
    assert names(run).count("started") == 2
    assert weights(run) == uninterrupted(2), "those of the same function as a task"


BEFORE_THE_OTHERS = """
import os
import time
from pathlib import Path

import jobkit
from jobkit.worker import script

found = script.rendezvous

def rendezvous(*arguments):
    Path(os.environ["JOBKIT_RUN"], "waits").touch()
    return found(*arguments)

script.rendezvous = rendezvous
if os.environ["RANK"] == "0":
    time.sleep(1000)
jobkit.init(seed=None)
"""


def test_a_rank_whose_init_waits_for_another_ends_with_that_when_told_to_stop(project: Project) -> None:
    (project.path / "train.py").write_text(BEFORE_THE_OTHERS)
    words = ("command=[python, train.py]", "resources.nodes=1", "resources.tasks_per_node=2")
    with project.start("submit", "toy.yaml", "--local", *words) as process:
        wait_for("rank 1", lambda: project.runs and (project.runs[0] / "waits").exists())
        (run,) = project.runs
        time.sleep(0.5)  # until it is in torch's store, where Python calls no handler
        process.send_signal(signal.SIGINT)
        process.wait(600)
    (attempt,) = status(run)["attempts"]
    assert attempt["cause"] == "user" and not list(run.glob("logs/1/error_*")), describe(run)


def test_a_script_with_init_is_preempted_on_slurm_and_an_exception_is_named(project: Project, slurm: Cluster) -> None:
    (project.path / "scripts" / "orders.py").write_text(FAIL_ONCE)
    project.env.update(slurm.env)
    project.submit("--cluster", "slurm", *WITH_INIT, "checkpoint.every=5")
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 5, run)
    slurm.preempt(status(run)["job_id"])
    wait_for("the end", lambda: status(run)["state"] in ("finished", "failed"), run)
    attempts = status(run)["attempts"]
    assert [attempt["cause"] for attempt in attempts] == ["preempted", "crashed", "finished"], describe(run)
    assert attempts[1]["failure"]["error"] == "rank 1: ZeroDivisionError: division by zero"
    assert (attempts[1]["failure"]["step"], attempts[1]["first_step"]) == (20, attempts[0]["last_step"])
    assert attempts[2]["first_step"] >= 15


def test_the_yaml_decides_what_the_script_gets_and_init_adds_what_it_does_not_name(project: Project) -> None:
    (project.path / "look.py").write_text(
        "import jobkit\n"
        "ctx = jobkit.init(name='mine', params={'lr': 5, 'extra': {'depth': 2}}, seed=7)\n"
        "print('seen', ctx.params.lr, ctx.params.extra.depth, ctx.seed, ctx.world_size, ctx.run_dir.name)\n"
        "for step in ctx.steps(3): pass\n"
    )
    project.submit("--local", "command=[python, look.py]", "resources.nodes=1", "resources.tasks_per_node=1")
    (run,) = project.runs
    assert status(run)["state"] == "finished", describe(run)  # all its steps are done, though it never said finish
    printed = (run / "logs" / "1" / "rank_0.out").read_text()
    assert f"seen 0.001 2 0 1 {run.name}" in printed


def test_a_script_that_leaves_its_loop_without_a_word_is_interrupted(project: Project) -> None:
    (project.path / "leave.py").write_text(
        "import jobkit\nctx = jobkit.init()\nfor step in ctx.steps(9):\n    if step == 4: break\n"
    )
    one = ("resources.nodes=1", "resources.tasks_per_node=1")
    project.submit("--local", "command=[python, leave.py]", *one, expect=75)
    (run,) = project.runs
    assert (status(run)["state"], status(run)["attempts"][0]["cause"]) == ("interrupted", "left")
    assert status(run)["attempts"][0]["last_step"] == 4


# The words


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "train.py", "-m", "x"], ("script", "train.py")),
        (["python3", "-u", "-W", "ignore", "train.py"], ("script", "train.py")),
        (["/opt/bin/python3.11", "-m", "pkg.train", "--lr", "1"], ("module", "pkg.train")),
        (["python", "-X", "dev", "-c", "print(1)"], ("code", "print(1)")),
        (["python", "-u"], None),
        (["python", "-m"], None),
    ],
)
def test_what_a_python_runs_is_told_by_its_words(command: list[str], expected: tuple[str, str] | None) -> None:
    found = target(command)
    assert (None if found is None else (found.kind, found.text)) == expected


def test_the_users_files_are_taken_from_the_snapshot(tmp_path: Path) -> None:
    code = tmp_path / "code"
    names = ("train.py", "scripts/run.sh", "config.json", "conf/a.yaml", "results.json", "data.csv", "go")
    write(code, dict.fromkeys(names, ""))
    (tmp_path / "outside.py").touch()
    source, copy = tmp_path / "source", str(code / "train.py")

    def taken(*words: str) -> list[str]:
        return in_snapshot(words, source, code)

    assert taken("python", "train.py", "--file", "config.json") == ["python", copy, "--file", f"{code}/config.json"]
    for option in ("--config=", "-c=", "config=", "--log-config=", "--layout="):
        assert taken("python", f"{option}conf/a.yaml")[1] == f"{option}{code}/conf/a.yaml"
    for unchanged in (["--output=results.json"], ["--eval.out", "results.json"], ["-o", "results.json"]):
        assert taken("python", *unchanged)[1:] == unchanged, "it would be written where nobody looks for it"
    for unchanged in (["--data", "data.csv"], ["--config=../conf/a.yaml"], ["-c", f"# {'long' * 99}\nrun train.py"]):
        assert taken("bash", *unchanged)[1:] == unchanged
    assert taken("torchrun", "--nproc-per-node=2", "train.py")[-1] == copy
    assert taken("bash", "scripts/run.sh", "none.py") == ["bash", str(code / "scripts/run.sh"), "none.py"]
    assert taken("python", "../outside.py", "/train.py") == ["python", "../outside.py", "/train.py"]
    assert taken("bash", f"{source}/scripts/run.sh") == ["bash", str(code / "scripts/run.sh")]
    assert taken("bash", f"{source}/../scripts/run.sh") == ["bash", f"{source}/../scripts/run.sh"]
    assert taken("./go") == ["./go"]  # not executable there
    (code / "go").chmod(0o755)
    assert taken("./go") == [str(code / "./go")]
    assert taken(f"{source}/go") == [str(code / "go")]


def test_a_config_that_is_edited_while_the_job_waits_is_read_as_it_was_submitted(
    project: Project, slurm: Cluster
) -> None:
    project.env.update(slurm.env)
    (project.path / "conf.yaml").write_text("submitted\n")
    (project.path / "run.sh").write_text('cat "$1" "${2#--more=}"; echo of the script\n')
    command = "command=[bash, run.sh, conf.yaml, --more=conf.yaml]"
    one = "resources={nodes: 1, tasks_per_node: 1}"
    project.submit("--cluster", "slurm", command, one, "clusters.slurm.hold=true")
    (run,) = project.runs
    (project.path / "conf.yaml").write_text("edited\n")
    (project.path / "run.sh").write_text("echo edited\n")
    slurm.command("scontrol", "release", status(run)["job_id"])
    wait_for("the end", lambda: status(run)["state"] in ("finished", "failed"), run)
    assert (run / "logs/1/rank_0.out").read_text() == "submitted\nsubmitted\nof the script\n"


def test_a_module_is_imported_from_the_snapshot(project: Project) -> None:
    (project.path / "pkg").mkdir()
    (project.path / "pkg" / "__init__.py").touch()
    (project.path / "pkg" / "main.py").write_text(
        "import sys, pkg\nprint('here', pkg.__file__, sys.argv[1:], __name__)\n"
    )
    project.submit("--local", "command=[python, -m, pkg.main, --flag]", "resources.nodes=1")
    (run,) = project.runs
    assert status(run)["state"] == "finished", describe(run)
    printed = (run / "logs" / "1" / "rank_0.out").read_text()
    assert printed.startswith(f"here {run}/code/")
    assert printed.endswith("['--flag'] __main__\n")


# What is left when main has returned needs the module: a pickle names the classes of __main__.
ENDS_LATE = """\
import atexit, pickle, sys, threading
import pkg


class State:
    pass


def save(when):
    print(when, len(pickle.dumps(State())) > 0, __file__, pkg.__file__, sys.argv[1:])


if __name__ == "__main__":
    atexit.register(save, "atexit")
    threading.Thread(target=lambda: (threading.main_thread().join(), save("thread"))).start()
"""


@pytest.mark.parametrize("options", ["", "-P, ", "-E, -u, ", "-W, ignore, -S, "])
def test_a_module_is_there_until_its_program_has_ended(project: Project, options: str) -> None:
    if options == "-P, ":  # -P itself is of Python 3.11
        options, project.env["PYTHONSAFEPATH"] = "", "1"
        project.env["PYTHONPATH"] = os.pathsep.join(["libs", project.env.get("PYTHONPATH", "")])
    folder = project.path / ("libs/pkg" if "PYTHONSAFEPATH" in project.env else "pkg")
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "train.py").write_text(ENDS_LATE)
    command = f"command=[python, {options}-m, pkg.train, --flag]"
    project.submit("--local", command, "resources={nodes: 1, tasks_per_node: 1}")
    (run,) = project.runs
    (code,) = (run / "code").glob("[0-9a-f]*")
    copy = code / folder.relative_to(project.path)
    expected = [f"{when} True {copy}/train.py {copy}/__init__.py ['--flag']" for when in ("thread", "atexit")]
    assert (run / "logs/1/rank_0.out").read_text().splitlines() == expected, describe(run)


def test_torchrun_in_a_command_starts_the_ranks(project: Project) -> None:
    (project.path / "sum.py").write_text(
        "import jobkit, torch, torch.distributed as dist\n"
        "ctx = jobkit.init()\ntotal = torch.ones(1)\ndist.all_reduce(total)\n"
        "for step in ctx.steps(2): pass\n"
        "ctx.finish({'total': total.item(), 'world': ctx.world_size})\n"
    )
    words = "command=[torchrun, --standalone, --nproc-per-node=2, sum.py]"
    project.submit("--local", words, "resources.nodes=1", "resources.tasks_per_node=1")
    (run,) = project.runs
    assert status(run)["result"] == {"total": 2.0, "world": 2}, describe(run)
    assert [event["attempt"] for event in events(run) if event["event"] == "started"] == [1]


@pytest.mark.parametrize("is_told", [False, True])
def test_a_stop_that_came_before_the_command_had_begun_ends_it(is_told: bool) -> None:
    become = f"_become(['/bin/echo', 'began'], {{}}, is_told=lambda: {is_told})"
    code = f"from jobkit.worker.command import _become; {become}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == ((-signal.SIGTERM, "") if is_told else (0, "began\n"))
