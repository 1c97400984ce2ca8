"""The copy of jobkit that a container sees: whole, mended where a disk was swept, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.config.schema import ContainerConfig
from jobkit.errors import InputError
from jobkit.supervisor import container


def test_the_copy_is_one_that_submitit_finds_its_plugin_in(tmp_path: Path) -> None:
    copy = container.own_files(tmp_path)
    code = "from importlib.metadata import entry_points as e; print([i.value for i in e(group='submitit')])"
    environment = {"PYTHONPATH": str(copy), "PATH": os.environ["PATH"]}
    said = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    assert "jobkit.worker.job_environment:JobkitJobEnvironment" in said.stdout, said
    assert container.own_files(tmp_path) == copy
    assert not [file for file in copy.rglob("*") if file.stat().st_mode & 0o022]


def test_files_that_a_sweep_of_the_disk_took_are_written_again(tmp_path: Path) -> None:
    copy = container.own_files(tmp_path)
    (copy / "jobkit" / "start.py").unlink()
    (copy / "jobkit" / "agent" / "agent.py").write_text("")
    assert container.own_files(tmp_path) == copy
    assert (copy / "jobkit" / "start.py").read_bytes() == Path(container.start.FILE).read_bytes()
    assert (copy / "jobkit" / "agent" / "agent.py").stat().st_size


def test_a_copy_of_another_user_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container.own_files(tmp_path)
    monkeypatch.setattr(container, "foreign_owner", lambda path: "mallory")
    with pytest.raises(InputError):
        container.own_files(tmp_path)


def test_without_a_prefix_and_a_python_the_agent_starts_as_ever(tmp_path: Path) -> None:
    for config in (None, ContainerConfig()):
        assert container.command(config, tmp_path, "agent", "/runs/a")[2:] == [
            container.start.FILE,
            "jobkit.agent.agent",
            "/runs/a",
        ]
    assert not list(tmp_path.iterdir())
