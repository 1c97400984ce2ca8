"""A user without a home, as `docker run --user 12345` makes one: no passwd entry, and HOME nowhere or another's."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.runs import Project

import jobkit

USER = 40_000 + os.getpid() % 20_000
"""Of this worker alone: the folder of its locks is one for the whole machine."""

LOCKS = Path(f"/tmp/jobkit-{USER}")
"""The folder of that user's locks, where its home cannot have it."""


@pytest.fixture
def project(no_process_left: None) -> Iterator[Project]:
    """A project of that user's own, with a device that its runs have to share."""
    if os.geteuid() != 0:
        pytest.skip("only root can become a user that does not exist")
    with tempfile.TemporaryDirectory(prefix="jobkit-nobody-", dir="/tmp") as folder:
        project = Project(Path(folder, "project"))
        project.account = {"user": USER, "group": USER, "extra_groups": []}
        project.python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"  # ours may be in our home
        project.environment |= {
            "PYTHONPATH": os.pathsep.join([str(Path(jobkit.__file__).parents[1]), *site.getsitepackages()]),
            "CUDA_VISIBLE_DEVICES": "0",
        }
        for path in (Path(folder), project.folder, *project.folder.iterdir()):
            shutil.chown(path, USER, USER)
        probe = [project.python, "-c", "import jobkit, submitit, yaml"]
        if shutil.which(project.python) is None or subprocess.run(probe, **project._options()).returncode:
            pytest.skip("other users cannot read this Python or this checkout")
        yield project
        shutil.rmtree(LOCKS, ignore_errors=True)


@pytest.mark.parametrize("home", [None, "/", "/root"])
def test_a_user_without_a_home_trains(project: Project, home: str | None) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        project.environment.pop(name, None)
    if home is not None:
        project.environment["HOME"] = home
    done = project.jobkit("submit", str(project.yaml), "--local", "device=cuda", "resources.gpus_per_task=1")
    assert "finished" in done.stdout + done.stderr
    assert "finished" in project.jobkit("list").stdout
    assert "Traceback" not in project.jobkit("doctor", check=False).stderr
    assert (LOCKS.stat().st_uid, LOCKS.stat().st_mode & 0o777) == (USER, 0o700)
    assert list(LOCKS.rglob("*.lock"))


def test_a_folder_of_locks_that_another_user_made_is_refused(project: Project) -> None:
    project.environment.pop("HOME", None)
    LOCKS.mkdir()
    done = project.jobkit("submit", str(project.yaml), "--local", check=False)
    assert (done.returncode, list(project.folder.glob("runs/*-*"))) == (2, [])
    assert done.stderr == f"error: {LOCKS}: it belongs to root; set XDG_STATE_HOME to a folder of your own\n"
