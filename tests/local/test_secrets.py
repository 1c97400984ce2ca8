"""A secret in params: said once a run, shown and sent as ***, and left as it is on the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.runs import Project

from jobkit.cli.main import main
from jobkit.mirror import _connect


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Two runs that differ in a secret; the second was submitted twice."""
    made = Project(tmp_path_factory.mktemp("secrets"))
    yaml = made.yaml.read_text(encoding="utf-8").replace(
        "params: {", "params: {hf: {token: hunter1}, my_key: '${oc.env:HOME}', "
    )
    made.yaml.write_text(yaml, encoding="utf-8")
    return made


def test_a_secret_is_said_once_a_run_and_shown_nowhere(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = ("submit", str(project.yaml), "--local", "params.steps=3")
    said = [project.jobkit(*submit, word).stderr.count("params.hf.token") for word in ("seed=1", "seed=1", "seed=2")]
    assert said == [1, 0, 1]
    project.jobkit(*submit, "params.hf.token=hunter2")
    sweep = project.jobkit("submit", str(project.yaml), "--local", "--sweep", "seed=5,6", "params.steps=3")
    assert sweep.stderr.count("params.hf.token") == 1
    runs = sorted((project.folder / "runs").glob("scripted-*[0-9a-f]"))
    texts = [(run / "config.yaml").read_text() + (run / "events.jsonl").read_text() for run in runs]
    assert all("hunter" in text and "oc.env:HOME" in text for text in texts), "the disk has the truth"

    monkeypatch.chdir(project.folder)
    first, second = (str(run) for run in runs[:2])
    for words in (
        ["list"],
        ["list", "--json"],
        ["list", "--csv", "--columns", "params.hf.token"],
        ["status", first],
        ["status", first, "--json"],
        ["diff", first, second],
        ["diff", first, second, "--json"],
        ["report", *map(str, runs), "--output", "report.html"],
        ["submit", str(project.yaml), "--local", "--dry-run"],
    ):
        assert main(words) == 0
        shown = capsys.readouterr()
        assert "hunter" not in shown.out + shown.err, words
        if words[0] == "list" and len(words) > 1:
            assert "***" in shown.out
    report = Path("report.html").read_text(encoding="utf-8")
    assert "hunter" not in report and "***" in report


def test_no_secret_is_copied_to_a_service(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    run = project.submit("--local", "seed=9", steps=3).run
    sent: list[dict[str, object]] = []
    monkeypatch.setattr("jobkit.mirror.WandbRun", lambda run, page, params: sent.append(params))
    _connect(run, "wandb")
    assert sent[0]["hf.token"] == "***" and json.dumps(sent).count("hunter") == 0
