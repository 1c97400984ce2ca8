"""Ranks that die begin again from memory: the weights and curves are those of the run that nothing happened to."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.project import Project, begun, describe, events, logged_steps, status, weights
from harness.reference import STEPS
from harness.slots import Slots, new_slots

TWO_RANKS = ("resources.tasks_per_node=1",)

ORDERS = '''\
"""What the parent of ranks does: each gets its slots. Then they die as $DEATHS says: {attempt: [rank, step]}."""
import json
import os
import signal

from submitit.core.job_environment import JobEnvironment

PARENT, FILES = json.loads(os.environ["SLOTS"])
mine = [os.open(f"/proc/{PARENT}/fd/{file}", os.O_RDWR) for file in FILES[JobEnvironment().global_rank]]
os.environ["JOBKIT_MEMORY_SLOTS"] = ",".join(map(str, mine))


def at_step(ctx, step):
    ctx._checkpointer.wait()  # for the snapshot of the step before: so it is known where the next attempt begins
    ctx.barrier()
    if json.loads(os.environ["DEATHS"]).get(str(ctx.attempt)) == [ctx.rank, step]:
        os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.fixture
def slots() -> Iterator[Slots]:
    with new_slots(2) as made:
        yield made


def project_with(folder: Path, slots: Slots, deaths: dict[int, tuple[int, int]]) -> Project:
    project = Project(folder)
    (project.path / "orders.py").write_text(ORDERS)
    project.env |= {"SLOTS": json.dumps([slots.parent, slots.of_rank]), "DEATHS": json.dumps(deaths)}
    return project


def resumed(run: Path) -> list[tuple[int, bool, Any]]:
    """Where each attempt began: (step, whether from memory, newest step on the disk)."""
    return [
        (event["step"], event.get("memory", False), event.get("durable_step"))
        for event in events(run)
        if event["event"] == "resumed"
    ]


def first_steps(run: Path, rank: int) -> list[int]:
    """The steps that each attempt after the first repeated, one after the other."""
    steps = [one["step"] for one in begun(run, rank)]
    return sorted(step for step in set(steps) for _ in range(steps.count(step) - 1))


def test_a_run_whose_ranks_die_goes_on_from_memory_bit_for_bit(
    tmp_path: Path, slots: Slots, uninterrupted: Callable[[int], bytes]
) -> None:
    project = project_with(tmp_path, slots, {1: (1, 20), 2: (0, 21), 3: (0, 40)})
    project.submit("--local", *TWO_RANKS, "checkpoint.memory=1", "checkpoint.every=30")
    (run,) = project.runs
    assert resumed(run) == [(0, False, None), (20, True, None), (21, True, None), (40, True, 30)], describe(run)
    assert weights(run) == uninterrupted(2)
    assert logged_steps(run) == list(range(STEPS))
    assert first_steps(run, 0) == [20, 21, 40], "of each only the step that was under way"
    attempts = status(run)["attempts"]
    assert [attempt["from_memory"] for attempt in attempts] == [False, True, True, True]
    assert [attempt["durable_step"] for attempt in attempts[:3]] == [0, 0, 30]
    assert len([event for event in events(run) if event["event"] == "checkpoint"]) < 5, "the journal does not grow"


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_a_lost_node_costs_no_more_than_a_lost_rank(tmp_path: Path, slots: Slots, parallel: str) -> None:
    overrides = ("--local", *TWO_RANKS, f"parallel={parallel}", "params.steps=25")
    undisturbed = Project(tmp_path / "undisturbed")
    undisturbed.submit(*overrides)
    project = project_with(tmp_path / "disturbed", slots, {1: (1, 18)})
    new = "os.environ['JOBKIT_ATTEMPT'] == '2' and JobEnvironment().global_rank == 1"
    (project.path / "orders.py").write_text(f"{ORDERS}\n\nif {new}:\n    [os.ftruncate(file, 0) for file in mine]\n")
    project.submit(*overrides, "checkpoint.memory=1")
    (run,) = project.runs
    assert resumed(run) == [(0, False, None), (18, True, None)], describe(run)
    assert weights(run) == weights(undisturbed.runs[0])
    assert logged_steps(run) == list(range(25))


def test_no_more_than_an_interval_is_repeated(tmp_path: Path, slots: Slots) -> None:
    project = project_with(tmp_path, slots, {1: (1, 18)})
    project.submit("--local", *TWO_RANKS, "checkpoint.memory=5", "params.steps=25")
    assert resumed(project.runs[0]) == [(0, False, None), (15, True, None)]


def test_a_death_while_a_snapshot_may_be_under_way_leaves_the_run_exact(
    tmp_path: Path, slots: Slots, uninterrupted: Callable[[int], bytes]
) -> None:
    project = project_with(tmp_path, slots, {1: (1, 20), 2: (0, 33), 3: (1, 50)})
    hasty = ORDERS.replace("ctx._checkpointer.wait()", "pass")
    (project.path / "orders.py").write_text(hasty)
    project.submit("--local", *TWO_RANKS, "checkpoint.memory=1")
    (run,) = project.runs
    first, *others = resumed(run)
    assert first == (0, False, None)
    assert all(memory for _, memory, _ in others), describe(run)
    assert weights(run) == uninterrupted(2)
    assert logged_steps(run) == list(range(STEPS))


def test_memory_that_is_off_leaves_the_disk(tmp_path: Path, slots: Slots) -> None:
    project = project_with(tmp_path, slots, {1: (1, 18)})
    project.submit("--local", *TWO_RANKS, "checkpoint.memory=off", "checkpoint.every=10", "params.steps=25")
    assert [step for step, *_ in resumed(project.runs[0])] == [0, 10]
    assert slots.bytes_held <= 2 * mmap.PAGESIZE, "how far each rank is"


def test_auto_takes_snapshots_from_the_first_steps_on(tmp_path: Path, slots: Slots) -> None:
    project = project_with(tmp_path, slots, {1: (0, 10)})
    project.submit("--local", *TWO_RANKS, "params.steps=20")
    (first, second) = resumed(project.runs[0])
    assert first == (0, False, None)
    assert second[0] > 0
    assert second[1]


SPOILT = [
    ("damaged", "os.pwrite(file, b'xxxx', 5000)", "of step 18 in memory cannot be used: what rank 0 left has checksum"),
    ("of a new parent", "os.ftruncate(file, 0)", "of step 18 in memory cannot be used: nobody has what rank 0 left"),
]


@pytest.mark.parametrize(("spoil", "said"), [row[1:] for row in SPOILT], ids=[row[0] for row in SPOILT])
def test_one_rank_without_its_snapshots_makes_all_begin_from_the_disk_and_says_so(
    tmp_path: Path, slots: Slots, spoil: str, said: str
) -> None:
    project = project_with(tmp_path, slots, {1: (1, 18)})
    is_it = "os.environ['JOBKIT_ATTEMPT'] == '2' and JobEnvironment().global_rank == 0"
    (project.path / "orders.py").write_text(f"{ORDERS}\n\nif {is_it}:\n    for file in mine:\n        {spoil}\n")
    one_node = ("resources.nodes=1", "resources.tasks_per_node=2")
    project.submit("--local", *one_node, "checkpoint.memory=1", "checkpoint.every=10", "params.steps=25")
    (run,) = project.runs
    assert [(step, memory) for step, memory, _ in resumed(run)] == [(0, False), (10, False)], describe(run)
    assert said in (run / "logs" / "2" / "rank_0.err").read_text() + (run / "logs" / "2" / "rank_0.out").read_text()
    assert logged_steps(run) == list(range(25))
