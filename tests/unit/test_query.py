"""Conditions of --where: read from a text, and which values meet one."""

from __future__ import annotations

from typing import Any

import pytest

from jobkit.errors import InputError
from jobkit.run.query import parse, parse_states, select
from jobkit.run.summary import Summary


def summary(run: str, /, **status: Any) -> Summary:
    return Summary(run, f"/runs/{run}", {"state": "finished", "attempts": 0, **status})


RUNS = [
    summary("a-1", name="a", seed=0, params={"lr": 0.003, "opt": {"name": "adam"}}, result={"accuracy": 0.91}),
    summary("a-2", name="a", seed=1, params={"lr": 0.03, "opt": {"name": "sgd"}}, result={"accuracy": float("nan")}),
    summary(
        "b-1",
        name="b",
        state="running",
        step=7,
        params={"wide": True, "sizes": [1, 2], "large": 2**53 + 1},
        values={"train/loss": 2},
    ),
    summary("b-2", name="b", state="failed", step=0, params={"lr": "cosine", "a.b": 1}, result=3),
]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("params.lr>=0.03", ["a-2"]),
        ("params.lr < 1", ["a-1", "a-2"]),
        ("params.lr=.003", ["a-1"]),
        ("params.lr == 3e-3", ["a-1"]),
        ("params.lr!=0.003", ["a-2", "b-2"]),
        ("params.lr=cosine", ["b-2"]),
        ("params.lr>=nonsense", []),
        ("params.opt.name=sgd", ["a-2"]),
        ("params.opt.name~^a.*m$", ["a-1"]),
        ("params.wide=true", ["b-1"]),
        ("params.wide!=false", ["b-1"]),
        ("params.wide=yes", []),
        ("params.sizes=[1,2]", ["b-1"]),
        ("params.a.b=1", ["b-2"]),
        ("params.lr=null", ["b-1"]),
        ("params.lr!=null", ["a-1", "a-2", "b-2"]),
        ("params.wide!=none", ["b-1"]),
        ("params.large=9007199254740993", ["b-1"]),
        ("params.large=9007199254740992", []),
        ("seed=1", ["a-2"]),
        ("name=b", ["b-1", "b-2"]),
        ("run~-1", ["a-1", "b-1"]),
        ("state!=finished", ["b-1", "b-2"]),
        ("state~run|fail", ["b-1", "b-2"]),
        ("step>0", ["b-1"]),
        ("attempts=0", ["a-1", "a-2", "b-1", "b-2"]),
        ("accuracy>0.9", ["a-1"]),
        ("accuracy!=0.5", ["a-1"]),
        ("accuracy=nan", ["a-2"]),
        ("result.accuracy<=0.91", ["a-1"]),
        ("result=3", ["b-2"]),
        ("train/loss<3", ["b-1"]),
        ("goodput>0.5", []),
    ],
)
def test_which_runs_meet_a_condition(text: str, names: list[str]) -> None:
    assert [one.run for one in select(RUNS, [parse(text)])] == names


def test_all_conditions_hold_together_and_one_of_the_states() -> None:
    found = select(RUNS, [parse("params.lr>0"), parse("seed>=0")], parse_states("finished, failed"))
    assert [one.run for one in found] == ["a-1", "a-2"]
    assert [one.run for one in select(RUNS, [], {"running"})] == ["b-1"]
    assert select([], [parse("params.nothing=1")]) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("params.lr", "expected KEY OP VALUE"),
        ("params.lr>", "expected KEY OP VALUE"),
        (">3", "expected KEY OP VALUE"),
        ("", "expected KEY OP VALUE"),
        ("name~(", "no regular expression"),
        ("params.lrr=1", "did you mean 'params.lr'"),
        ("lr=1", "did you mean 'params.lr'"),
        ("acuracy>1", "did you mean 'accuracy'"),
        ("stat=1", "did you mean 'state'"),
    ],
)
def test_what_is_no_condition_on_these_runs_is_refused(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        select(RUNS, [parse(text)])


def test_a_state_that_there_is_not_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'running'"):
        parse_states("queued,runing")
    with pytest.raises(InputError, match="allowed: queued"):
        parse_states(",")
