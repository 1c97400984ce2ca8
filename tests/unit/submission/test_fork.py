"""--from, rewind and rm on run directories made of events: names, errors, and commands that are killed or meet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from harness.journals import began, ended, finished, make_run, submitted

from jobkit.cli import main, rm
from jobkit.cli.rewind import rewind
from jobkit.config import yamlfile
from jobkit.config.load import load
from jobkit.errors import InputError
from jobkit.run import records, snapshot
from jobkit.run.journal import Journal, read_status
from jobkit.run.records import Origin, RankReport
from jobkit.run.rundir import RunDir
from jobkit.run.view import view, views
from jobkit.submission.fork import Fork
from jobkit.submission.plan import LaunchPlan, make_plan, target

TOY = "toy-11f5f19c"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runs directory with a finished run, its checkpoints and its code, and a project in the current folder."""
    monkeypatch.setenv("JOBKIT_CONFIG", str(tmp_path / "none.yaml"))
    monkeypatch.setenv("JOBKIT_RUNS", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text("def train(ctx): ...\n")
    (tmp_path / "toy.yaml").write_text("name: toy\ntask: toy:train\nparams: {lr: 0.3, steps: 30}\n")
    over = (submitted(), began(), ended(last_step=30), finished({"loss": 1.0}))
    run = make_run(tmp_path / "runs", TOY, *over)
    run.config_file.write_text(yamlfile.dump(load(tmp_path / "toy.yaml").written))
    for step in (10, 20, 30):
        checkpoint(run, step)
    run.final.mkdir()
    (run.checkpoints / "best").symlink_to("step_00000020")
    snapshot.link(run.code, tmp_path, run.path.parent)
    return run.path.parent


def checkpoint(run: RunDir, step: int, name: str = "") -> Path:
    folder = run.checkpoints / (name or f"step_{step:08d}")
    (folder / "framework").mkdir(parents=True)
    (folder / "rank_0.safetensors").write_text(f"weights of {step}" * 1000)
    (folder / "framework" / "state").write_text(str(step))
    (folder / "manifest.json").write_text("{}")
    return folder


def plan_of(runs: Path, *overrides: str) -> LaunchPlan:
    loaded = load(Path("toy.yaml"), overrides)
    return make_plan(loaded, runs, target(loaded.config, local=True, cluster=None))


def fork_of(runs: Path, word: str = TOY, *overrides: str, weights_only: bool = False) -> tuple[Fork, LaunchPlan]:
    fork = Fork.of(word, weights_only=weights_only, runs_dir=runs)
    return fork, fork.at(plan_of(runs, *overrides))


def start_of(run: RunDir) -> tuple[Any, ...]:
    start = run.start()
    assert start is not None
    return start.run, start.step, start.weights_only


def test_each_start_is_a_run_of_its_own(runs: Path) -> None:
    plans = [plan_of(runs), *(fork_of(runs, word)[1] for word in (TOY, f"{TOY}@10", f"{TOY}@20"))]
    plans += [fork_of(runs, weights_only=True)[1], fork_of(runs, TOY, "params.lr=1")[1]]
    assert len({plan.run.name for plan in plans}) == 6
    assert fork_of(runs, "toy")[1].run.name == plans[1].run.name


@pytest.mark.parametrize(
    ("word", "overrides", "says"),
    [
        ("toy@x", (), "RUN or RUN@STEP"),
        ("@10", (), "RUN or RUN@STEP"),
        ("joy", (), "toy"),
        ("joy-11f5f19c", (), "a run in"),
        (f"{TOY}@15", (), "one of 10, 20, 30"),
        ("bare-11f5f19c", (), "jobkit.init"),
        ("lean-11f5f19c", (), "open_run"),
        (TOY, (), "nothing is left to train"),
        ("under-11f5f19c", ("after=[under-11f5f19c]",), "is not its last"),
    ],
)
def test_a_start_that_cannot_be_is_refused(runs: Path, word: str, overrides: tuple[str, ...], says: str) -> None:
    bare, lean = make_run(runs, "bare-11f5f19c", submitted()), make_run(runs, "lean-11f5f19c", submitted())
    bare.config_file.write_text("name: bare\ncommand: [make]\n")
    lean.final.mkdir()
    checkpoint(make_run(runs, "under-11f5f19c", submitted(), began()), 10)
    with pytest.raises(InputError) as caught:
        fork, plan = fork_of(runs, word, *overrides)
        fork.bring(plan)
    assert says in str(caught.value)
    assert not plan_of(runs).run.start_file.exists()


def test_the_newest_checkpoint_is_linked_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fork, plan = fork_of(runs, TOY, "params.lr=0.01")
    old, new = RunDir(runs / TOY), plan.run
    checkpoint(new, 20, ".step_00000020.from")  # a submission was killed
    checkpoint(new, 40)
    fork.bring(plan.at(new))
    assert "params.lr 0.3 -> 0.01" in capsys.readouterr().err
    assert start_of(new) == (TOY, 30, False)
    assert [item.name for item in new.checkpoints.iterdir()] == ["step_00000030"]
    for name in ("rank_0.safetensors", "framework/state", "manifest.json"):
        assert (new.checkpoint(30) / name).samefile(old.checkpoint(30) / name)
    checkpoint(old, 50)
    fork.bring(plan.at(new))
    assert start_of(new) == (TOY, 30, False)
    new.config_file.write_text("name: toy\n")
    new.journal_file.write_text("")
    assert fork_of(runs, "toy", "params.lr=0.01")[1].run.name == new.name  # the word means two runs by now
    main.main(["rm", TOY, "--runs-dir", str(runs)])
    fork, plan = fork_of(runs, TOY, "params.lr=0.01")
    fork.bring(plan)
    assert (plan.run.path, new.durable_steps()) == (new.path, [30])
    new.start_file.unlink()
    with pytest.raises(InputError, match="fresh"):
        fork.bring(plan.at(new))


@pytest.mark.parametrize("name", ["toy", "longer"])
def test_the_same_command_means_the_same_run_once_the_first_is_removed(runs: Path, name: str) -> None:
    words = [("toy@20", f"name={name}", f"params.lr={lr}") for lr in (0.1, 0.2)]
    made = []
    for fork, plan in [fork_of(runs, *word) for word in words]:
        fork.bring(plan)
        plan.run.config_file.write_text(yamlfile.dump(plan.loaded.written))
        made.append(plan.run.name)
    main.main(["rm", TOY, "--runs-dir", str(runs)])
    assert [fork_of(runs, *word)[1].run.name for word in words] == made
    main.main(["rm", made[1], "--runs-dir", str(runs)])
    assert fork_of(runs, *words[0])[1].run.name == made[0]


def test_weights_alone_are_no_checkpoint_of_the_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    fork, plan = fork_of(runs, f"{TOY}@10", weights_only=True)
    fork.bring(plan)
    assert start_of(plan.run) == (TOY, 10, True)
    assert plan.run.durable_steps() == []
    file = plan.run.start_folder / "step_00000010" / "rank_0.safetensors"
    assert file.read_text() == "weights of 10" * 1000


def test_a_checkpoint_that_goes_away_meanwhile_gives_way(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, link = RunDir(runs / TOY), os.link
    monkeypatch.setattr(os, "link", lambda a, b: (rm.shutil.rmtree(old.checkpoint(30), True), link(a, b)))
    fork, plan = fork_of(runs)
    monkeypatch.setattr(Fork, "_refuse_an_end", lambda *_: None)
    fork.bring(plan)
    assert start_of(plan.run) == (TOY, 20, False)
    assert plan.run.durable_steps() == [20]


def test_rewind_sets_aside_what_is_later(runs: Path) -> None:
    run = RunDir(runs / TOY)
    checkpoint(run, 40, ".step_00000040.1")  # whole, and without its name: the next attempt would take it
    for step in (15, 30):
        with pytest.raises(InputError) as caught:
            rewind(run, step)
        assert caught.value.allowed == "10, 20"
    event = rewind(run, 20)
    branch = run.path / event.branch
    assert (event.step, event.moved, branch.name) == (20, [30], "1")
    assert {item.name for item in branch.iterdir()} == {"step_00000030", ".step_00000040.1", "final"}
    status = read_status(run)
    assert (status.state, status.result, status.rewound, run.durable_steps()) == ("interrupted", None, 20, [10, 20])
    assert (run.checkpoints / "best").exists()


def test_each_rewind_has_a_branch_in_the_folder_that_is_named(runs: Path) -> None:
    run = RunDir(runs / TOY)
    for step in ("20", "10"):
        assert main.main(["rewind", TOY, step, "--runs-dir", str(runs)]) == 0
    assert (run.branches / "1" / "step_00000030").exists()
    assert (run.branches / "2" / "step_00000020").exists()
    assert not (run.checkpoints / "best").is_symlink()
    assert sorted(item.name for item in run.branches.iterdir()) == ["1", "2"]


def test_a_rewind_that_was_killed_is_completed(runs: Path) -> None:
    run = RunDir(runs / TOY)
    (run.branches / "1").mkdir(parents=True)
    for step in (30, 20):
        run.checkpoint(step).rename(run.branches / "1" / f"step_{step:08d}")
    assert rewind(run, 10).moved == [20, 30]
    assert not run.final.exists()


def test_a_run_under_way_neither_goes_back_nor_away(runs: Path) -> None:
    run = make_run(runs, "busy-11f5f19c", submitted(), began())
    checkpoint(run, 10)
    checkpoint(run, 20)
    with run.alive_lock():
        with pytest.raises(InputError, match="cancel"):
            rewind(run, 10)
        assert main.main(["rm", TOY, run.name, "-y", "--runs-dir", str(runs)]) == 2
    assert run.durable_steps() == [10, 20]
    assert (runs / TOY).exists()
    # Its job is gone. What ranks have left of their end shall not finish the run that goes back.
    run.ends_folder(1).mkdir(parents=True)
    records.write(run.end_file(1, 0), RankReport(rank=0, attempt=1, kind="finished", time=1.0))
    rewind(run, 10)
    assert (view(run).state, run.ends(1)) == ("interrupted", [])


@pytest.mark.parametrize("option", ["--dry-run", "--checkpoints-only"])
def test_what_rm_leaves_of_a_run(runs: Path, option: str) -> None:
    run, files = RunDir(runs / TOY), sorted((runs / TOY).rglob("*"))
    assert main.main(["rm", TOY, option, "--runs-dir", str(runs)]) == 0
    if option == "--dry-run":
        assert sorted(run.path.rglob("*")) == files
    else:
        assert (run.durable_steps(), read_status(run).state, run.final.exists()) == ([], "finished", True)


def test_several_runs_are_removed_only_when_a_person_agrees(runs: Path) -> None:
    make_run(runs, "joy-11f5f19c", submitted(), began(), ended("stopped", "stop"))
    assert main.main(["rm", "*", "--runs-dir", str(runs)]) == 2  # there is no terminal to ask on
    assert main.main(["rm", "*", "--runs-dir", str(runs), "--yes"]) == 0
    assert not list(runs.glob("*-11f5f19c"))


def test_rm_removes_a_run_and_code_that_no_run_has(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--runs-dir", str(runs)]
    other = make_run(runs, "joy-11f5f19c", submitted(), began(), ended("stopped", "stop"))
    (code,) = (runs / ".code").iterdir()
    snapshot.link(other.code, Path.cwd(), runs)
    kept = make_run(runs, "free-11f5f19c", submitted(), began(), ended("stopped", "stop"))
    checkpoint(kept, 10)
    os.link(kept.checkpoint(10) / "rank_0.safetensors", runs / "elsewhere")
    (runs / ".removed" / "toy-00000000.1").mkdir(parents=True)  # a removal was killed
    capsys.readouterr()
    assert main.main(["rm", TOY, *words]) == 0
    assert "kB" in capsys.readouterr().out
    assert (code.exists(), list((runs / ".removed").iterdir())) == (True, [])
    assert main.main(["rm", kept.name, "--checkpoints-only", *words]) == 0
    assert (kept.exists(), kept.durable_steps(), (runs / "elsewhere").exists()) == (True, [], True)
    assert main.main(["rm", other.name, kept.name, "-y", *words]) == 0
    assert not code.exists()
    link = runs / "link-11f5f19c"
    link.symlink_to(make_run(runs / "away", "far-11f5f19c", submitted(), began(), ended()).path)
    assert main.main(["rm", link.name, *words]) == 2


def test_rm_leaves_a_run_that_a_submission_has_continued_meanwhile(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(runs / TOY)
    before = views([run])
    monkeypatch.setattr(rm, "views", lambda _: before)
    Journal(run).append(submitted(number=2))
    with run.alive_lock():
        assert main.main(["rm", TOY, "--runs-dir", str(runs)]) == 2
    assert run.exists()


def test_bytes_in_words() -> None:
    assert [rm.in_words(size) for size in (0, 999, 30_100_000, 2 * 10**15)] == ["0 B", "999 B", "30.1 MB", "2000.0 TB"]


def test_the_start_says_which_checkpoint_is_the_others() -> None:
    assert Origin(run=TOY, path="", step=10).begins(10)
    assert not Origin(run=TOY, path="", step=10).begins(20)
    assert not Origin(run=TOY, path="", step=10, weights_only=True).begins(10)
