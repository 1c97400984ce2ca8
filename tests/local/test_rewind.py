"""`jobkit rewind`: back to a checkpoint of a run, with what came after it kept, and without some samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import Project, events, status

STEPS = ("--local", "resources.nodes=1", "resources.tasks_per_node=1", "params.steps=6", "checkpoint.every=2")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One with a finished run of six steps, and a checkpoint after each two."""
    made = Project(tmp_path_factory.mktemp("project"))
    made.submit(*STEPS, "checkpoint.keep=9")
    return made


def ids_of(run: Path, attempt: int) -> dict[int, list[int]]:
    """Step -> ids of the samples that an attempt trained on, on all ranks."""
    found: dict[int, list[int]] = {}
    for file in sorted(run.glob("steps_*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            if line["attempt"] == attempt:
                found[line["step"]] = [*found.get(line["step"], []), *line["ids"]]
    return found


def test_a_finished_run_goes_back_and_trains_on_without_some_samples(project: Project) -> None:
    (run,) = project.runs
    first = ids_of(run, 1)
    bad = first[2][:2]
    said = jobkit(project, "rewind", "toy", "--step", "2", "--skip-samples", ",".join(map(str, bad))).stdout
    branch = run / "checkpoints" / "branches" / "1"
    assert said.splitlines()[0] == f"{run.name}: back at step 2; what came after it is kept in {branch}"
    kept = {"final", "tensorboard", *(f"step_{step:08d}" for step in (4, 5, 6))}
    assert {file.name for file in branch.iterdir()} == kept
    assert (status(run)["state"], status(run)["step"], status(run)["result"]) == ("interrupted", 2, None)
    project.jobkit("resume", "toy")
    assert status(run)["state"] == "finished" and [e["step"] for e in events(run) if e["event"] == "resumed"] == [0, 2]
    again = ids_of(run, 2)
    used = {one for ids in again.values() for one in ids}
    assert not used & set(bad), "they are left out"
    assert sum(a != b for step in again for a, b in zip(again[step], first[step], strict=True)) == 2, "and nothing else"

    # On two ranks the same samples; a new list takes the place of the old one.
    jobkit(project, "rewind", "toy", "--step", "4")
    project.submit(*STEPS, "checkpoint.keep=9", "resources.tasks_per_node=2")
    assert ids_of(run, 3) == {step: again[step] for step in (4, 5)}
    (project.path / "ids").write_text("")
    jobkit(project, "rewind", "toy", "--step", "2", "--skip-samples", f"@{project.path / 'ids'}")
    assert "leaves out" not in jobkit(project, "status", "toy").stdout
    project.jobkit("resume", "toy")
    assert ids_of(run, 4) == {step: first[step] for step in (2, 3, 4, 5)}
    assert _logged_steps(run) == [0, 1, 2, 3, 4, 5], "each step once"
    assert _logged_steps(branch) == [0, 1, 2, 3, 4, 5], "and in the branch as it was"


def test_what_a_killed_save_has_left_does_not_come_back(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.submit(*STEPS, "checkpoint.keep=9")
    (run,) = project.runs
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step_00000006", checkpoints / ".replaced_step_00000006")
    jobkit(project, "rewind", "toy", "--step", "2")
    project.jobkit("resume", "toy")
    assert [e["step"] for e in events(run) if e["event"] == "resumed"] == [0, 2]

    branch = checkpoints / "branches" / "2"  # of a rewind that was killed before it could say so
    branch.mkdir()
    for moved in (run / "final", *(checkpoints / f"step_{step:08d}" for step in (6, 5, 4))):
        moved.rename(branch / moved.name)
    jobkit(project, "rewind", "toy", "--step", "2")
    assert [e["moved"] for e in events(run) if e["event"] == "rewound"] == [[6, 5, 4], [6, 5, 4]]
    assert status(run)["state"] == "interrupted"


def _logged_steps(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [point.step for point in points.Scalars("train/loss")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--step", "3"), "has no checkpoint of step 3 (it has: "),
        (("--step", "6"), "step 6 is its newest checkpoint: there is nothing to go back from"),
        (("--step", "2", "--skip-samples", "3,x"), "found 'x', expected ids"),
        (("--step", "2", "--skip-samples", "@gone"), "--skip-samples @gone: No such file or directory"),
        (("--step", "x"), "invalid int value: 'x'"),
    ],
)
def test_what_cannot_be_gone_back_to_is_told_and_nothing_is_moved(
    project: Project, words: tuple[str, ...], said: str
) -> None:
    (run,) = project.runs
    before = sorted(run.rglob("*"))
    assert said in jobkit(project, "rewind", "toy", *words, expect=2).stderr
    assert sorted(run.rglob("*")) == before


def test_a_run_that_is_under_way_is_left_alone(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.slow_down(1)
    project.submit(*STEPS, "--detach")
    (run,) = project.runs
    assert "cancel it first, then go back" in jobkit(project, "rewind", "toy", "--step", "2", expect=2).stderr
    project.jobkit("cancel", "toy", "--no-grace")
    assert not (run / "checkpoints" / "branches").exists()
