"""job.sh, run by bash: the user's lines, a supervisor that dies, nodes on which none can begin, blind requeues."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from harness.runs import PATIENCE
from harness.small_disk import SmallDisk

from jobkit.submission.sbatch import JOB_SCRIPT

SUPERVISOR = """\
#!/bin/sh
# A supervisor that ends with the next of the exit codes in `codes`; `begin` before a code begins an attempt.
echo "$@ JOB=$JOBKIT_JOB_ID X=$X${JOBKIT_SETUP_FAILED:+ SETUP=$JOBKIT_SETUP_FAILED}" >>"$HERE/supervisors"
read -r word code <<EOF
$(head -n 1 "$HERE/codes")
EOF
sed -i 1d "$HERE/codes"
[ "$word" != begin ] || rm -f "$5/submitit/failed_starts"
exit "${code:-$word}"
"""

SCONTROL = """\
#!/bin/sh
echo "$(basename "$0") $*" >>"$HERE/slurm"
case "$*" in
    *"show job"*)
        echo "JobId=7 JobState=${STATE:-RUNNING} ExcNodeList=node9 X=1" ;;
    *requeue*) exit "${REQUEUE:-0}" ;;
    *-o*) printf 'node%s\\n' 1 2 3 4 5 6 7 8 ;;
esac
"""


@dataclass
class Job:
    """What a job script did."""

    code: int
    supervisors: list[str]
    slurm: list[str]
    output: str
    run: Path = field(repr=False)


@pytest.fixture
def job(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A function that runs job.sh with stubs for the supervisor and for Slurm."""
    run, bin_folder = tmp_path / "runs" / "toy", tmp_path / "bin"
    (run / "submitit").mkdir(parents=True)
    bin_folder.mkdir()
    for name, text in (("python", SUPERVISOR), ("scontrol", SCONTROL), ("sinfo", SCONTROL), ("sleep", "#!/bin/sh\n")):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)

    def start(
        *codes: str,
        setup: list[str] | None = None,
        teardown: list[str] | None = None,
        scheduler: str = "slurm",
        **variables: str,
    ) -> Job:
        (tmp_path / "codes").write_text("\n".join(codes) + "\n")
        lists = {"runs": [str(run)], "setup": setup or [], "teardown": teardown or [], "srun_args": ["--mpi=none"]}
        definitions = [
            f"jobkit_scheduler={scheduler}",
            f"jobkit_python={bin_folder / 'python'}",
            "jobkit_start=start.py",
            *(f"jobkit_{name}=({shlex.join(words)})" for name, words in lists.items()),
        ]
        script = tmp_path / "job.sh"
        script.write_text("\n".join(["#!/bin/bash", *definitions, JOB_SCRIPT.read_text()]))
        environment = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "HERE": str(tmp_path),
            **({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1"} if scheduler == "slurm" else {}),
            **{"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_PARTITION": "low"},
            **variables,
        }
        words = ["bash", str(script)]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)

        def lines(name: str) -> list[str]:
            return (tmp_path / name).read_text().splitlines() if (tmp_path / name).exists() else []

        return Job(done.returncode, lines("supervisors"), lines("slurm"), done.stdout + done.stderr, run)

    return start


@pytest.mark.parametrize(
    ("codes", "code", "starts"),
    [
        (["begin 0"], 0, 1),
        (["begin 75"], 75, 1),
        (["begin 3"], 1, 1),  # the run has failed
        (["begin 137", "75"], 75, 2),  # killed: started again
        (["begin 1", "1", "1", "begin 137", "1", "0"], 0, 6),  # never three in a row that begin nothing
    ],
)
def test_exit_codes(job, codes: list[str], code: int, starts: int) -> None:  # type: ignore[no-untyped-def]
    done = job(*codes)
    assert (done.code, len(done.supervisors), done.slurm) == (code, starts, [])
    assert done.supervisors[0].startswith(f"-u start.py jobkit.supervisor.main slurm {done.run} --mpi=none JOB=7")


def test_an_array_task_has_a_name_of_its_own(job) -> None:  # type: ignore[no-untyped-def]
    done = job("begin 0", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="0")
    assert "JOB=7_0" in done.supervisors[0]


def test_setup_lines_run_as_in_the_users_shell(job, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rc = tmp_path / "rc.sh"
    rc.write_text("false\nexport X=from-rc\n[ -f nowhere ] && source nowhere\n")
    done = job(
        "begin 0", setup=[f"source {rc}", "set -eu", 'export X="$X, then Y"; true'], teardown=["echo bye; exit 5"]
    )
    assert done.code == 0
    assert done.supervisors[0].endswith("X=from-rc, then Y")
    assert "bye" in done.output


@pytest.mark.parametrize("line", ["source FILE ", ". FILE;", "source 'FILE' >/dev/null 2>&1", '  source "FILE" &>log'])
def test_the_status_of_a_sourced_file_is_that_of_its_last_command(job, tmp_path: Path, line: str) -> None:  # type: ignore[no-untyped-def]
    rc = tmp_path / ("r c.sh" if "'" in line or '"' in line else "rc.sh")
    rc.write_text("export X=here\n[ -f nowhere ] && source nowhere\n")
    assert job("begin 0", setup=[line.replace("FILE", str(rc))]).supervisors[0].endswith("X=here")


FAILING = [
    *("module load nowhere", "false", ": ${DATA:?}", "exit 4", "source nowhere/rc.sh"),
    "source bad.sh",  # no Bash
    "source activate nowhere",  # as conda's: the last command says whether there is such an environment
]


@pytest.mark.parametrize("line", FAILING)
def test_a_setup_line_that_fails_is_told_to_the_supervisor_and_else_starts_the_job_elsewhere(  # type: ignore[no-untyped-def]
    job, tmp_path: Path, line: str
) -> None:
    (tmp_path / "bad.sh").write_text("if true; then\n")
    (tmp_path / "activate").write_text("false\n")
    line = line.replace("bad.sh", f"{tmp_path}/bad.sh").replace("activate", f"{tmp_path}/activate")
    lines = ["true", line, "echo not reached"]
    told = job("begin 3", setup=lines, teardown=["echo not reached"])
    assert (told.code, len(told.supervisors), told.slurm) == (1, 1, [])
    assert re.search(rf" SETUP=0 0 \d+ {re.escape(line)}$", told.supervisors[0])
    done = job("1", "1", "1", setup=lines)  # Python itself may be what the line does not find
    assert (done.code, len(done.supervisors)) == (1, 4)
    assert f"setup: {line}" in done.output
    assert "not reached" not in told.output + done.output
    assert [command for command in done.slurm if "show job" not in command and "sinfo" not in command] == [
        "scontrol requeue Incomplete 7",
        "scontrol update JobId=7 ExcNodeList=node9,node1",
    ]


def test_three_starts_of_the_job_that_begin_nothing_end_it_even_on_one_node(job) -> None:  # type: ignore[no-untyped-def]
    ways = [job("1", "1", "1", SLURM_RESTART_COUNT=str(count)).slurm for count in range(3)]
    assert ["scontrol requeue Incomplete 7" in commands for commands in (ways[0], ways[1][len(ways[0]) :])] == [
        True,
        True,
    ]
    assert ways[2] == ways[1]


def test_three_supervisors_without_a_beginning_leave_the_node(job, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = job("begin 137", "1", "1", "1")
    assert (done.code, len(done.supervisors)) == (1, 4)
    assert "scontrol requeue Incomplete 7" in done.slurm
    (done.run / "submitit" / "failed_starts").write_text("node7\nnode8\n")  # as on two nodes before
    (done.run / "notify").write_text('echo "$JOBKIT_STATE: $JOBKIT_TEXT" >told')
    again = job("1", "1", "1")
    assert (tmp_path / "told").read_text() == "lost: toy: lost: node1 can begin no attempt (exit code 1)\n"
    assert (again.code, again.slurm) == (1, done.slurm)  # it is not the node: Slurm was asked for nothing more


@pytest.mark.parametrize(
    ("variables", "commands"),
    [
        ({"STATE": "COMPLETING"}, []),  # its owner cancelled it
        ({"STATE": "PENDING"}, []),  # Slurm has requeued it
        ({"REQUEUE": "1"}, ["scontrol requeue Incomplete 7"]),
    ],
)
def test_a_blind_requeue_goes_by_the_state(job, variables: dict[str, str], commands: list[str]) -> None:  # type: ignore[no-untyped-def]
    done = job("1", "1", "1", **variables)
    assert done.code == 1
    assert [command for command in done.slurm if "requeue" in command] == commands


def test_here_no_scheduler_is_asked(job) -> None:  # type: ignore[no-untyped-def]
    done = job("1", "1", "1", scheduler="local")
    assert (done.code, done.slurm) == (1, [])
    assert "JOB=local-" in done.supervisors[0]


def test_a_disk_that_takes_nothing_is_no_nodes_fault(job, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    said = job("begin 4")
    assert (said.code, len(said.supervisors), said.slurm) == (75, 1, [])
    with SmallDisk(tmp_path / "runs/toy/submitit") as disk:
        disk.make_read_only()
        done = job("1", "1", "1", SLURM_RESTART_COUNT="9")
    assert (done.code, len(done.supervisors), done.slurm) == (75, 4, [])
    assert "node1 can begin no attempt" in done.output


def test_a_run_directory_that_is_not_there_is_the_nodes_fault(job, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "runs/toy/submitit").rmdir()
    done = job("1", "1", "1")
    assert (done.code, len(done.supervisors)) == (1, 3)
    assert "scontrol requeue Incomplete 7" in done.slurm
    assert job("1", "1", "1", SLURM_RESTART_COUNT="3").slurm == done.slurm, "several starts: it is not the node"
