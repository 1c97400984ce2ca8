"""The table of tools/bench/all.py: made of the rows that benches print, with what failed and what is missing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "tools/bench"


def module(name: str) -> ModuleType:
    """A bench's file, which no package has."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name.removeprefix('bench_')}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


measured = module("measured")
table = module("bench_all")
Row = measured.Row


def told(*rows: object) -> str:
    return "\n".join(["for people", *(json.dumps(row.as_dict()) for row in rows), '{"other": 1}'])  # type: ignore[attr-defined]


def test_what_a_bench_has_printed_is_read_back_as_the_same_rows() -> None:
    rows = [
        Row("step", "by hand", [1.0, 1.5, 2.0], 1.02, note="10 ms"),
        Row("images", "ImageFolder", [5.5], 5.0, better="higher"),
        Row("stall", "dcp.async_save", [0.5], 1.0, below=True),
        measured.missing("step", "Lightning", "lightning is not installed", 1.0),
    ]
    assert measured.parse(told(*rows)) == rows


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (Row("a", values=[1.0, 1.02, 9.0], bound=1.02), True),
        (Row("a", values=[1.03], bound=1.02), False),
        (Row("a", values=[1.0], bound=1.0, below=True), False),
        (Row("a", values=[4.9], bound=5.0, better="higher"), False),
        (Row("a", values=[5.0], bound=5.0, better="higher"), True),
        (Row("a", values=[5.0], bound=5.0, better="higher", below=True), False),
        (Row("a", values=[5.0]), None),
        (measured.missing("a", "b", "not installed", 1.0), None),
    ],
)
def test_a_row_is_within_its_bound_by_its_median(row: object, met: bool | None) -> None:
    assert row.met is met  # type: ignore[attr-defined]


def test_the_table_has_the_spread_the_verdict_the_machine_and_what_is_missing() -> None:
    rows = [
        Row("submission", "bare Submitit", [2.0, 2.5, 3.5], 3.0, note="0.2 against 0.1 s"),
        Row("help", "", [0.25], 0.1, "s"),
        measured.missing("step", "Lightning", "lightning is not installed", 1.0),
    ]
    results = [
        table.Result("submit", rows),
        table.Result("goodput", [], problem="ended after 40 min", busy=0.5),
    ]
    text = table.markdown(results, {"CPU": "two cores", "lightning": "not installed"})
    assert text.startswith("CPU two cores; lightning not installed.\n")
    assert "| submission | bare Submitit | 2.5 (2 to 3.5) | 3 | met | 0.2 against 0.1 s |" in text
    assert "| help |  | 0.25 s | 0.1 s | **missed** |  |" in text
    assert "| step | Lightning | not measured: lightning is not installed | 1 |  |  |" in text
    assert "goodput failed: ended after 40 min; while goodput began, others had 50% of the cores." in text
    assert table.summary(results) == "3 rows: 1 within their bound, 1 not, 1 not measured; 1 of 2 benches failed"


def test_a_bench_that_fails_or_takes_too_long_is_said_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measured.py").write_text((FOLDER / "measured.py").read_text())
    (tmp_path / "good.py").write_text("from measured import Row, tell\ntell(Row('good', '', [1.0], 2.0))\n")
    (tmp_path / "bad.py").write_text(
        "from measured import Row, tell\ntell(Row('half', '', [1.0]))\nraise SystemExit('no')\n"
    )
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    benches = {name: table.Bench(name, f"{name}.py", "", 0.02 if name == "slow" else 1) for name in ("bad", "slow")}
    absent = {"gone": table.Bench("gone", "gone.py", "", 1), "slurm": table.Bench("x", "good.py", "", 1, ["no-such"])}
    monkeypatch.setattr(table, "BENCHES", {**benches, **absent, "good": table.Bench("good", "good.py", "", 1)})
    files = ["--json", str(tmp_path / "b.json"), "--markdown", str(tmp_path / "b.md")]
    assert table.main(["--quick", *files]) == 1
    text = (tmp_path / "b.md").read_text()
    assert capsys.readouterr().out == f"{text}\n"
    assert "| half |" in text and "bad failed: exit code 1: no; slow failed: ended after 0.02 min." in text
    assert "| gone |  | not measured: there is no tools/bench/gone.py |" in text
    assert "| x |  | not measured: no-such not installed |" in text
    assert "| good |  | 1 | 2 | met |  |" in text
    assert [bench["name"] for bench in json.loads((tmp_path / "b.json").read_text())["benches"]][-1] == "good"


NAMES = sorted({bench.command.split()[0] for bench in table.BENCHES.values()} | {"all.py"})


@pytest.mark.parametrize("name", NAMES)
def test_each_bench_of_the_table_says_how_it_is_used(name: str) -> None:
    done = subprocess.run([sys.executable, FOLDER / name, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_no_bench_of_the_table_is_absent() -> None:
    assert [name for name in NAMES if not (FOLDER / name).exists()] == []


def test_cheap_benches_run_in_small(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "b.json"), "--markdown", str(tmp_path / "b.md")]
    command = [sys.executable, FOLDER / "all.py", "--quick", "--only", "list", "evaluate", "checkpoint", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    benches = json.loads((tmp_path / "b.json").read_text())["benches"]
    assert [bench["name"] for bench in benches] == ["list", "evaluate", "checkpoint"]
    assert all(bench["rows"] and not bench["problem"] for bench in benches)
