"""Training runs on this machine, interrupted in all ways: equal to the uninterrupted run to the last bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness.training import points, result, training_project
from harness.training_task import SAMPLES

STEPS = {"steps": 200}
"""So many, and none of them waits in the last attempt: a run is not to end before a test has interrupted it."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """Results of uninterrupted runs, by task and ranks."""
    results = {}
    for task, ranks, params in (("train", 1, STEPS), ("train", 2, STEPS), ("train_epochs", 2, {"epochs": 12})):
        folder = tmp_path_factory.mktemp("straight")
        launch = training_project(folder, task=task, ranks=ranks).submit("--local", "--detach", **params)
        results[task, ranks] = result(launch)
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_and_stops_change_no_bit(tmp_path: Path, ranks: int, straight: Any) -> None:
    launch = training_project(tmp_path, ranks=ranks, every=7, memory=3).submit(
        "--local", "--detach", **STEPS, step_seconds=0.2, last_attempt=4
    )
    launch.wait_for_step(10).kill_rank(ranks - 1).wait_for_attempt(2)
    launch.wait_for_step(25).project.jobkit("preempt", str(launch.run.path), "-y")
    launch.wait_for_attempt(3).wait_for_step(40).kill_rank(0)
    assert result(launch) == straight["train", ranks]
    assert points(launch, "train/loss") == list(range(200))
    assert Counter(points(launch, "validation/loss")) == Counter(range(0, 201, 20))
    # A stop repeats nothing.
    assert launch.ends[2].first_step == launch.ends[1].last_step


def test_a_foreign_loader_goes_on_within_an_epoch(tmp_path: Path, straight: Any) -> None:
    launch = training_project(tmp_path, task="train_epochs", ranks=2, every=5).submit(
        "--local", "--detach", epochs=12, step_seconds=0.2, last_attempt=3
    )
    launch.wait_for_step(8).kill_rank(1).wait_for_attempt(2)
    launch.wait_for_step(20).kill_rank(0)
    assert result(launch) == straight["train_epochs", 2]
    assert points(launch, "train/loss") == list(range(144))


def test_an_epoch_goes_on_with_half_the_ranks_and_has_each_sample_once(tmp_path: Path) -> None:
    project = training_project(tmp_path, task="train_dealt", ranks=2)
    launch = project.submit("--local", "--detach", step_seconds=0.5, last_attempt=2)
    launch.wait_for_step(4)
    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    project.submit("--local", "--detach", "resources.tasks_per_node=1", step_seconds=0.5, last_attempt=2)
    result(launch)
    files = (launch.run.outputs / "samples").iterdir()
    samples = [int(line) for file in files for line in file.read_text().splitlines()]
    assert (launch.ends[0].last_step or 0) >= 4
    assert sorted(samples) == list(range(SAMPLES))


def test_the_next_attempt_begins_with_the_snapshot_in_memory(tmp_path: Path, straight: Any) -> None:
    launch = training_project(tmp_path, ranks=2, every=1000, memory=18).submit(
        "--local", "--detach", **STEPS, step_seconds=0.2, last_attempt=2
    )
    pages = [launch.page(rank) for rank in range(2)]
    # A thread completes a snapshot while the loop goes on, and some steps after it have to be there to be compared.
    launch.wait_until(lambda _: all(page.snapshot_step and page.read().step >= 22 for page in pages), "a snapshot")
    launch.kill_rank(1)
    assert result(launch) == straight["train", 2]
    assert (launch.ends[1].first_step or 0) >= 18
    assert launch.ends[1].compared is not None
    assert launch.ends[1].differs_at is None
