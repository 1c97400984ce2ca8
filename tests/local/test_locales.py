"""A run gets the texts that were written for it, whatever encoding the locale of its processes has."""

from __future__ import annotations

import codecs
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.project import Project, status

YAML = """\
name: toy
task: mytask:train
params: {prompt: café, 问: [你好], steps: 4}
resources: {nodes: 1, tasks_per_node: 1}
retry: {crash: 0}
checkpoint: {every: 1}
"""

TASK = """\
from pathlib import Path

from jobkit.log import log


class Prompts:
    def __init__(self):
        self.seen = []

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def train(ctx):
    prompts = Prompts()
    ctx.track(prompts=prompts)
    print("the prompt is", ctx.params.prompt, ctx.params["问"][0])
    log.info("jobkit says %s", ctx.params["问"][0])
    for step in ctx.steps(ctx.params.steps):
        prompts.seen.append(ctx.params.prompt + ctx.params["问"][0])
        if step == 2 and not Path("go").exists():
            raise RuntimeError("not yet, 你好")
    return {"seen": prompts.seen}
"""


@pytest.fixture(params=["ISO-8859-1", "ASCII"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    """One whose shell has a locale with another encoding than UTF-8, which is its ENCODING."""
    encoding = request.param
    if encoding == "ASCII":  # which PEP 538 and 540 would make UTF-8
        locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    elif shutil.which("localedef") and Path("/usr/share/i18n/locales/en_US").exists():
        locale = {"LC_ALL": "en_US", "LOCPATH": str(tmp_path)}
        command = ["localedef", "-i", "en_US", "-f", encoding, str(tmp_path / "en_US")]
        subprocess.run(command, check=True, capture_output=True)
    else:
        pytest.skip("no localedef, or nothing to make a locale of")
    made = Project(tmp_path / "project", {**locale, "ENCODING": encoding})
    made.env.pop("PYTHONIOENCODING", None)
    ask = [sys.executable, "-c", "import locale; print(locale.getpreferredencoding(False))"]
    used = subprocess.run(ask, env=made.env, check=True, capture_output=True, text=True).stdout.strip()
    assert codecs.lookup(used) == codecs.lookup(encoding)
    (made.path / "toy.yaml").write_text(YAML, encoding="utf-8")
    (made.path / "mytask.py").write_text(TASK, encoding="utf-8")
    return made


def printed(project: Project, *arguments: str, expect: int = 0) -> str:
    """What a command prints on its terminal, whose encoding is that of the locale."""
    command = [sys.executable, "-m", "jobkit", *arguments]
    done = subprocess.run(command, cwd=project.path, env=project.env, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode(project.env["ENCODING"])
    assert done.returncode == expect, said
    return said


def test_texts_arrive_as_written_are_continued_with_and_shown_as_far_as_the_terminal_can(project: Project) -> None:
    def shown(text: str) -> str:
        return text.encode(project.env["ENCODING"], "backslashreplace").decode(project.env["ENCODING"])

    failed = printed(project, "submit", "toy.yaml", "--local", expect=1)
    assert shown("RuntimeError: not yet, 你好") in failed
    (run,) = project.runs
    (project.path / "go").touch()
    assert "from step 2" in printed(project, "resume", run.name)
    assert status(run)["result"] == {"seen": ["café你好"] * 4}
    assert "prompt: café\n" in (run / "config.yaml").read_text(encoding="utf-8")

    assert shown("café") in printed(project, "list", "--columns", "params.prompt")
    assert shown("RuntimeError: not yet, 你好") in printed(project, "status", run.name)
    logs = printed(project, "logs", run.name)
    assert logs.count(shown("the prompt is café 你好\n")) == logs.count(shown("jobkit: jobkit says 你好\n")) == 2
    assert (run / "logs/1/rank_0.out").read_text(encoding="utf-8").count("the prompt is café 你好\n") == 1


def test_a_yaml_in_another_encoding_is_refused_by_its_line(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "toy.yaml").write_bytes(YAML.replace("问: [你好], ", "").encode("latin-1"))
    said = project.jobkit("submit", "toy.yaml", "--local", "--dry-run", expect=2).stderr
    assert said == "error: toy.yaml:3: not UTF-8: found the byte 0xe9\n"
