"""What the kernel's counts of processes killed for lack of memory are taken for."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobkit.worker import out_of_memory


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is read, by path; nothing else exists."""
    found: dict[str, str] = {}

    def read(path: Path, encoding: str) -> str:
        if str(path) not in found:
            raise FileNotFoundError(path)
        return found[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    return found


def test_a_kill_in_another_job_on_the_node_is_none_of_ours(files: dict[str, str]) -> None:
    files["/proc/vmstat"] = "pgfault 5\noom_kill 7\n"
    files["/proc/self/cgroup"] = "0::/slurm/job_7\n"
    files["/sys/fs/cgroup/slurm/job_7/memory.events"] = "oom 0\noom_kill 0\noom_group_kill 0\n"
    assert out_of_memory.kernel_oom_kills() == 0
    files["/sys/fs/cgroup/slurm/job_7/memory.events"] = "oom 1\noom_kill 1\n"
    assert out_of_memory.kernel_oom_kills() == 1


def test_the_first_version_of_control_groups_counts_too(files: dict[str, str]) -> None:
    files["/proc/vmstat"] = "oom_kill 7\n"
    files["/proc/self/cgroup"] = "9:name=systemd:/\n4:memory:/job_7\n0::/\n"
    files["/sys/fs/cgroup/memory/job_7/memory.oom_control"] = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    assert out_of_memory.kernel_oom_kills() == 2


def test_without_a_group_that_counts_it_is_the_machine(files: dict[str, str]) -> None:
    files["/proc/vmstat"] = "oom_kill 7\n"
    assert out_of_memory.kernel_oom_kills() == 7
    files["/proc/self/cgroup"] = "0::/user.slice\n"
    assert out_of_memory.kernel_oom_kills() == 7
