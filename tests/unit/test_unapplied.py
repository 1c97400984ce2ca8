"""A run that is under way keeps what its job was given, and whoever asks for something else is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jobkit.run.config import CheckpointConfig, Config, Resources
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.submission.plan import make_plan
from jobkit.submission.unapplied import unapplied

CONFIG = Config(name="x", task="a:b", clusters={"slurm": {"partition": "low"}, "h100": {"partition": "h100"}})


def told(folder: Path, asked: Config, cluster: str = "slurm") -> tuple[str, ...]:
    run = RunDir(folder / "x-1")
    run.path.mkdir()
    run.write_config(make_plan(run.path, CONFIG, "slurm").config)
    return unapplied(run, Status(cluster="slurm"), make_plan(run.path, asked, cluster))


def test_the_same_submission_has_nothing_that_is_not_applied(tmp_path: Path) -> None:
    assert told(tmp_path, CONFIG) == ()


def test_each_value_that_the_job_does_not_get_is_told(tmp_path: Path) -> None:
    entries = {"slurm": {"partition": "high", "export": "ALL,API_KEY=abc"}, "h100": {"partition": "other"}}
    asked = dataclasses.replace(
        CONFIG, resources=Resources(time="2:00:00"), checkpoint=CheckpointConfig(keep=5), clusters=entries
    )
    assert told(tmp_path, asked) == (
        "resources.time auto (not 2:00:00)",
        "checkpoint.keep 3 (not 5)",
        "clusters.slurm.partition low (not high)",
        "clusters.slurm.export unset (not ALL,API_KEY=***)",
    )


def test_another_cluster_is_told_and_no_more(tmp_path: Path) -> None:
    assert told(tmp_path, CONFIG, "h100") == ("cluster slurm (not h100)",)


def test_a_job_whose_config_is_gone_says_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x-1")
    assert unapplied(run, Status(cluster="slurm"), make_plan(run.path, CONFIG, "slurm")) == ()
