"""The report of a run that was killed once."""

from __future__ import annotations

from pathlib import Path

from harness.training import result, training_project


def test_the_page_of_a_run_that_was_killed(tmp_path: Path) -> None:
    project = training_project(tmp_path, every=7)
    launch = project.submit("--local", "--detach", steps=30, step_seconds=0.2, last_attempt=2)
    launch.wait_for_step(10).kill_rank(0)
    values = result(launch)
    file = Path(project.jobkit("report", launch.run.name).stdout.strip())
    html = file.read_text(encoding="utf-8")
    assert file == launch.run.path / "report.html"
    assert all(key in html for key in values)
    assert "killed by SIGKILL" in html and "train/loss" in html and 'class="repeated"' in html
