"""The probe of a shared disk finds what does not work between two ranks, and tells all of them."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import Any

import pytest
from harness.ranks import Team, on_ranks

from jobkit.run.journal import Journal
from jobkit.worker import disk_probe
from jobkit.worker.disk_probe import LINES, probe_disk

NODES = {"node1": [0, 1], "node2": [2]}


def probe(team: Team, folder: Path, broken: str) -> Any:
    """What a rank is told by a probe of a disk that is broken on node2."""
    if team.rank == 2:
        break_disk(broken)
    return probe_disk(folder / "probe", NODES)


def break_disk(broken: str) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if broken == "lock":
        fcntl.flock = lambda file, operation: None  # type: ignore[assignment]  # as with a mount option `local_lock`
    elif broken == "no lock":
        fcntl.flock = refuse  # type: ignore[assignment]
    elif broken == "stale":
        disk_probe.SEEN_SECONDS = 0.2
        disk_probe.read_fresh = lambda file: disk_probe.OLD  # type: ignore[attr-defined]
    elif broken == "torn":
        disk_probe.read_fresh = lambda file: disk_probe.NEW[:4096]  # type: ignore[attr-defined]
    elif broken == "append":
        Journal.append = lambda journal, event, **fields: {}  # type: ignore[method-assign]  # as if overwritten


def test_a_disk_on_which_all_works(tmp_path: Path) -> None:
    for found in on_ranks(3, probe, tmp_path, ""):
        assert (found["between"], found["problems"], found["lost_lines"]) == (["node1", "node2"], {}, 0)
        assert found["seen_after"] < disk_probe.SEEN_SECONDS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("broken", "what", "problem"),
    [
        ("lock", "lock", "a lock that node1 held did not keep node2 out"),
        ("no lock", "lock", "on node2: "),
        ("stale", "rename", "node1 replaced a file, and node2 did not see it in 0 s"),
        ("torn", "rename", "node2 saw 4096 bytes of it, neither the old nor the new ones"),
    ],
)
def test_what_does_not_work_is_told_to_all_ranks(tmp_path: Path, broken: str, what: str, problem: str) -> None:
    for found in on_ranks(3, probe, tmp_path, broken):
        assert list(found["problems"]) == [what] and problem in found["problems"][what]
        assert found["lost_lines"] == 0


def test_lines_that_overwrite_each_other_are_counted(tmp_path: Path) -> None:
    assert [found["lost_lines"] for found in on_ranks(3, probe, tmp_path, "append")] == [LINES] * 3


def two_of_one(team: Team, folder: Path) -> Any:
    return probe_disk(folder / "probe", {"here": [0, 1]})["between"]


def test_on_one_node_two_processes_try_it(tmp_path: Path) -> None:
    assert on_ranks(2, two_of_one, tmp_path) == [["here", "here"]] * 2
