"""Fixtures for all tests: a project with the scripted rank, here and on a private Slurm."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.runs import YAML, Launch, Project, describe, describe_slurm
from slurmbox import Cluster

from jobkit.log import log
from jobkit.run.rundir import RunDir

pytest_plugins = ["slurmbox.pytest_plugin"]

CLUSTERS = pytest.StashKey[list[Cluster]]()
"""The clusters of a test's projects."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the journals and logs of a failed test's runs: elsewhere nobody can look for them afterwards."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "call" and report.failed and folder is not None:
        for journal in sorted(folder.rglob("events.jsonl")):
            report.sections.append((f"run {journal.parent.name}", describe(journal.parent)))
        for cluster in item.stash.get(CLUSTERS, []):
            report.sections.append((f"Slurm {cluster.settings.name}", "\n".join(describe_slurm(cluster.env))))
    return report


def pytest_configure() -> None:
    """Take both signals as a terminal gives them: nohup, and a shell that runs the tests behind it, ignore them.

    Output is buffered, as in a user's shell.
    """
    os.environ.pop("PYTHONUNBUFFERED", None)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """caplog of jobkit's log, each line once.

    caplog joins the root logger, and before a test those that do not propagate: a logger that begins to do so within
    the test gives each line twice, and one that another test has configured does not propagate.
    """
    log.propagate = True
    return caplog


@pytest.fixture(scope="session")
def slurm_settings() -> dict[str, Any]:
    """Of the cluster that all share: a requeued job waits 5 seconds there, and 120 by default."""
    return {"cred_expire": 5}


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a folder once for all xdist workers: `once("name", make)` returns it, after `make(folder)`."""
    ours = tmp_path_factory.getbasetemp()
    shared = ours.parent if hasattr(request.config, "workerinput") else ours

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        with (shared / f"{name}.made").open("a+") as made:
            fcntl.flock(made, fcntl.LOCK_EX)
            made.seek(0)
            outcome = made.read()
            assert outcome != "failed", f"{name} failed on another worker: the cause is there"
            if not outcome:
                (shared / name).mkdir()
                try:
                    make(shared / name)
                except BaseException:
                    made.write("failed")
                    print(*map(describe, (file.parent for file in (shared / name).rglob("events.jsonl"))))
                    raise
                finally:
                    end_processes(shared / name)
                made.write("made")
        return shared / name

    return folder_of


@pytest.fixture(scope="session")
def seen_once(once: Callable[..., Path]) -> Callable[..., tuple[Launch, Any]]:
    """Let a run happen once, for the tests of all xdist workers: `launch, seen = seen_once("name", act)`.

    `act(project)` returns the run and what it saw, as JSON has it. With settings of a cluster: `act(project, cluster)`.
    """

    from slurmbox.pytest_plugin import skip_without_slurm  # here: pytest rewrites its assertions first

    def of(name: str, act: Callable[..., tuple[Launch, Any]], yaml: str = YAML, **settings: Any) -> tuple[Launch, Any]:
        def make(folder: Path) -> None:
            with contextlib.ExitStack() as stack:
                clusters = []
                if settings:
                    stack.enter_context(skip_without_slurm())
                    clusters = [
                        stack.enter_context(Cluster(tempfile.mkdtemp(prefix="slurmbox-", dir="/tmp"), **settings))
                    ]
                environment = clusters[0].env if clusters else None
                launch, seen = act(Project(folder / "project", environment, yaml), *clusters)
                (folder / "seen.json").write_text(json.dumps([str(launch.run.path), seen]))

        folder = once(name, make)
        path, seen = json.loads((folder / "seen.json").read_text())
        return Launch(Project(folder / "reader"), RunDir(path)), seen

    return of


@pytest.fixture
def no_process_left(tmp_path: Path) -> Iterator[None]:
    """Kill what a test has left: a run outlives the test that fails in the middle of it."""
    yield
    end_processes(tmp_path)


def end_processes(folder: Path) -> None:
    """Kill all that works in a folder."""
    while processes := [pid for pid in pids() if works_in(pid, folder)]:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)


def pids() -> list[int]:
    return [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) != os.getpid()
    ]


def works_in(pid: int, folder: Path) -> bool:
    """Return whether a process was started in a folder, or for a file in it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        # Not within `stopped-here` for `stopped`: another worker runs its tests there.
        is_named = re.search(re.escape(bytes(folder)) + rb"(?![\w.-])", words) is not None
        return is_named or Path(f"/proc/{pid}/cwd").readlink().is_relative_to(folder)
    except OSError:
        return False


@pytest.fixture
def project(tmp_path: Path, no_process_left: None) -> Project:
    """A project folder on this machine."""
    return Project(tmp_path / "project")


@pytest.fixture
def on_slurm(request: pytest.FixtureRequest, tmp_path: Path, no_process_left: None) -> Iterator[Callable[..., Project]]:
    """A function that makes a project whose commands talk to a cluster: `on_slurm(cluster, yaml)`."""
    clusters = request.node.stash.setdefault(CLUSTERS, [])

    def make(cluster: Cluster, yaml: str = YAML, folder: str = "project", *, plain: bool = True) -> Project:
        clusters.append(cluster)
        return Project(tmp_path / folder, cluster.env, yaml, plain=plain)

    yield make
    for cluster in clusters:
        if cluster.is_up:  # the shared cluster: jobs of a test that failed; runs of another test may have their names
            lines = cluster.command("squeue", "--noheader", "--format=%F %Z").splitlines()
            jobs = [line.partition(" ") for line in lines]
            ours = {job for job, _, folder in jobs if Path(folder).is_relative_to(tmp_path)}
            if ours:
                cluster.command("scancel", *ours)
