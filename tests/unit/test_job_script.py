"""The batch script, run by bash with stand-ins for the supervisor and for Slurm's commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from jobkit import start
from jobkit.run.config import Config, Resources
from jobkit.run.rundir import RunDir
from jobkit.submission.plan import LaunchPlan, make_plan
from jobkit.submission.sbatch import JOB_SCRIPT, script
from jobkit.supervisor.nodes import STEP_NUMBERS, SlurmNodes, skip_step_numbers

STAND_IN = """\
#!/bin/bash
# Notes how it is called, and does what the test says.
echo "${0##*/} $*" >>calls
case "${0##*/} $*" in
    *" slurm "*) [ ! -e begins ] || rm -f "$FAILED_STARTS"
                 [ ! -e signals ] || kill -TERM $PPID $$
                 exit "$(cat code)" ;;
    *" end "*) exit "$(cat end_code)" ;;
    "scontrol -o show job"*)
        if [ -s away ]; then
            sed -i 1d away
            echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
            exit 1
        fi
        cat job ;;
    "sinfo"*) cat nodes ;;
esac
"""
RUNNING = "JobId=9 JobState=RUNNING Partition=low ReqNodeList=(null) ExcNodeList=(null) NodeList=node1"


def plan(run: Path = Path("/runs/toy-12345678"), **entry: Any) -> LaunchPlan:
    config = Config(name="toy", task="m:f", resources=Resources(), clusters={"slurm": entry})
    return make_plan(run, config, "slurm")


class Node:
    """A node that a batch script is run on, in a folder of the test's."""

    def __init__(self, folder: Path, **entry: Any) -> None:
        self.folder = folder
        self.run = RunDir(folder / "my runs/toy-12345678")
        self.run.submitit.mkdir(parents=True)
        self.plan = plan(self.run.path, **entry)
        (folder / "bin").mkdir()
        for name in ("python", "scontrol", "sinfo", "sleep"):
            (folder / "bin" / name).write_text(STAND_IN)
            (folder / "bin" / name).chmod(0o755)
        self.say(code=0, end_code=0, job=RUNNING, nodes="\n".join(f"node{n}" for n in range(1, 9)), begins="")
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "FAILED_STARTS": str(self.run.failed_starts),
            "SLURM_JOB_ID": "9",
            "SLURMD_NODENAME": "node1",
            "SLURM_JOB_PARTITION": "low",
            "SLURM_JOB_NUM_NODES": "2",
        }

    def say(self, **answers: object) -> None:
        """What the stand-ins answer: `code` of the supervisor, `end_code` of its `end`, `job` of scontrol ..."""
        for name, value in answers.items():
            (self.folder / name).write_text(f"{value}\n")

    def start(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the batch script, as Slurm does."""
        (self.folder / "calls").write_text("")
        lines = script(self.plan).splitlines()
        text = "\n".join(f"jobkit_python={self.folder}/bin/python" if "jobkit_python=" in x else x for x in lines)
        return subprocess.run(
            ["bash", "-c", text],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    @property
    def calls(self) -> list[str]:
        """What was called, less the questions."""
        run, module = str(self.run.path), f"python -u {start.FILE} jobkit.supervisor.main "
        text = (self.folder / "calls").read_text().replace(run, "RUN").replace(module, "")
        return [line for line in text.splitlines() if not line.startswith(("sinfo", "sleep", "scontrol -o show"))]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_shell_part_passes_shellcheck(tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck")
    assert shellcheck is not None, "shellcheck is among the tests' requirements"
    whole = tmp_path / "script.sh"
    whole.write_text(script(plan(setup=["module load cuda"], teardown=["true"], srun_args="--mpi=none")))
    for file in (JOB_SCRIPT, whole):
        done = subprocess.run([shellcheck, file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


# The exit code that counts

CODES: list[tuple[str, int, int, int, Sequence[str]]] = [
    ("finished", 0, 0, 0, ["slurm RUN"]),
    ("to be continued by hand", 75, 0, 75, ["slurm RUN"]),
    ("failed", 76, 0, 1, ["slurm RUN"]),
    ("to be started again", 77, 0, 0, ["slurm RUN", "end RUN"]),
    ("to be started again, but that fails", 77, 75, 75, ["slurm RUN", "end RUN"]),
    ("killed", 137, 0, 0, ["slurm RUN", "end RUN"]),
    ("killed, and then it turns out to have failed", 137, 76, 1, ["slurm RUN", "end RUN"]),
    ("a bug", 1, 1, 1, ["slurm RUN", *["end RUN"] * 3, "scontrol requeue Incomplete 9"]),
    ("killed again and again", 137, 137, 1, ["slurm RUN", *["end RUN"] * 3, "scontrol requeue Incomplete 9"]),
]


@pytest.mark.parametrize(
    ("code", "end_code", "whole", "calls"), [row[1:] for row in CODES], ids=[row[0] for row in CODES]
)
def test_what_the_supervisor_could_not_decide_is_tried_again_and_at_last_left_to_a_requeue(
    node: Node, code: int, end_code: int, whole: int, calls: Sequence[str]
) -> None:
    node.say(code=code, end_code=end_code)
    assert node.start().returncode == whole
    assert node.calls == calls


@pytest.mark.parametrize(("restarts", "requeued"), [("49", True), ("50", False)])
def test_a_supervisor_that_always_fails_does_not_restart_its_job_for_ever(
    node: Node, restarts: str, requeued: bool
) -> None:
    node.say(code=1, end_code=1)
    assert node.start(SLURM_RESTART_COUNT=restarts).returncode == 1
    assert ("scontrol requeue Incomplete 9" in node.calls) == requeued


@pytest.mark.parametrize(
    ("job", "requeue"),
    [
        ("JobState=CANCELLED PreemptTime=None", None),
        ("JobState=COMPLETING PreemptTime=None", None),
        ("JobState=COMPLETING Time=1 PreemptTime=2026-03-05T06:27:02", "scontrol requeue 9"),
    ],
)
def test_a_job_that_its_owner_has_cancelled_is_not_requeued(node: Node, job: str, requeue: str | None) -> None:
    node.say(code=1, end_code=1, job=job)
    assert node.start().returncode == 1
    assert [call for call in node.calls if "requeue" in call] == ([requeue] if requeue else [])


@pytest.mark.parametrize("begins", [True, False])
def test_a_controller_that_is_away_is_waited_for_with_growing_pauses(node: Node, begins: bool) -> None:
    if not begins:
        (node.folder / "begins").unlink()
    node.say(code=1, end_code=1, away="\n".join("x" * 6))
    done = node.start()
    assert "scontrol requeue Incomplete 9" in node.calls
    assert "Unable to contact slurm controller" in done.stderr
    slept = [line.split()[1] for line in (node.folder / "calls").read_text().splitlines() if line.startswith("sleep")]
    assert slept[-6:] == ["2", "6", "18", "54", "60", "60"]


def test_a_job_that_slurm_does_not_know_is_not_waited_for(node: Node) -> None:
    node.say(code=1, end_code=1)
    (node.folder / "bin/scontrol").write_text(
        "#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2; exit 1\n"
    )
    assert node.start().returncode == 1
    assert "scontrol requeue Incomplete 9" not in node.calls


# The user's own lines


def test_setup_reaches_the_supervisor_and_teardown_comes_before_the_requeue(tmp_path: Path) -> None:
    node = Node(tmp_path, setup=["# a comment", "export GREETING=hello", "false || true"], teardown=["tidy=$GREETING"])
    node.plan = plan(node.run.path, setup=["export GREETING=hello"], teardown=['echo "$GREETING" >>calls', "false"])
    node.say(code=77)
    assert node.start().returncode == 0
    assert node.calls == ["slurm RUN", "hello", "end RUN"]


def test_what_setup_declares_is_the_scripts_and_the_environment_of_the_supervisor(tmp_path: Path) -> None:
    (tmp_path / "environment.sh").write_text('declare -x GREETING="hello"\n')  # as `export -p` writes it
    setup = ["source ./environment.sh", "declare -x NAME=world", "set -euo pipefail"]
    node = Node(tmp_path, setup=setup, teardown=['echo "$GREETING $NAME" >>calls'])
    stand_in = tmp_path / "bin/python"
    stand_in.write_text(STAND_IN.replace("echo ", 'echo "${GREETING-} ${NAME-}" >>seen; echo ', 1))
    assert node.start().returncode == 0
    assert node.calls == ["slurm RUN", "hello world"]
    assert (tmp_path / "seen").read_text() == "hello world\n"


@pytest.mark.parametrize(
    "setup", [["false", "touch after"], ["exit 3"], ["no_such_module"], ["if true", "touch after"]]
)
def test_setup_that_fails_starts_no_supervisor_and_the_job_goes_to_another_node(
    tmp_path: Path, setup: Sequence[str]
) -> None:
    node = Node(tmp_path, setup=list(setup))
    done = node.start()
    assert done.returncode == 1
    assert "node1 cannot begin an attempt" in done.stderr
    assert node.calls == ["scontrol requeue Incomplete 9", "scontrol update JobId=9 ExcNodeList=node1"]
    assert not (tmp_path / "after").exists()


def test_setup_that_works_leaves_the_shell_as_it_was(tmp_path: Path) -> None:
    node = Node(tmp_path, teardown=["false", "echo goes on >>calls"])
    assert node.start().returncode == 0
    assert node.calls == ["slurm RUN", "goes on"]


def test_teardown_leaves_the_requeue_the_time_after_the_limit(tmp_path: Path) -> None:
    """The script's first sleep lasts until that has begun; then the job's time is over, by the script's clock."""
    sleep = shutil.which("sleep")
    node = Node(tmp_path, teardown=["echo begins >>calls", f"{sleep} 1000", "echo ends >>calls"])
    over = datetime.now(timezone.utc) + timedelta(hours=1)
    node.say(code=77, job=f"{RUNNING} EndTime={over:%Y-%m-%dT%H:%M:%S} Deadline=N/A")
    waits = f"() {{ until grep -q begins calls; do {sleep} 0.01; done; SECONDS=$((SECONDS + 7200)); }}"
    done = node.start(**{"BASH_FUNC_sleep%%": waits})
    assert (done.returncode, node.calls) == (0, ["slurm RUN", "begins", "end RUN"])
    assert "teardown is cut off" in done.stderr


def test_teardown_of_a_run_that_is_over_is_not_cut_off(tmp_path: Path) -> None:
    node = Node(tmp_path, teardown=["echo tidy >>calls"])
    node.say(code=0, job=f"{RUNNING} EndTime=2026-03-05T06:32:00 Deadline=N/A")
    assert (node.start().returncode, node.calls) == (0, ["slurm RUN", "tidy"])


def test_a_trap_of_setup_is_run_at_the_end(tmp_path: Path) -> None:
    node = Node(tmp_path, setup=["trap 'echo cleaned >>calls' EXIT"], teardown=["echo tidy >>calls"])
    assert (node.start().returncode, node.calls) == (0, ["slurm RUN", "tidy", "cleaned"])
    (tmp_path / "begins").unlink()
    node.say(code=127)
    assert node.start().returncode == 1
    assert node.calls[0] == "slurm RUN" and node.calls[-1] == "cleaned"


def test_sruns_own_arguments_are_passed_on_as_they_are(tmp_path: Path) -> None:
    node = Node(tmp_path, srun_args=["--mpi=none", "--label=a b"])
    node.start()
    assert node.calls == ["slurm RUN --mpi=none --label=a b"]
    assert "jobkit_srun_args=(--mpi=none '--label=a b')" in script(node.plan)
    assert "jobkit_srun_args=(--mpi=none --label)" in script(plan(srun_args="--mpi=none --label"))


# Slurm's SIGTERM


def test_slurms_sigterm_ends_neither_the_script_nor_a_supervisor_that_is_still_importing(tmp_path: Path) -> None:
    node = Node(tmp_path, teardown=['sh -c "kill -TERM $$ \\$\\$; echo tidy >>calls"'])
    node.say(code=77, signals="")
    assert node.start().returncode == 0
    assert node.calls == ["slurm RUN", "tidy", "end RUN"]


# A node that cannot begin an attempt


def test_three_nodes_in_a_row_are_tried(node: Node) -> None:
    (node.folder / "begins").unlink()
    for number in (1, 2, 3):
        node.say(code=127, job=RUNNING.replace("ExcNodeList=(null)", "ExcNodeList=node[7-8]"))
        done = node.start(SLURMD_NODENAME=f"node{number}")
        assert done.returncode == 1
        assert f"node{number} cannot begin an attempt (exit code 127)" in done.stderr
        excluded = ["scontrol requeue Incomplete 9", f"scontrol update JobId=9 ExcNodeList=node[7-8],node{number}"]
        assert node.calls == ["slurm RUN", *(excluded if number < 3 else [])]


def test_an_attempt_that_begins_ends_the_row(node: Node) -> None:
    for begins in (False, True, False, False, True):
        node.say(code=0 if begins else 127, begins="")
        if not begins:
            (node.folder / "begins").unlink()
        assert node.start().returncode == (0 if begins else 1)
        assert node.run.failed_starts.exists() != begins
        assert ("scontrol requeue Incomplete 9" in node.calls) != begins


def test_no_node_is_excluded_where_few_would_be_left(node: Node) -> None:
    (node.folder / "begins").unlink()
    node.say(code=127, nodes="node1\nnode2\nnode2\nnode3\nnode4")
    node.start()
    assert node.calls == ["slurm RUN", "scontrol requeue Incomplete 9"]


def test_where_the_run_directory_is_away_setup_that_fails_is_tried_again_a_limited_number_of_times(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, setup=["false"])
    shutil.rmtree(node.run.path)
    for restarts, requeued in [("49", True), ("50", False)]:
        assert node.start(SLURM_RESTART_COUNT=restarts).returncode == 1
        assert ("scontrol requeue Incomplete 9" in node.calls) == requeued


# srun


def test_srun_starts_one_parent_a_node_and_what_else_the_user_says(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "toy-12345678")
    run.path.mkdir()
    run.write_config(Config(name="toy", task="m:f", resources=Resources(nodes=3, tasks_per_node=2, cpus_per_task=4)))
    command = SlurmNodes(run, "9", ["--mpi=none"]).command(["a", "b", "c"], run.logs(1))
    expected = {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--nodelist=a,b,c", "--cpus-per-task=8", "--mpi=none"}
    assert expected | {f"--output={run.logs(1)}/node_%N.out"} <= set(command)
    guard = command.index('trap "" TERM USR2; exec "$@"')
    assert command[guard - 2 : guard] == ["sh", "-c"]


@pytest.mark.parametrize("restarts", range(STEP_NUMBERS + 1))
def test_each_start_of_a_job_numbers_its_steps_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\necho $* >>{tmp_path}/steps\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    skip_step_numbers()
    steps = (tmp_path / "steps").read_text().splitlines() if (tmp_path / "steps").exists() else []
    assert steps == ["--overlap --nodes=1 --ntasks=1 true"] * (restarts % STEP_NUMBERS)
