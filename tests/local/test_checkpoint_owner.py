"""A checkpoint is of one run: in another's directory it is refused, by a submission and by the ranks."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness.attempts import attempt
from harness.project import Project, names

from jobkit.checkpoint.store import MANIFEST, Manifest, Store
from jobkit.run.identity import Owner

ONE = ("--local", "resources.nodes=1", "resources.tasks_per_node=1")


def give_to(owner: Owner, checkpoint: Path) -> None:
    """As if another run had written a checkpoint, or an older jobkit."""
    file = checkpoint / MANIFEST
    manifest = dataclasses.replace(Manifest.from_json(json.loads(file.read_text())), owner=owner)
    file.write_text(json.dumps(manifest.to_json()))


def test_a_checkpoint_of_another_run_is_refused_and_one_of_an_older_jobkit_taken(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.submit(*ONE, "params.steps=3", "checkpoint.keep=1")
    (first,) = project.runs
    other = project.run_of(*ONE, "params.steps=4")
    shutil.copytree(first / "checkpoints", other / "checkpoints", symlinks=True)
    refused = project.submit(*ONE, "params.steps=4", expect=2)
    assert refused.stderr.splitlines() == [
        f"error: {other}/checkpoints/step_00000003 is a checkpoint of {first.name}, which computes something else than "
        f"{other.name}: take it away again; a run that starts from it: --from {first.name}@3"
    ]
    assert names(other) == []
    give_to(Owner(), other / "checkpoints" / "step_00000003")
    assert "finished at step 3" in project.submit(*ONE, "params.steps=4").stderr  # nobody knows whose it is


def count(ctx: Any, total: int) -> int:
    for _ in ctx.steps(total):
        pass
    return int(ctx.step)


def test_ranks_refuse_it_too(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, count, 2) == [2]
    (run,) = tmp_path.glob("run-*")
    (run / "events.jsonl").unlink()  # it said that the run is finished
    newest = run / "checkpoints" / "step_00000002"
    owner = Manifest.from_json(json.loads((newest / MANIFEST).read_text())).owner
    give_to(Owner("another-12345678", "12345678"), newest)
    with pytest.raises(
        AssertionError, match=f"{newest} is a checkpoint of another-12345678, which computes something "
    ):
        attempt(1, tmp_path, count, 2)
    give_to(Owner("renamed-87654321-2", owner.identity), newest)
    assert Store(run.joinpath("checkpoints")).foreign(owner) is None, "a name may change"
