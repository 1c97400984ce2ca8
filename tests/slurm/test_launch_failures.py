"""What keeps an attempt from beginning under a real Slurm: a node, a controller, a disk, or what the user asked for."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.project import Project, causes, describe, is_over, names, queue, status, wait_for
from slurm_cluster import Cluster, ClusterError

ALONE = ("--cluster", "slurm", "resources.nodes=1", "resources.tasks_per_node=1")

FAIL_ON = """\
import os



def before_loop(ctx):
    if os.environ["SLURMD_NODENAME"] in {nodes}:
        raise RuntimeError("no driver")


def at_step(ctx, step):
    pass
"""


@pytest.fixture
def project(tmp_path: Path, slurm: Cluster) -> Project:
    return Project(tmp_path, slurm.env)


def end_of(project: Project) -> Path:
    (run,) = project.runs
    wait_for("the end", lambda: is_over(run), run)
    return run


# The only node


def test_what_one_node_cannot_begin_is_begun_on_another(project: Project) -> None:
    (project.path / "orders.py").write_text(FAIL_ON.format(nodes=["node1"]))
    project.submit(*ALONE)
    run = end_of(project)
    assert causes(run) == ["crashed", "finished"], describe(run)
    assert [attempt["nodes"] for attempt in status(run)["attempts"]] == [["node1"], ["node2"]]
    assert "excluded nodes: node1" in project.jobkit("status", run.name).stdout


def test_what_two_nodes_cannot_begin_has_failed(project: Project) -> None:
    (project.path / "orders.py").write_text(FAIL_ON.format(nodes=["node1", "node2", "node3", "node4"]))
    project.submit(*ALONE)
    run = end_of(project)
    assert status(run)["state"] == "failed" and "no driver" in status(run)["error"]
    assert [attempt["nodes"] for attempt in status(run)["attempts"]] == [["node1"], ["node2"]], describe(run)


def test_a_node_that_the_user_excludes_replaces_none(project: Project) -> None:
    (project.path / "orders.py").write_text(FAIL_ON.format(nodes=["node1"]))
    project.submit(*ALONE, "clusters.slurm.exclude='node[2-4]'")
    run = end_of(project)
    assert (status(run)["state"], causes(run)) == ("failed", ["crashed"]), describe(run)


# What the user asked for


def test_why_srun_could_not_start_is_what_status_shows(project: Project) -> None:
    project.submit(*ALONE, "clusters.slurm.srun_args=[--no-such-option]", "retry.crash=1")
    run = end_of(project)
    assert causes(run) == ["crashed"], describe(run)
    assert "unrecognized option '--no-such-option'" in project.jobkit("status", run.name).stdout


# The disk


class ReadOnly:
    """A read-only file system over a folder, but for one folder in it that goes on as it is."""

    libc = ctypes.CDLL(None, use_errno=True)
    READ_ONLY, REMOUNT, BIND = 1, 32, 4096

    def __init__(self, folder: Path, but: Path, copy: Path) -> None:
        self.mounted: list[Path] = []
        shutil.copytree(but, copy)
        self.mount(b"none", folder, b"tmpfs", 0)
        but.mkdir()
        self.mount(bytes(copy), but, None, self.BIND)
        self.mount(b"none", folder, b"tmpfs", self.REMOUNT | self.READ_ONLY)

    def mount(self, source: bytes, target: Path, kind: bytes | None, flags: int) -> None:
        if self.libc.mount(source, bytes(target), kind, flags, None) != 0:
            self.remove()
            pytest.skip("mounting a small file system needs root")
        self.mounted.append(target)

    def remove(self) -> None:
        for target in reversed(self.mounted):
            self.libc.umount2(bytes(target), 2)


@pytest.fixture
def drained(slurm: Cluster) -> Iterator[Cluster]:
    """Nodes that take no job until they are resumed."""
    slurm.command("scontrol", "update", "NodeName=ALL", "State=DRAIN", "Reason=test")
    yield slurm
    with contextlib.suppress(ClusterError):  # they are
        slurm.command("scontrol", "update", "NodeName=ALL", "State=RESUME")


def test_a_disk_that_refuses_writes_is_tried_three_times_and_then_the_job_ends(
    project: Project, drained: Cluster, tmp_path: Path
) -> None:
    project.submit(*ALONE)
    (run,) = project.runs
    job = status(run)["job_id"]
    disk = ReadOnly(run / "logs", but=run / "logs/submitit", copy=tmp_path / "copy")
    try:
        drained.command("scontrol", "update", "NodeName=ALL", "State=RESUME")
        wait_for("the end of the job", lambda: not queue(drained, project), run, seconds=120)
        assert drained.job(job)["Restarts"] == "0"
        said = Path(drained.job(job)["StdErr"]).read_text()
        assert said.count("Read-only file system") >= 3, said
        assert "make room, or mend the permissions, and type: " in said and "jobkit" in said
        assert "started" not in names(run)
        assert "Read-only file system" in project.jobkit("status", run.name, expect=None).stdout
    finally:
        disk.remove()
    project.submit(*ALONE)
    assert causes(end_of(project)) == ["finished"], describe(run)


def test_a_setup_line_that_fails_is_what_status_and_submit_show(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    setup = "clusters.slurm.setup=[load_no_module cuda]"
    said = project.submit("--cluster", "slurm", "resources.nodes=1", setup, "--follow", expect=75).stderr
    (run,) = project.runs
    told = project.jobkit("status", run.name).stdout
    for text in (said, told):
        assert "could not begin" in text and "load_no_module: command not found" in text
    assert "probably crashed" in told and str(run / "logs") in told
