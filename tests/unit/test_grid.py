"""What a sweep's words mean, point by point."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jobkit.errors import InputError, InvalidValue
from jobkit.run.grid import Point, grid_of_words, grid_of_yaml, points_of_table


def values(word: str) -> list[str]:
    return [point[0].text.partition("=")[2] for point in grid_of_words([word])]


def texts(points: list[Point]) -> list[tuple[str, ...]]:
    return [tuple(given.text for given in point) for point in points]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("params.lr=.003,.01", [".003", ".01"]),
        ("seed=7", ["7"]),
        ("seed=range(3)", ["0", "1", "2"]),
        ("seed=range(2,10,4)", ["2", "6"]),
        ("params.lr=log(1e-4,1e-1,4)", ["0.0001", "0.001", "0.01", "0.1"]),
        ("params.lr=log(1e-3,1e-4,3)", ["0.001", "0.0003162", "0.0001"]),
        ("params.widths=[1,2],[3]", ["[1,2]", "[3]"]),
        ("params.widths[0]=1,2", ["1", "2"]),
        ("params.a={x: 1, y: 2},3", ["{x: 1, y: 2}", "3"]),
        ("params.text='a,b',c", ["'a,b'", "c"]),
        ("params.text=don't, do", ["don't", "do"]),
        ("+params.new=1,2", ["1", "2"]),
        ("params.text='f(1,2)',g", ["'f(1,2)'", "g"]),
    ],
)
def test_an_axis_has_these_values(word: str, expected: list[str]) -> None:
    assert values(word) == expected


def test_a_grid_is_the_product_and_its_last_axis_changes_fastest() -> None:
    assert texts(grid_of_words(["a=1,2", "b=x,y"])) == [("a=1", "b=x"), ("a=1", "b=y"), ("a=2", "b=x"), ("a=2", "b=y")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digits.yaml"], "expected key=v1,v2"),
        (["=1"], "expected key=v1,v2"),
        (["a="], "a value is empty"),
        (["a=1,,2"], "a value is empty"),
        (["a=1", "a=2"], "a is there twice"),
        (["a=range(0)"], "has no values"),
        (["a=range(x)"], "range(FIRST,END)"),
        (["a=log(0,1,3)"], "both above 0"),
        (["a=log(1,2)"], "log(FIRST,LAST,COUNT)"),
        (["a=log(1,inf,3)"], "log(FIRST,LAST,COUNT)"),
        (["a=range(1000)", "b=range(1000)"], "1000000 points"),
        (["a=choice(1,2)"], "found choice(1,2); expected v1,v2 or range(4)"),
        (["a=rang(4)"], "did you mean 'range'?"),
        (["a=range(2),5"], "found range(2)"),
    ],
)
def test_what_is_no_axis_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(InputError) as error:
        grid_of_words(words)
    assert said in str(error.value)


def test_a_yaml_has_a_grid_or_points_one_by_one() -> None:
    assert texts(grid_of_yaml({"params.lr": [0.003, 1e-5], "seed": "range(2)"})) == [
        ("params.lr=0.003", "seed=0"),
        ("params.lr=0.003", "seed=1"),
        ("params.lr=1e-05", "seed=0"),
        ("params.lr=1e-05", "seed=1"),
    ]
    assert texts(grid_of_yaml([{"seed": 1}, {"params.text": "a b", "params.on": True, "params.clip": -math.inf}])) == [
        ("seed=1",),
        ('params.text="a b"', "params.on=true", "params.clip=-.inf"),
    ]


@pytest.mark.parametrize("sweep", [3, [], {}, [3], [{}], {"seed": 3}, {"seed": []}, {"seed": "range(x)"}])
def test_a_yaml_without_points_is_refused(sweep: object) -> None:
    with pytest.raises(InvalidValue) as error:
        grid_of_yaml(sweep)
    assert error.value.key.startswith("sweep")


def test_a_table_has_a_point_a_line(tmp_path: Path) -> None:
    table = tmp_path / "points.csv"
    table.write_text('\ufeffparams.lr, seed\n0.1, 1\n\n"[1,2]",\n,"3"\n')
    points = points_of_table(table)
    assert texts(points) == [("params.lr=0.1", "seed=1"), ("params.lr=[1,2]",), ("seed=3",)]
    assert [given.place for given in points[-1]] == [f"{table}:5: column 2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: found nothing"),
        ("a,a\n1,2\n", ":1: found a key twice"),
        ("a;b\n1;2\n", "commas stand between the columns"),
        ("a b\n1\n", ":1: found 'a b'"),
        ("a,b\n1,2,3\n", ":2: 3 value(s) for 2 key(s)"),
        ("a,b\n", "has no points"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    table = tmp_path / "points.csv"
    table.write_text(text)
    with pytest.raises(InputError) as error:
        points_of_table(table)
    assert said in str(error.value)
