"""Runs after runs: the decision by the states of the others, and what a submission refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from harness.journals import began, ended, finished, make_run, submitted

from jobkit.config.load import load
from jobkit.errors import InputError, NoSuchRun
from jobkit.run.after import decide, waits_for
from jobkit.run.journal import Journal, read_status
from jobkit.run.rundir import RunDir
from jobkit.submission import after
from jobkit.submission.plan import LaunchPlan, Target, make_plan


@pytest.mark.parametrize(
    ("states", "action", "names"),
    [
        ({}, "start", ""),
        ({"a": "finished"}, "start", ""),
        ({"a": "finished", "b": "finished"}, "start", ""),
        ({"a": "running"}, "wait", "a"),
        ({"a": "queued", "b": "finished"}, "wait", "a"),
        ({"a": "running", "b": "queued"}, "wait", "ab"),
        ({"a": "failed"}, "end", "a"),
        ({"a": "cancelled"}, "end", "a"),
        ({"a": "interrupted"}, "end", "a"),
        ({"a": "lost"}, "end", "a"),
        ({"a": "new"}, "end", "a"),
        ({"a": None}, "end", "a"),
        ({"a": "running", "b": "failed"}, "end", "b"),  # it would be waited for in vain
    ],
)
def test_the_states_of_the_others_decide(states: dict[str, str | None], action: str, names: str) -> None:
    renamed = {f"run-{name}": state for name, state in states.items()}
    turn = decide(renamed)
    assert turn.action == action
    assert [name for name in renamed if name in turn.words] == [f"run-{name}" for name in names]


FIRST = "toy-11f5f19c"


def plan_after(runs_dir: Path, *names: str) -> LaunchPlan:
    yaml = runs_dir.parent / "toy.yaml"
    yaml.write_text("name: toy\ntask: toy:train\n")
    loaded = load(yaml)
    loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, after=list(names)))
    return make_plan(loaded, runs_dir, Target("local", "local", {}))


def under_way(runs_dir: Path, name: str = FIRST, **fields: object) -> RunDir:
    run = make_run(runs_dir, name, submitted(**fields))
    run.submit_lock().take()  # as while its job is started
    return run


def test_a_finished_run_is_followed_at_once(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", FIRST, submitted(), began(), ended(), finished())
    plan = plan_after(tmp_path / "runs", FIRST)
    assert after.depend(plan) is plan


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([submitted(), began(), ended("crashed", "fail")], "failed"),
        ([submitted(), began(), ended("stopped", "stop")], "interrupted"),
        ([submitted(), began()], "lost"),
        ([submitted("slurm", cluster="elsewhere")], "Slurm"),
    ],
)
def test_a_run_whose_end_would_not_be_seen_is_refused(tmp_path: Path, events: list, words: str) -> None:  # type: ignore[type-arg]
    make_run(tmp_path / "runs", FIRST, *events)
    with pytest.raises(InputError) as caught:
        after.depend(plan_after(tmp_path / "runs", FIRST))
    assert (caught.value.key, caught.value.found) == ("after", FIRST)
    assert words in str(caught.value)
    assert caught.value.hint


def test_a_circle_is_refused(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    base = plan_after(runs)
    with pytest.raises(InputError, match="itself"):
        after.depend(plan_after(runs, base.run.name))
    under_way(runs, "near-11f5f19c", after=[base.run.name])
    far = under_way(runs, "far-11f5f19c", after=["near-11f5f19c"])
    with pytest.raises(InputError, match="waits for this one"):
        after.depend(plan_after(runs, "far-11f5f19c"))
    assert waits_for(far, read_status(far)) == "near-11f5f19c (queued)"
    for event in (began(), ended("preempted", "requeue")):  # once it has begun it waits no more, also in the queue
        Journal(far).append(event)
        assert waits_for(far, read_status(far)) == ""


def test_words_become_names_of_runs(tmp_path: Path) -> None:
    runs, other = tmp_path / "runs", tmp_path / "other"
    make_run(runs, FIRST, submitted())
    make_run(other, "far-22222222", submitted())
    loaded = plan_after(runs, "toy", "gone").loaded
    with pytest.raises(NoSuchRun) as caught:
        after.resolve(loaded, (), runs)
    assert (caught.value.key, caught.value.found) == ("after", "gone")
    (runs / "toy.sweep").write_text(f"{FIRST}\ntoy-99999999\n")
    with pytest.raises(InputError, match="have not begun"):
        after.resolve(plan_after(runs, "toy").loaded, ["toy.sweep"], runs)
    resolved = after.resolve(loaded, ["toy-1", str(other / "far-22222222")], runs, may_be_gone=True)
    assert resolved.config.after == resolved.written["after"] == [FIRST, str(other / "far-22222222")]
