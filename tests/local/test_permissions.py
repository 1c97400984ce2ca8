"""The files of a run have the permissions that its user's umask leaves: who may read its folder may use its weights."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from harness.project import Project

from jobkit.supervisor.parents import WARM_PARENT


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_modes_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        project = Project(tmp_path)  # with its files: the run's copy gives nobody more rights than they do
        del project.env[WARM_PARENT]  # the ranks of all tests are forked by one process, with its umask
        project.submit(
            "--local", "params.steps=2", "resources.nodes=1", "resources.tasks_per_node=1", "checkpoint.every=1"
        )
    finally:
        os.umask(before)
    (run,) = project.runs
    wrong = {}
    found = [one for one in run.parent.rglob("*") if not one.is_symlink()]
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode != (0o777 if path.is_dir() else 0o666) & ~umask:
            wrong[str(path.relative_to(run.parent))] = oct(mode)
    assert wrong == {}
    kinds = {path.relative_to(run).parts[0] for path in found if run in path.parents}
    assert kinds >= {"final", "checkpoints", "tensorboard", "code", "logs", "events.jsonl", "config.yaml"}
