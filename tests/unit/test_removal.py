"""`jobkit rm`: what has ended goes as a whole, what lives stays, and the number of a run is not given again."""

from __future__ import annotations

import io
import os
import shutil
import time
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

import pytest
from harness.other_user import as_nobody, only_root, open_folder

from jobkit.cli.main import main
from jobkit.cli.rm import bytes_text
from jobkit.errors import InputError
from jobkit.run import shared_code
from jobkit.run.config import Config
from jobkit.run.dependencies import dependents
from jobkit.run.events import Event
from jobkit.run.identity import run_name
from jobkit.run.rundir import RunDir
from jobkit.run.runs import all_runs, next_version
from jobkit.submission import removal
from jobkit.submission.chains import prepared
from jobkit.submission.plan import LaunchPlan

CHECKPOINT = 300_000
"""Bytes of each."""


def make(
    runs: Path, number: int, end: Event | None = Event.FINISHED, name: str = "", on: dict[str, str] | None = None
) -> RunDir:
    """A run with two checkpoints."""
    config = Config(name="toy", task="a:b", params={"number": number})
    run = RunDir(runs / (name or run_name(config)))
    for step in (20, 40):
        checkpoint = run.checkpoints / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_bytes(os.urandom(CHECKPOINT))
    for folder in (run.final, run.tensorboard, run.logs(1)):
        folder.mkdir(parents=True)
    (run.final / "model.safetensors").write_text("weights")
    run.write_config(config)
    run.keep_number()
    run.record(Event.SUBMITTING, **(on or {"cluster": "local", "scheduler": "local"}), **config.told())
    run.record(Event.STARTED, attempt=1, job_id="7")
    run.record(Event.RESUMED, attempt=1, step=0, total_steps=100)
    run.record(Event.CHECKPOINT, attempt=1, step=40)
    if end is not None:
        run.record(end, attempt=1, step=40, cause="user", error="it failed")
    return run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOBKIT_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_a_run_is_removed_whole_and_its_number_is_not_given_again(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, stays = make(runs, 1), make(runs, 2)
    assert main(["rm", gone.name]) == 0
    assert capsys.readouterr().out.startswith(f"{gone.name} removed, 6")
    assert [run.name for run in all_runs(runs)] == [stays.name]
    assert sorted(path.name for path in runs.iterdir()) == sorted([".locks", stays.name])
    assert next_version(runs, gone.name).name == f"{gone.name}-2"


def test_nothing_is_removed_where_one_of_them_lives(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended, live, ending = make(runs, 1), make(runs, 2, end=None), make(runs, 3)
    with live.alive_lock(), ending.alive_lock():
        assert main(["rm", "toy*", "-y"]) == 2
        told = capsys.readouterr().err
        assert "nothing was removed: toy-" in told
        assert f"{live.name} (running)" in told
        assert f"{ending.name} (its process has not ended)" in told
        assert "cancel" in told
        assert main(["rm", live.name, "--checkpoints-only"]) == 2
        assert main(["rm", "toy*", "--dry-run"]) == 2
    assert len(all_runs(runs)) == 3
    assert main(["rm", "toy*", "-y"]) == 0, "nobody holds its lock: what ran is gone"
    assert all_runs(runs) == []
    assert ended.path.exists() is False


NO_SLURM = (
    "#!/bin/sh\necho 'error: resolve_ctls_from_dns_srv: res_nsearch error: Host name lookup failure' >&2\nexit 1\n"
)
"""What each of Slurm's commands does in a shell without SLURM_CONF."""


def test_without_a_slurm_to_ask_what_is_recorded_as_over_goes_and_the_rest_stays(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "squeue", "scontrol"):
        (programs / name).write_text(NO_SLURM)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    on_slurm = {"cluster": "slurm", "scheduler": "slurm", "slurm_cluster": "c@host:1"}
    ended = [make(runs, number, end, on=on_slurm) for number, end in enumerate((Event.FINISHED, Event.FAILED))]
    stopped = make(runs, 8, Event.INTERRUPTED, on=on_slurm)
    assert main(["rm", stopped.name, ended[0].name, "-y", "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert f"nothing was removed: {stopped.name} is recorded as interrupted, and whether its job 7 has ended" in told
    assert "no Slurm is configured here)" in told and "--local" not in told and f"rm -r {stopped.path}" in told
    assert main(["rm", ended[0].name, "--dry-run"]) == 0 and ended[0].path.exists()
    assert main(["rm", ended[0].name]) == 0 and main(["rm", ended[1].name, "--checkpoints-only"]) == 0
    assert not ended[0].path.exists() and ended[1].status().checkpoint is None


def test_a_run_that_is_continued_meanwhile_is_left(runs: Path) -> None:
    run = make(runs, 1, end=Event.INTERRUPTED)
    removal.refuse_live([run])
    with run.alive_lock():
        run.record(Event.STARTED, attempt=2, job_id="8")
        for remove in (removal.remove, removal.remove_checkpoints):
            with pytest.raises(InputError, match="is running by now: not removed"):
                remove(run)
    assert (run.checkpoints / "step_00000040/weights").exists()


@pytest.mark.parametrize("end", [Event.INTERRUPTED, Event.FAILED, Event.FINISHED])
def test_without_its_checkpoints_a_run_speaks_of_none(
    end: Event, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(runs, 1, end)
    assert run.status().checkpoint == 40
    assert main(["rm", run.name, "--checkpoints-only"]) == 0
    assert "checkpoints removed, 6" in capsys.readouterr().out
    status = run.status()
    assert status.checkpoint is None
    assert status.step == (40 if end == Event.FINISHED else 0)
    assert main(["status", run.name]) == 0
    assert "newest checkpoint" not in capsys.readouterr().out
    assert list(run.checkpoints.iterdir()) == []
    assert (run.final / "model.safetensors").exists()
    assert run.logs(1).exists()
    run.record(Event.STARTED, attempt=2, job_id="8")
    run.record(Event.CHECKPOINT, attempt=2, step=20)
    assert run.status().checkpoint == 20


def test_checkpoints_go_though_the_disk_is_full(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, record = make(runs, 1, Event.INTERRUPTED), RunDir.record
    full = [True]

    def on_a_full_disk(self: RunDir, event: Event, **fields: object) -> None:
        if full.pop() if full else False:
            assert (self.checkpoints / "step_00000040").exists()
            raise OSError(28, "No space left on device")
        record(self, event, **fields)

    monkeypatch.setattr(RunDir, "record", on_a_full_disk)
    removal.remove_checkpoints(run)
    assert run.status().checkpoint is None


def test_dry_run_says_how_large_they_are(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        run = make(runs, number)
    os.link(run.checkpoints / "step_00000020/weights", runs / "another-name")
    assert main(["rm", "toy*", "--dry-run"]) == 0
    *each, last = capsys.readouterr().out.splitlines()
    assert len(each) == 2
    assert all("(finished, 0 s old)" in line or "(finished, 1 s old)" in line for line in each)
    assert last.startswith("2 run(s), ")
    assert last.endswith("; nothing was removed")
    assert removal.size(run.path) < 2 * CHECKPOINT, "what has another name does not go with it"
    assert len(all_runs(runs)) == 2


def test_older_runs_alone(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = make(runs, 1), make(runs, 2)
    month_ago = time.time() - 31 * 86400
    os.utime(old.journal.path, (month_ago, month_ago))
    assert main(["rm", "--older", "32d"]) == 0
    assert "none of 2 run(s) is older than 32 d" in capsys.readouterr().err
    assert main(["rm", "--older", "30d"]) == 0
    assert [run.name for run in all_runs(runs)] == [new.name]
    with pytest.raises(SystemExit):
        main(["rm", "--older", "30"])
    assert "a number with a unit: 30s" in capsys.readouterr().err


def test_nobody_is_asked_twice_and_no_terminal_means_no(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(runs, 1), make(runs, 2)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["rm", "toy*"]) == 2
    assert "-y says to go on; nothing was done" in capsys.readouterr().err
    assert len(all_runs(runs)) == 2


def test_a_word_that_may_mean_another_run_tomorrow_is_asked_about(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make(runs, 1)
    second = make(runs, 1, name=f"{first.name}-2")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for word in ("latest", "toy"):
        assert main(["rm", word]) == 2
        assert f"1 run: {second.name}; without a terminal to ask on, -y says to go on" in capsys.readouterr().err
    assert len(all_runs(runs)) == 2
    assert main(["rm", "toy", "-y"]) == main(["rm", str(first.path)]) == 0
    assert not all_runs(runs)


@pytest.mark.parametrize(
    ("text", "events", "refuses", "tells"),
    [
        ("${run:@.result.x}", [], True, False),
        ("${run:@}/final", [Event.STARTED], True, False),
        ("${run:@.result.x}", [Event.STARTED], False, False),
        ("plain", [Event.CANCELLED], False, True),
        ("${run:@}/final", [Event.STARTED, Event.FAILED], False, True),
        ("${run:@}/final", [Event.STARTED, Event.FINISHED], False, False),
    ],
)
def test_a_run_that_another_needs_stays(
    runs: Path, capsys: pytest.CaptureFixture[str], text: str, events: list[Event], refuses: bool, tells: bool
) -> None:
    needed = make(runs, 1)
    config = Config(name="later", task="a:b", params={"x": text.replace("@", needed.name)}, after=[needed.name])
    later = RunDir(runs / run_name(config))
    prepared(LaunchPlan(run=later.path, config=config, cluster="local", scheduler="local"))
    later.path.mkdir()
    later.write_config(config)
    later.record(Event.SUBMITTING, cluster="local", scheduler="local", after=config.after)
    later.record(Event.SUBMITTED, job_id="1")
    for event in events:
        later.record(event, attempt=1, step=1, job_id="1")
    copy = shutil.copytree(runs, runs.parent / "copy")
    assert main(["rm", needed.name]) == (2 if refuses else 0)
    said = capsys.readouterr().err
    assert (f"{needed.name} ({later.name}, which is " in said and f"cancel {later.name}` first" in said) == refuses
    assert (f"{later.name} (" in said and f"needs {needed.name}: without it, it cannot be continued" in said) == tells
    assert [one.path for one in dependents(RunDir(copy / needed.name))] == [copy / later.name]
    shutil.rmtree(copy / later.name)
    assert main(["rm", needed.name, "--runs-dir", str(copy)]) == 0  # nobody comes after that one


def test_a_removal_that_was_killed_leaves_no_half_of_a_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half, other = make(runs, 1), make(runs, 2)

    def killed(path: Path) -> None:
        (path / "config.yaml").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        patched.setattr(os, "getpid", lambda: 2**22 + 1)  # of a process that is none
        assert main(["rm", half.name]) == 130
    assert [run.name for run in all_runs(runs)] == [other.name]
    assert len(list((runs / removal.ASIDE).iterdir())) == 1
    assert main(["rm", other.name]) == 0
    assert not (runs / removal.ASIDE).exists()


def test_what_another_process_is_removing_is_left_to_it(runs: Path) -> None:
    run = make(runs, 1)
    aside = removal._move_aside(run.path, runs)
    removal.clear_aside(runs)
    assert aside.exists()
    elsewhere = aside.rename(aside.with_name(aside.name.replace(os.uname().nodename, "elsewhere")))
    removal.clear_aside(runs)
    assert elsewhere.exists()
    long_ago = elsewhere.rename(elsewhere.with_name("1@" + elsewhere.name.partition("@")[2]))
    removal.clear_aside(runs)
    assert not long_ago.exists()


def test_a_shared_snapshot_stays_as_long_as_a_run_has_it(runs: Path) -> None:
    first, second = make(runs, 1), make(runs, 2)
    for version in ("aaaa", "bbbb"):
        (shared_code.folder(runs) / version).mkdir(parents=True)
    for run, versions in ((first, ("aaaa", "bbbb")), (second, ("aaaa",))):
        for version in versions:
            run.code.mkdir(exist_ok=True)
            (run.code / version).symlink_to(shared_code.folder(runs) / version)
    assert main(["rm", first.name]) == 0
    assert [path.name for path in shared_code.folder(runs).iterdir()] == ["aaaa"]
    assert main(["rm", second.name]) == 0
    assert list(shared_code.folder(runs).iterdir()) == []


def test_a_folder_that_jobkit_did_not_make_and_a_link_are_left(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (("mine", "no run 'mine'"), ("mine-0000000a", "has no journal")):
        (runs / name).mkdir(parents=True)
        (runs / name / "config.yaml").write_text("a: 1\n")
        assert main(["rm", name]) == 2
        assert said in capsys.readouterr().err
    real = make(runs / "elsewhere", 1)
    (runs / "link").symlink_to(real.path)
    assert main(["rm", "link"]) == 2
    assert f"is a link to {real.path}" in capsys.readouterr().err
    assert real.exists()


@only_root
@pytest.mark.parametrize("may_write", ["the locks", "all"])
def test_another_users_runs_stay(may_write: str) -> None:
    with open_folder() as folder:
        run = make(folder / "runs", 1)
        for parent, _, files in os.walk(folder if may_write == "all" else folder / "runs/.locks"):
            for path in (Path(parent), *(Path(parent) / file for file in files)):
                path.chmod(0o777)

        def remove(*arguments: str) -> tuple[int, str]:
            with redirect_stderr(io.StringIO()) as said:
                return main(["rm", "--runs-dir", str(folder / "runs"), *arguments]), said.getvalue()

        for arguments in ((run.name,), (run.name, "--checkpoints-only")):
            code, said = as_nobody(partial(remove, *arguments))
            assert (code, f"error: {run.name} is root's: not removed" in said) == (2, True)
        left = "1 run(s) of other users are left\n"
        assert as_nobody(partial(remove, "--state", "finished", "-y")) == (0, left)
        assert run.status().checkpoint == 40
        assert (run.checkpoints / "step_00000040/weights").exists()


def test_checkpoints_behind_a_link_are_not_said_to_be_removed(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(runs, 1)
    run.checkpoints.rename(tmp_path / "scratch")
    run.checkpoints.symlink_to(tmp_path / "scratch")
    assert main(["rm", run.name, "--checkpoints-only"]) == 2
    assert f"is a link to {tmp_path / 'scratch'}: remove what is there yourself" in capsys.readouterr().err
    assert run.status().checkpoint == 40


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (30_100_000, "30.1 MB"), (5e15, "5000.0 TB")]
)
def test_bytes_as_people_read_them(size: int, text: str) -> None:
    assert bytes_text(size) == text
