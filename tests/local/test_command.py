"""A real program under `command:`: it learns its place, runs the submitted code, and its exit code decides."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.runs import Launch, Project, wait_until

YAML = """\
name: program
command: [python, train.py, "${run_dir}/outputs"]
resources: {nodes: 2, tasks_per_node: 2}
"""

TRAIN = """\
import json, os, sys, time
from pathlib import Path

import version

outputs, attempt, rank = Path(sys.argv[1]), os.environ["JOBKIT_ATTEMPT"], os.environ["RANK"]
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT JOBKIT_RUN".split()
place = {name: os.environ[name] for name in names}
place |= {"stdin": sys.stdin.read(), "version": version.NUMBER, "cwd": os.getcwd()}
(outputs / f"new_{attempt}_{rank}").write_text(json.dumps(place))
(outputs / f"new_{attempt}_{rank}").rename(outputs / f"place_{attempt}_{rank}.json")
while attempt == "1" and not (outputs / "edited").exists():
    time.sleep(0.02)
sys.exit(3 if (attempt, rank) == ("1", "1") else 0)
"""

SHELL = """\
python child.py
exit $?
"""

CHILD = """\
import os, signal, sys, time
from pathlib import Path

saved = Path(os.environ["JOBKIT_RUN"], "outputs/saved")
saved.parent.mkdir(exist_ok=True)
number = int(saved.read_text()) if saved.exists() else 0
if number == 2:
    sys.exit(1 if os.environ["JOBKIT_ATTEMPT"] == "3" else 0)

def save(*_):
    saved.write_text(str(number + 1))
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
saved.with_name(f"ready_{number}").touch()
time.sleep(1000)
"""


@pytest.fixture
def program(tmp_path: Path) -> Project:
    """A project whose program takes what it knows from a module beside it."""
    project = Project(tmp_path / "project", yaml=YAML)
    write(project)
    return project


def write(project: Project) -> None:
    project.write("train.py", TRAIN)
    project.write("version.py", "NUMBER = 1\n")


def places(launch: Launch, attempt: int) -> list[dict[str, Any]]:
    """Return what the four ranks of an attempt found."""
    files = [launch.run.outputs / f"place_{attempt}_{rank}.json" for rank in range(4)]
    wait_until(lambda: all(file.exists() for file in files), "the ranks to write down their places")
    return [json.loads(file.read_text()) for file in files]


def edit_while_it_runs(program: Project) -> tuple[Launch, Any]:
    """Rank 1 of the first attempt ends with 3, after its user has edited the code."""
    write(program)
    launch = program.submit("--local", "--detach")
    first = places(launch, 1)
    program.write("version.py", "NUMBER = 2\n")
    program.write("train.py", "raise SystemExit('the working copy')\n")
    (launch.run.outputs / "edited").touch()
    launch.wait_until_over()
    return launch, [first, places(launch, 2)]


@pytest.fixture(scope="session")
def edited(seen_once: Callable[..., tuple[Launch, Any]]) -> tuple[Launch, Any]:
    """The run, and what the four ranks of both attempts found."""
    return seen_once("edited", edit_while_it_runs, YAML)


PLACES = {
    "command": {"RANK": [0, 1, 2, 3], "WORLD_SIZE": [4] * 4},
    "resources.nodes": {"GROUP_RANK": [0, 0, 1, 1]},
    "resources.tasks_per_node": {"LOCAL_RANK": [0, 1, 0, 1], "LOCAL_WORLD_SIZE": [2] * 4},
}


@pytest.mark.parametrize("key", PLACES)
def test_a_program_learns_its_place(edited: tuple[Launch, Any], key: str) -> None:
    for attempt in edited[1]:
        assert {name: [int(place[name]) for place in attempt] for name in PLACES[key]} == PLACES[key]
        assert len({(place["MASTER_ADDR"], place["MASTER_PORT"]) for place in attempt}) == 1


def test_a_program_runs_the_submitted_code_in_each_attempt(edited: tuple[Launch, Any]) -> None:
    launch, attempts = edited
    assert (launch.status.state, launch.causes) == ("finished", ["crashed", "finished"])
    assert (launch.ends[0].rank, launch.ends[0].next) == (1, "in_place")
    assert [place["version"] for attempt in attempts for place in attempt] == [1] * 8


def test_a_program_writes_into_its_run_directory_from_the_users_folder(edited: tuple[Launch, Any]) -> None:
    launch, attempts = edited
    for place in (place for attempt in attempts for place in attempt):
        assert (place["JOBKIT_RUN"], place["cwd"]) == (str(launch.run.path), str(launch.run.path.parents[1]))
        assert place["stdin"] == ""
    assert len(list(launch.run.outputs.glob("place_*.json"))) == 8


def test_a_shell_that_waits_for_its_program_lets_it_save_and_its_exit_code_decides(program: Project) -> None:
    """The shell has no trap: SIGTERM is for the program. 75 continues, 1 is tried again, 0 finishes."""
    program.write("train.sh", SHELL)
    program.write("child.py", CHILD)
    words = ("submit", str(program.yaml), "--local", "command=[bash, train.sh]", "resources.nodes=1")
    words = (*words, "resources.tasks_per_node=1")
    process = program.start(*words)
    launch = program.only_run()
    outputs = launch.run.outputs
    for number in range(2):
        wait_until((outputs / f"ready_{number}").exists, "the program")
        program.jobkit("preempt", launch.run.name)
    output, _ = process.communicate()
    assert process.returncode == os.EX_OK, output
    assert launch.causes == ["preempted", "preempted", "crashed", "finished"]
    assert (outputs / "saved").read_text() == "2"


def test_a_program_that_always_fails_ends_its_run_with_1_after_its_budget(program: Project) -> None:
    done = program.jobkit("submit", str(program.yaml), "--local", "command=[python, -c, 'exit(4)']", check=False)
    launch = program.only_run()
    assert (done.returncode, launch.status.state) == (1, "failed")
    assert set(launch.causes) == {"crashed"}
    assert launch.ends[-1].next == "fail"


QUEUED = """\
name: queued
command: [bash, run.sh, --config, conf.yaml]
deterministic: true
"""

SETTINGS = """\
import json, os, sys
from pathlib import Path

names = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE")
seen = {"config": Path(sys.argv[2]).read_text(), "script": 1, **{name: os.environ[name] for name in names}}
Path(os.environ["JOBKIT_RUN"], "outputs", "seen.json").write_text(json.dumps(seen))
"""


def test_a_queued_command_has_the_submitted_files_and_what_is_deterministic(tmp_path: Path) -> None:
    """The shell script waits until they are edited, as a job in the queue would, and starts a Python of its own."""
    project = Project(tmp_path / "project", yaml=QUEUED)
    waits = "while [ ! -e edited ]; do sleep 0.1; done\nmkdir -p $JOBKIT_RUN/outputs\n"
    project.write("run.sh", waits + "python save.py $@\n")
    project.write("save.py", SETTINGS)
    project.write("conf.yaml", "lr: 1\n")
    project.environment["NCCL_NVLS_ENABLE"] = "2"
    launch = project.submit("--local", "--detach").wait_until(lambda me: me.status.attempts, "the attempt")
    for name, text in {"conf.yaml": "lr: 2\n", "save.py": "raise SystemExit('the working copy')\n"}.items():
        project.write(name, text)
    project.write("edited", "")
    launch.wait_until_over()
    seen = json.loads((launch.run.outputs / "seen.json").read_text())
    assert seen == {"config": "lr: 1\n", "script": 1, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "2"}
