"""Slurm's commands: their environment, their errors, the id of a new job. The programs are small scripts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.runs import wait_until

from jobkit.errors import SchedulerError, SchedulerTimeout
from jobkit.slurm import commands

Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A function that puts a shell script on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return write


def test_variables_of_the_submitting_shell_change_no_command(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_JOB_NAME", "SLURM_MEM_PER_CPU", "SQUEUE_FORMAT", "SRUN_DEBUG", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    monkeypatch.setenv("TZ", "America/New_York")
    for name in ("scontrol", "sbatch"):
        program(name, "env")
    seen = {
        name: dict(line.split("=", 1) for line in commands.run(name).splitlines()) for name in ("scontrol", "sbatch")
    }
    for environment in seen.values():
        assert "theirs" not in environment.values()
        assert environment["SLURM_CONF"] == "/etc/other.conf"
    assert (seen["scontrol"]["TZ"], seen["scontrol"]["SLURM_TIME_FORMAT"]) == ("UTC", "standard")
    assert seen["sbatch"]["TZ"] == "America/New_York"  # the job inherits it


def test_a_command_inherits_the_files_that_the_caller_names(program: Program, tmp_path: Path) -> None:
    program("sbatch", "echo 7; echo locked >/proc/self/fd/$FD")
    with (tmp_path / "lock").open("w") as lock:
        environment = {**os.environ, "FD": str(lock.fileno())}
        assert commands.submit("job.sh", environment=environment, pass_fds=[lock.fileno()]) == "7"
    assert (tmp_path / "lock").read_text() == "locked\n"


# Complaint of Slurm 22.05, (error class, is_away)
REFUSED, AWAY, UNKNOWN = (SchedulerError, False), (SchedulerError, True), (SchedulerTimeout, True)
COMPLAINTS = [
    ("sbatch: error: Batch job submission failed: Invalid partition name specified", REFUSED),
    ("Requested operation is presently disabled for job 5", REFUSED),
    ("squeue: fatal: Unable to process configuration file", REFUSED),
    ("", REFUSED),
    ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", AWAY),
    ("scontrol: error: Slurm backup controller in standby mode", AWAY),
    ("slurm_load_jobs error: Socket timed out on send/recv operation", UNKNOWN),
    ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", UNKNOWN),
]


@pytest.mark.parametrize(("complaint", "expected"), COMPLAINTS)
def test_an_error_tells_a_refusal_from_a_controller_that_is_away(
    program: Program, complaint: str, expected: tuple[type[SchedulerError], bool]
) -> None:
    program("scontrol", f"echo '{complaint}' >&2; exit 1")
    with pytest.raises(SchedulerError) as raised:
        commands.run("scontrol", "requeue", "5")
    assert (raised.type, commands.is_away(raised.value)) == expected
    assert "\n" not in str(raised.value)


def test_a_command_without_an_answer_may_have_done_it(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, said = "sbatch: error: temporarily unable to accept job, sleeping and retrying", tmp_path / "said"
    program("sbatch", f"echo '{words}' >&2; touch {said}; exec sleep 60")
    program("scontrol", "kill -KILL $$")
    communicate = subprocess.Popen.communicate

    def communicate_later(*arguments: Any, **options: Any) -> Any:  # a shell may take longer than 0.5 s to start
        wait_until(said.exists, "the words")
        return communicate(*arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_later)
    for command in (["sbatch"], ["scontrol"]):
        with pytest.raises(SchedulerTimeout) as raised:
            commands.run(*command, timeout=0.5)
        if command == ["sbatch"]:  # the words of a full queue come before the time is over
            assert "MaxJobCount" in str(raised.value)


def test_a_missing_program_is_named() -> None:
    with pytest.raises(SchedulerError, match="no-such-program is not on PATH") as raised:
        commands.run("no-such-program")
    assert not commands.is_away(raised.value)


@pytest.mark.parametrize(
    ("answer", "job_id"),
    [
        ("123", "123"),
        ("123;cluster", "123"),
        ("Welcome to the cluster\n123;cluster\nYour project has 40 hours left", "123"),
        ("40\n123", None),
        ("Have a nice day", None),
    ],
)
def test_without_one_id_in_the_answer_the_job_may_be_queued(program: Program, answer: str, job_id: str | None) -> None:
    program("sbatch", f"echo '{answer}'")
    if job_id is not None:
        assert commands.submit("job.sh") == job_id
        return
    with pytest.raises(SchedulerTimeout, match=answer.split()[-1]):
        commands.submit("job.sh")


def test_two_clusters_of_one_name_differ(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for port in ("6817", "32717"):
        monkeypatch.setenv("SLURM_CONF", f"/tmp/conf-of-test-{port}")
        rows = [
            "Configuration data as of 2026-11-26",
            "ClusterName             = linux",
            "KillWait                = 3 sec",
        ]
        rows += ["SlurmctldHost[0]        = vm(127.0.0.1)", f"SlurmctldPort           = {port}"]
        program("scontrol", "cat <<'END'\n" + "\n".join(rows) + "\nEND")
        assert commands.config()["KillWait"] == "3 sec"
        names.append(commands.cluster_name())
    assert names == ["linux@vm:6817", "linux@vm:32717"]


@pytest.mark.parametrize(
    ("here", "cluster", "same"),
    [
        ("lab old 6817", "lab@old:6817", True),
        ("lab new 6817", "lab@old:6817", True),  # slurmctld has moved
        ("lab new 6818", "lab@old:6817", False),
        ("den old 6817", "lab@old:6817", False),
        ("cluster old 6817", "cluster@old:6817", True),
        ("cluster new,old 6817", "cluster@old:6817", True),  # its backup is the first now
        ("cluster new 6817", "cluster@old:6817", False),  # another lab's may be called so too
        ("linux old 6818", "linux@old:6817", False),
    ],
)
def test_a_controller_on_another_host_is_the_same_cluster(
    program: Program, monkeypatch: pytest.MonkeyPatch, here: str, cluster: str, same: bool
) -> None:
    monkeypatch.setenv("SLURM_CONF", f"/tmp/conf-of-{here}")
    name, hosts, port = here.split()
    rows = [f"ClusterName = {name}", f"SlurmctldPort = {port}"]
    rows += [f"SlurmctldHost[{number}] = {host}(10.0.0.1)" for number, host in enumerate(hosts.split(","))]
    program("scontrol", "cat <<'END'\n" + "\n".join(rows) + "\nEND")
    assert commands.is_here(cluster) is same
