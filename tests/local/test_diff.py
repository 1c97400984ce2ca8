"""`jobkit diff A B`: config, code, versions and what came of two runs, as a person and a program read it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import Project

from jobkit.run.code_diff import code_diff
from jobkit.run.config import Config
from jobkit.run.differences import differences
from jobkit.run.snapshot import take

PLAIN = """\
def train(ctx):
    return {"accuracy": 0.5 + ctx.params.lr, "kind": "plain"}
"""

YAML = "name: d\ntask: mytask:train\nparams: {lr: 0.25, api_token: abc}\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One with two runs, which differ in a param, a secret and a line of code."""
    made = Project(tmp_path_factory.mktemp("project"))
    (made.path / "toy.yaml").write_text(YAML)
    (made.path / "mytask.py").write_text(PLAIN)
    made.submit("--local")
    (made.path / "mytask.py").write_text(PLAIN.replace("    return", "    lr_token = 'hidden'\n    return"))
    made.submit("--local", "params.lr=0.125", "params.api_token=xyz")
    return made


def test_two_runs_are_compared_key_by_key_and_line_by_line(project: Project) -> None:
    first, second = project.run_of(), project.run_of("params.lr=0.125", "params.api_token=xyz")
    said = jobkit(project, "diff", first.name, second.name).stdout
    rows = [line.split(maxsplit=1) for line in said.splitlines()]
    assert rows == [
        ["params.lr", "0.25 -> 0.125"],
        ["params.api_token", "*** -> ***"],
        ["code", "mytask.py:2 +     lr_token = '***'"],
        ["state", "finished, both"],
        ["result.accuracy", "0.75 -> 0.625"],
        ["result.kind", "plain, both"],
        *[row for row in rows if row[0].startswith("logged.")],
    ]
    found = json.loads(jobkit(project, "diff", first.name, second.name, "--json").stdout)
    assert found["runs"] == [first.name, second.name] and found["config"]["params.lr"] == [0.25, 0.125]
    assert [(line["file"], line["line"], line["sign"]) for line in found["code"]] == [("mytask.py", 2, "+")]
    assert found["outcome"]["result.accuracy"] == [0.75, 0.625]
    assert "abc" not in said and "xyz" not in json.dumps(found)


def test_values_that_make_other_runs_are_told() -> None:
    def found(one: object, other: object) -> list[str]:
        configs = [Config(name="d", task="a:b", params={"x": value}) for value in (one, other)]
        return [each.key for each in differences(*configs)]

    assert found(1, True) == found([0], [False]) == ["params.x"]
    assert found(1, 1.0) == found([0], [0.0]) == []


def test_a_run_and_itself_have_no_difference_and_a_slip_is_told(project: Project) -> None:
    name = project.run_of().name
    assert jobkit(project, "diff", name, name).stdout.startswith("no difference")
    assert jobkit(project, "diff", name, "nobody", expect=2).stderr.startswith("error: no run 'nobody'")
    assert "B" in jobkit(project, "diff", name, expect=2).stderr


def test_files_that_are_no_texts_new_or_gone_are_named(tmp_path: Path) -> None:
    one, other, code = tmp_path / "one", tmp_path / "other", tmp_path / "code"
    for folder, files in (
        (one, {"a.py": b"x\n", "b": b"\xff"}),
        (other, {"b": b"\xfe", "c.py": b"y\n", "a.py": b"x\nz\n"}),
    ):
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
    digests = [take(folder, {file.name: file.name for file in folder.iterdir()}, code) for folder in (one, other)]
    first, second = (code / digest for digest in digests)
    assert [str(line) for line in code_diff(first, second)] == ["a.py:2 + z", "b differs", "c.py is new"]
    shutil.rmtree(second)
    assert [str(line) for line in code_diff(first, second)] == [f"{second} is gone"]
