"""What the words, the table and the YAML of a sweep mean, and which runs its file means."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.journals import make_run, submitted

from jobkit.cli.main import main
from jobkit.config.load import read_source
from jobkit.config.points import points, sweep_name
from jobkit.errors import InputError, NoSuchRun
from jobkit.run.runs import find, newest, runs_in, versions

YAML = "name: toy\ntask: toy:train\nparams: {lr: 0.1, widths: [8], text: a}\n"


def wanted(
    folder: Path, *, yaml: str = "", typed: tuple[str, ...] = (), words: list[str] | None = None, table: str = ""
) -> list[list[str]] | None:
    """Return the words of each point."""
    (folder / "toy.yaml").write_text(YAML + yaml)
    (folder / "points.csv").write_text(table)
    source = read_source(folder / "toy.yaml", typed)
    taken = points(source, words, folder / "points.csv" if table else None)
    for point in taken or ():
        source.loaded(point)
    return None if taken is None else [[word for word, _ in point] for point in taken]


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("params.lr=.003,.01", [".003", ".01"]),
        ("seed=7", ["7"]),
        ("seed=range(3)", ["0", "1", "2"]),
        ("seed=range(2,10,4)", ["2", "6"]),
        ("params.lr=log(1e-4,1e-1,4)", ["0.0001", "0.001", "0.01", "0.1"]),
        ("params.lr=log(1e-3,1e-4,3)", ["0.001", "0.0003162", "0.0001"]),
        ("params.widths=[8],[16,8]", ["[8]", "[16,8]"]),
        ("params.text='a,b',c", ["'a,b'", "c"]),
        ("+params.new={x: 1, y: 2},3", ["{x: 1, y: 2}", "3"]),
    ],
)
def test_an_axis_has_these_values(tmp_path: Path, axis: str, values: list[str]) -> None:
    key = axis.partition("=")[0]
    assert wanted(tmp_path, words=[axis]) == [[f"{key}={value}"] for value in values]


def test_axes_make_their_product_and_the_last_changes_fastest(tmp_path: Path) -> None:
    product = [[f"params.lr={lr}", f"seed={seed}"] for lr in (1, 2) for seed in (3, 4)]
    assert wanted(tmp_path, words=["params.lr=1,2", "seed=3,4"]) == product
    assert wanted(tmp_path, yaml="sweep: {params.lr: [1, 2], seed: '3,4'}") == product
    assert wanted(tmp_path, yaml="sweep: {params.lr: [1, 2]}", words=["seed=1"]) == [["seed=1"]]
    listed = "sweep: [{seed: 1}, {params.text: 'None', params.lr: 1e-5}]"
    assert wanted(tmp_path, yaml=listed) == [["seed=1"], ["params.text='None'", "params.lr=1.0e-05"]]


def test_a_typed_value_fixes_its_axis_of_the_yaml(tmp_path: Path) -> None:
    yaml = "sweep: {params.lr: [1, 2], seed: range(2)}"
    assert wanted(tmp_path, yaml=yaml, typed=("seed=1",)) == [["params.lr=1"], ["params.lr=2"]]
    assert wanted(tmp_path, yaml=yaml, typed=("seed=1", "params.lr=3")) is None, "one run"
    assert wanted(tmp_path) is None


def test_a_table_has_a_point_a_line_and_an_empty_field_keeps_the_yaml(tmp_path: Path) -> None:
    table = '\ufeffparams.widths, seed\n"[1,2]", 1\n\n,2\n'
    assert wanted(tmp_path, table=table) == [["params.widths=[1,2]", "seed=1"], ["seed=2"]]


def test_a_sweep_of_a_table_is_shown_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text("def train(ctx): ...\n")
    (tmp_path / "toy.yaml").write_text(YAML)
    (tmp_path / "points.csv").write_text("seed\n1\n2\n")
    assert main(["submit", "toy.yaml", "--local", "--dry-run", "--sweep-file", "points.csv"]) == 0
    assert [line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]] == [["seed=1"], ["seed=2"]]
    assert not (tmp_path / "runs").exists()
    assert main(["submit", "toy.yaml", "--local", "--dry-run", "--sweep", "seed=1,2", "--sweep", "params.lr=1,2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4


@pytest.mark.parametrize(
    ("arguments", "place", "key"),
    [
        ({"words": ["digits.yaml"]}, "command line", "--sweep"),
        ({"words": ["seed="]}, "command line", "seed"),
        ({"words": ["seed=1,,2"]}, "command line", "seed"),
        ({"words": ["seed=1,"]}, "command line", "seed"),
        ({"words": ["seed=1", "seed=2"]}, "command line", "seed"),
        ({"words": ["seed=range(0)"]}, "command line", "seed"),
        ({"words": ["seed=range(2),5"]}, "command line", "seed"),
        ({"words": ["params.lr=log(0,1,3)"]}, "command line", "params.lr"),
        ({"words": ["params.lr=log(1,2)"]}, "command line", "params.lr"),
        ({"words": ["params.lr=log(1,2,1)"]}, "command line", "params.lr"),
        ({"words": ["seed=range(1000)", "params.lr=range(1000)"]}, "command line", "sweep"),
        ({"words": ["seed=range(100000000000)"]}, "command line", "sweep"),
        ({"words": ["params.lr=log(1,2,100000000000)"]}, "command line", "sweep"),
        ({"words": ["params.lrr=1,2"]}, "command line", "params.lrr"),
        ({"words": ["params.lr=1,x"]}, "command line", "params.lr"),
        ({"table": "seed,seed\n1,2\n"}, "points.csv:1", "column 2"),
        ({"table": "seed;params.lr\n1;2\n"}, "points.csv:1", "column 1"),
        ({"table": "seed\n1,2\n"}, "points.csv:2", ""),
        ({"table": "seed\n"}, "points.csv", ""),
        ({"table": "seed,params.lr\n1,.1\n2,1e-3x\n"}, "points.csv:3, column 2", "params.lr"),
        ({"yaml": "sweep: 3\n"}, "toy.yaml:4", "sweep"),
        ({"yaml": "sweep:\n  seed: 3\n"}, "toy.yaml:5", "sweep.seed"),
        ({"yaml": "sweep:\n  params: {lr: [1]}\n"}, "toy.yaml:5", "sweep.params"),
        ({"yaml": "sweep:\n  seed: [1]\n  params.x: [1]\n"}, "toy.yaml:6", "params.x"),
        ({"yaml": "sweep:\n- {seed: 1}\n- {params.lr: x}\n"}, "toy.yaml:6", "params.lr"),
    ],
)
def test_what_is_no_point_is_refused_with_its_place(tmp_path: Path, arguments: dict, place: str, key: str) -> None:
    with pytest.raises(InputError) as refusal:
        wanted(tmp_path, **arguments)
    assert refusal.value.key == key
    assert str(refusal.value).startswith((f"{place}: ", f"{tmp_path}/{place}: "))


def test_a_sweep_is_named_by_its_runs_in_any_order() -> None:
    name = sweep_name("toy", ["toy-1", "toy-2"])
    assert name == sweep_name("toy", ["toy-2", "toy-1"]) != sweep_name("toy", ["toy-1"])


def test_a_file_of_a_sweep_means_its_runs_that_exist(tmp_path: Path) -> None:
    names = ["toy-00000001", "toy-00000002", "toy-00000002-3", "toy-00000002-12"]
    for name in names:
        make_run(tmp_path, name, submitted())
    file = tmp_path / "toy-11f5f19c.sweep"
    file.write_text("toy-00000001\ntoy-0000000f\ntoy-00000002-12\n")
    for word in (file.name, str(file)):
        assert [run.name for run in find([word, "toy-00000001"], tmp_path)] == ["toy-00000001", "toy-00000002-12"]
    assert [run.name for run in find([str(file)], tmp_path / "other")] == ["toy-00000001", "toy-00000002-12"]
    assert sorted(run.name for run in runs_in(tmp_path)) == sorted(names)
    assert versions(tmp_path, "toy-11f5f19c") == []
    assert [run.name for run in newest(tmp_path, ["toy-00000002", "toy-00000001", "toy-0000000a"])] == [
        "toy-00000002-12", "toy-00000001", "toy-0000000a",
    ]  # fmt: skip
    with pytest.raises(NoSuchRun, match=file.name):
        find(["toy-11f5f19d.sweep"], tmp_path)
