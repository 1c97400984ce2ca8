"""Which runs the words of a command mean, and that nothing is done to several without being asked."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest

from jobkit.cli.main import main
from jobkit.errors import InputError
from jobkit.run.choose import choose, find_run
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir


def make(runs: Path, name: str, job: str, state: Event = Event.FINISHED) -> RunDir:
    """A run that has ended."""
    run = RunDir(runs / name)
    run.path.mkdir(parents=True)
    run.config_file.write_text("name: digits\ntask: mytask:train\n")
    run.record(Event.SUBMITTING, cluster="slurm", scheduler="slurm")
    run.record(Event.STARTED, attempt=1, job_id=job)
    run.record(state, attempt=1, step=3, cause="preempted", error="too bad")
    return run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    make(folder, "digits-0000000a", "12_0")
    make(folder, "digits-0000000b", "12_1", Event.FAILED)
    make(folder, "digits-0000000c", "13", Event.CANCELLED)
    make(folder, "gpu-0000000d", "12")
    for age, run in enumerate(sorted(folder.glob("*-*"))):
        os.utime(run / "events.jsonl", (2000 - age, 2000 - age))
        os.utime(run / "config.yaml", (1000 + age, 1000 + age))
    sweep = folder / ".sweeps/digits/s1"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(
        json.dumps({"key": "k", "runs": ["digits-0000000c", "digits-00000000", "digits-0000000a"]})
    )
    for other in ("s3", "s10"):
        (sweep.parent / other).mkdir()
        (sweep.parent / other / "sweep.json").write_text(json.dumps({"key": other, "runs": []}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOBKIT_RUNS", raising=False)
    return folder


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (["digits-0000000b"], "b"),
        (["runs/digits-0000000b"], "b"),
        (["gp"], "d"),
        (["gpu"], "d"),
        (["digits*"], "abc"),
        (["*-0000000[ad]"], "ad"),
        (["latest"], "d"),
        (["12_1"], "b"),
        (["13"], "c"),
        (["12"], "abd"),
        (["digits/s1"], "ca"),
        (["gpu", "digits/s1", "latest", "digits*"], "dcab"),
    ],
)
def test_what_words_mean(words: list[str], ends: str, runs: Path) -> None:
    assert "".join(run.name[-1] for run in choose(words, runs)) == ends


def test_a_run_behind_a_link_is_meant_once(runs: Path) -> None:
    (runs / "link-0000000e").symlink_to(runs / "gpu-0000000d")
    assert [run.name for run in choose(["gpu", "link"], runs)] == ["gpu-0000000d"]


def test_a_whole_name_does_not_mean_what_fresh_made_of_it(runs: Path) -> None:
    second = make(runs, "gpu-0000000d-2", "14")
    shutil.rmtree(find_run("gpu-0000000d", runs).path)
    with pytest.raises(InputError, match=r"no run 'gpu-0000000d' .*did you mean 'gpu-0000000d-2'"):
        choose(["gpu-0000000d"], runs)  # as rm that is typed twice
    assert find_run("gpu", runs).name == find_run("gpu-0000000d-", runs).name == second.name


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("digits", "'digits' is the beginning of 3 runs: .*'digits\\*' means all of them"),
        ("digtis*", "no run 'digtis\\*' in .*did you mean 'digits'"),
        ("digits-0000000x", "no run .*did you mean 'digits-0000000[abc]'\\? `.*` shows them"),
        ("digits.yaml", "a pattern is to be quoted"),
        ("14", "no run '14'"),
        ("seed=1", "no run 'seed=1' in .*; a condition: --where seed=1; "),
        ("digits/s2", "no sweep 'digits/s2' in .*; there are digits/s1, digits/s3, digits/s10$"),
        ("digist/s1", "no sweep 'digist/s1' in .*; did you mean 'digits/s1'\\?$"),
        ("../..", "no run"),
        ("", "is the beginning of 4 runs"),
    ],
)
def test_a_word_that_means_none_is_refused_with_what_to_type(word: str, told: str, runs: Path) -> None:
    with pytest.raises(InputError, match=told):
        choose(["gpu", word], runs)


def test_where_no_runs_are_the_refusal_says_how_to_name_another_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run 'gpu' in .*, which has none; --runs-dir DIR, or JOBKIT_RUNS, "):
        choose(["gpu"], tmp_path / "runs")


def test_one_run_is_not_several(runs: Path) -> None:
    assert find_run("13", runs).name == "digits-0000000c"
    with pytest.raises(InputError, match=r"'digits\*' means 3 runs, and one is wanted: digits-0000000a, "):
        find_run("digits*", runs)


class Terminal(io.StringIO):
    """Somebody who types an answer."""

    def isatty(self) -> bool:
        return True


def test_nothing_is_done_to_several_without_a_yes(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["cancel", "digits*"]) == 2
    assert capsys.readouterr().err == (
        "error: 3 runs: digits-0000000a, digits-0000000b, digits-0000000c; without a terminal to ask on, -y says to go "
        "on; nothing was done\n"
    )
    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    assert main(["cancel", "digits*", "gpu", "latest"]) == 2
    told = capsys.readouterr()
    assert "4 runs: digits-0000000a, digits-0000000b, digits-0000000c, gpu-0000000d go on? [y/N]" in told.err
    assert told.out == ""
    monkeypatch.setattr("sys.stdin", Terminal(""))  # Ctrl-D
    assert main(["cancel", "digits*"]) == 2
    assert capsys.readouterr().err.endswith("go on? [y/N] \nerror: nothing was done\n")
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert main(["cancel", "digits*"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["cancel", "digits*", "--yes"]) == 0
    assert main(["cancel", "gpu"]) == 0


def test_filters_choose_among_all_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cancel", "--state", "failed,cancelled", "-y"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["digits-0000000b", "digits-0000000c"]
    assert main(["cancel", "digits*", "--where", "step>=4"]) == 0
    assert "none of 3 run(s) meets --where 'step>=4': nothing to do" in capsys.readouterr().err
    assert main(["cancel", "--where", "params.lr=1"]) == 0  # no run has any params: that names nothing
    assert main(["cancel"]) == 2
    assert "which run? a name" in capsys.readouterr().err


def test_status_of_several_is_one_after_another_and_json_a_list(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "digits*", "--state", "finished,failed"]) == 0
    text = capsys.readouterr().out
    assert text.index("digits-0000000a: finished") < text.index("\n\ndigits-0000000b: failed")
    assert main(["status", "digits*", "--json"]) == 0
    assert [one["run"][-1] for one in json.loads(capsys.readouterr().out)] == ["a", "b", "c"]
    assert main(["status", "gpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_logs_of_several_have_the_name_before_each_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("digits-0000000a", "digits-0000000b"):
        log = RunDir(runs / name).rank_log(1, 0)
        log.parent.mkdir(parents=True)
        log.write_text(f"hello\nfrom {name}, without an end")
    assert main(["logs", "digits*", "--where", "state!=cancelled"]) == 0
    assert capsys.readouterr().out == "".join(
        f"[{name}] hello\n[{name}] from {name}, without an end\n" for name in ("digits-0000000a", "digits-0000000b")
    )
    assert main(["logs", "digits*"]) == 2  # one of them has none
    told = capsys.readouterr()
    assert "digits-0000000c has no log" in told.err
    assert told.out.count("hello") == 2
    assert main(["logs", "digits-0000000a"]) == 0
    assert capsys.readouterr().out == "hello\nfrom digits-0000000a, without an end"
