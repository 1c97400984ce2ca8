"""`check:`: a function of the user's own refuses what a run needs before anything is queued."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness.in_process import Done, jobkit
from harness.project import Project, wait_for

from jobkit.errors import InvalidValue
from jobkit.run.config import Config
from jobkit.submission import own_check

YAML = """\
name: toy
task: mytask:train
check: looks:look
params: {data: good, lr: 1e-3}
"""

LOOKS = """\
import sys
from pathlib import Path
from jobkit.errors import InputError, InvalidValue

def look(params):
    with Path("calls").open("a") as file:
        print(params["data"], "torch" in sys.modules, file=file)
    print("what it prints")
    if params["data"] == "bad":
        raise InvalidValue("params.data", "found bad, expected good")
    if params["data"] == "none":
        raise InputError("there are no data")
    return 1 / params["lr"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path / "project")
    (made.path / "toy.yaml").write_text(YAML)
    (made.path / "looks.py").write_text(LOOKS)
    return made


def dry_run(project: Project, *arguments: str, expect: int = 0) -> Done:
    return jobkit(project, "submit", "toy.yaml", "--dry-run", "--local", *arguments, expect=expect)


def calls(project: Project) -> list[str]:
    return (project.path / "calls").read_text().splitlines()


def test_what_it_finds_right_is_submitted_without_a_word_and_without_torch(project: Project) -> None:
    done = dry_run(project)
    assert done.stderr == "" and "what it prints" not in done.stdout
    assert calls(project) == ["good False"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("params.data=bad", "command line: params.data: found bad, expected good"),
        ("params.data=none", "toy.yaml:3: check: there are no data"),
        ("params.lr=0", "toy.yaml:3: check: looks:look: ZeroDivisionError: "),
        ("check=looks:lok", "check: looks:lok: "),
        ("check=lookss:look", "check: lookss:look: no module 'lookss'"),
        ("check=looks", "check: found 'looks', expected module:callable"),
    ],
)
def test_what_it_finds_wrong_is_one_line_at_its_key_and_nothing_is_started(
    project: Project, override: str, said: str
) -> None:
    for mode in (["--dry-run"], []):
        done = jobkit(project, "submit", "toy.yaml", "--local", override, *mode, expect=2)
        assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (project.path / "runs").exists()


NEEDS = {
    "at its top": {"looks.py": "import elsewhere.part\ndef look(params):\n    pass\n"},
    "when it is called": {"looks.py": "def look(params):\n    import elsewhere\n"},
    "in another file": {"looks.py": "import more\ndef look(params):\n    pass\n", "more.py": "import elsewhere\n"},
}


@pytest.mark.parametrize("files", NEEDS.values(), ids=list(NEEDS))
def test_a_package_that_only_the_job_will_have_is_named_with_the_way_out(
    project: Project, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (project.path / name).write_text(text)
    (project.path / "toy.yaml").write_text(f"{YAML}clusters: {{slurm: {{setup: [module load elsewhere]}}}}\n")
    for where in ("--local", "--cluster=slurm"):
        done = jobkit(project, "submit", "toy.yaml", "--dry-run", where, expect=2)
        assert "toy.yaml:3: check: looks:look: ModuleNotFoundError: No module named 'elsewhere'" in done.stderr
        assert f"{list(files)[-1]}:" in done.stderr, "the file of the user's own that imports it"
        assert f"install elsewhere for {sys.executable}, or leave the check out, by 'check=\"\"'" in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        jobkit(project, "submit", "toy.yaml", "--dry-run", where, 'check=""')


def test_one_that_dies_or_does_not_end_is_a_refusal(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (project.path / "looks.py").write_text("import os\ndef look(params):\n    print('last words')\n    os._exit(7)\n")
    assert "check: looks:look: its process ended with 7: last words" in dry_run(project, expect=2).stderr
    monkeypatch.setattr(own_check, "PATIENCE_SECONDS", 0.2)
    (project.path / "looks.py").write_text("import time\ndef look(params):\n    time.sleep(60)\n")
    assert "check: looks:look: not done within 0.2 s" in dry_run(project, expect=2).stderr


def test_a_sweep_asks_in_one_process_for_each_choice_of_params(project: Project) -> None:
    (project.path / "looks.py").write_text(
        "import os\ndef look(params):\n    print(params, os.getpid(), file=open('calls', 'a'))\n"
    )
    dry_run(project, "--sweep", "params.lr=1,2", "params.data=a,b", "seed=1,2,3")
    asked = [line.rpartition(" ") for line in calls(project)]
    pairs = [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [params for params, _, _ in asked] == [str({"data": data, "lr": lr}) for data, lr in pairs]
    assert len({process for _, _, process in asked}) == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "params.data=good,bad",
            "command line: params.data: found bad, expected good (the point params.data=bad seed=1)",
        ),
        ("params.data=good,none", "toy.yaml:3: check: there are no data (the point params.data=none seed=1)"),
        ("params.lr=1,0,2", "(the point params.lr=0 seed=1)"),
    ],
)
def test_a_point_of_a_sweep_that_it_refuses_is_named_and_none_is_started(
    project: Project, override: str, said: str
) -> None:
    done = jobkit(project, "submit", "toy.yaml", "--local", "--sweep", override, "seed=1,2", expect=2)
    assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (project.path / "runs").exists()


def test_a_point_at_which_it_dies_is_named(project: Project) -> None:
    (project.path / "looks.py").write_text("import os\ndef look(params):\n    params['lr'] or os._exit(7)\n")
    said = dry_run(project, "--sweep", "params.lr=1,2,0,3", expect=2).stderr
    assert "check: looks:look: its process ended with 7:  (the point params.lr=0)" in said


@pytest.mark.parametrize(("grows", "code"), [([1, 1, 1, None], 0), ([1, 1, 0], None), ([0], None)])
def test_it_has_the_whole_time_for_each_choice_of_params(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: list[int | None], code: int | None
) -> None:
    done = tmp_path / "done"
    done.touch()

    class Process(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None and (right := grows.pop(0)) is not None:
                done.write_bytes(done.read_bytes() + b"." * right)
                raise subprocess.TimeoutExpired("", timeout)
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", Process)
    command = ["true"] if code == 0 else ["sleep", "100"]
    assert own_check._code_of(command, tmp_path, tmp_path / "output", done) == code
    assert not grows


def test_it_gets_params_as_they_are(project: Project) -> None:
    (project.path / "looks.py").write_text(
        "def look(params):\n    assert params['of'] == {1: (2, float('inf'))}, params\n"
    )
    config = Config(name="toy", task="mytask:train", check="looks:look", params={"of": {1: (2, float("inf"))}})
    own_check.run_check(config, project.path)


def test_what_waits_for_another_runs_values_is_not_checked(tmp_path: Path) -> None:
    config = Config(name="toy", task="mytask:train", check="nosuch:look", params={"data": "${run:toy-12345678}/x"})
    own_check.run_check(config, tmp_path)
    with pytest.raises(InvalidValue, match="no module 'nosuch'"):
        own_check.run_check(dataclasses.replace(config, params={}), tmp_path)


LEAVES = {
    "a process": "import subprocess\nleft = lambda: subprocess.Popen(['sleep', '100'])\n",
    "a thread": "import threading, time\nleft = lambda: threading.Thread(target=time.sleep, args=(100,)).start()\n",
    "bytes": "import sys\nleft = lambda: sys.stdout.buffer.write(b'caf\\xe9')\n",
}


@pytest.mark.parametrize("what", LEAVES)
def test_what_it_prints_or_leaves_behind_is_nothing_to_the_submission(
    project: Project, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_check, "PATIENCE_SECONDS", 30)
    (project.path / "looks.py").write_text(f"{LEAVES[what]}def look(params):\n    left()\n")
    dry_run(project)


def test_what_it_began_ends_with_it(project: Project) -> None:
    (project.path / "looks.py").write_text(
        "import subprocess\n"
        "def look(params):\n"
        "    process = subprocess.Popen(['sleep', '100'])\n"
        "    open('number', 'w').write(str(process.pid))\n"
    )
    dry_run(project)
    number = int((project.path / "number").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(number)
        wait_for("its end", lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, seconds=30)
