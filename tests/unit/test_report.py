"""The page of `jobkit report`: what is in it, where it is drawn, and that nothing of a run is anything but text."""

from __future__ import annotations

import ast
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from harness import in_process
from harness.made_run import BEGAN, hostile, made_run
from harness.project import Project
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jobkit.report import charts
from jobkit.report.logged import read
from jobkit.report.page import _unique, collect, page
from jobkit.report.timeline import LABELS, MARGIN, WIDTH, Row, duration, timeline
from jobkit.run.rundir import RunDir
from jobkit.run.status import apply


def page_of(*runs: RunDir) -> str:
    return page([collect(run, run.status()) for run in runs])


class Elements(HTMLParser):
    """The elements of a page, the addresses that it loads something from, and its texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data", "xlink:href"):
                self.addresses.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


# What was logged


def test_curves_are_what_tensorboard_reads_itself(tmp_path: Path) -> None:
    run = made_run(tmp_path / "made-00000000")
    theirs = EventAccumulator(str(run.tensorboard), {"scalars": 0}).Reload()
    found = read(run.tensorboard)
    assert set(found.scalars) == set(theirs.Tags()["scalars"])
    for tag, points in found.scalars.items():
        assert str(list(points.items())) == str([(one.step, one.value) for one in theirs.Scalars(tag)])
    assert found.images["plain"].type == "image/png"
    assert found.images["plain"].data == theirs.Images("plain")[-1].encoded_image_string


@pytest.mark.parametrize("damage", [b"half", struct.pack("<QI", 1 << 60, 0), struct.pack("<QI", 3, 0) + b"\xff" * 7])
def test_what_is_not_whole_is_left_out(tmp_path: Path, damage: bytes) -> None:
    run = made_run(tmp_path / "made-00000000")
    before = read(run.tensorboard)
    (file,) = run.tensorboard.iterdir()
    with file.open("ab") as stream:
        stream.write(damage)
    assert str(read(run.tensorboard)) == str(before)


# Charts


def test_a_long_curve_keeps_its_spikes_and_its_ends() -> None:
    points = [(step, 1.0) for step in range(10_000)]
    points[4321] = (4321, 50.0)
    points[8765] = (8765, -3.0)
    kept = charts.thinned(points, 100)
    assert len(kept) <= 100
    assert {points[0], points[4321], points[8765], points[-1]} <= set(kept)
    assert kept == sorted(kept)


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([1.0, 0.5], False), ([1.0, 0.005], True), ([1.0, 0.005, 0.0], False), ([-1.0, -200.0], False), ([], False)],
)
def test_an_axis_is_logarithmic_where_values_are_far_apart(values: list[float], is_log: bool) -> None:
    assert charts.chart("loss", {0: dict(enumerate(values))}).is_log is is_log


@pytest.mark.parametrize(
    "values",
    [
        [],
        [3.0],
        [2.0, 2.0],
        [float("nan")],
        [float("inf"), 1.0, float("-inf")],
        [1e308, -1e308],
        [1e-320, 1e308],
        [0.0, 5e-324],
    ],
    ids=str,
)
def test_any_values_are_drawn_within_the_frame(values: list[float]) -> None:
    chart = charts.chart("loss", {0: dict(enumerate(values))})
    numbers = [float(one) for curve in chart.curves for one in re.split("[ ,]", curve.line) if one]
    assert all(0 <= one <= charts.WIDTH for one in numbers)
    assert all(0 <= tick.at <= charts.WIDTH for tick in (*chart.x_ticks, *chart.y_ticks))
    assert chart.curves[0].not_finite == sum(1 for one in values if abs(one) == float("inf") or one != one)


# The timeline


def parts(row: Row) -> list[tuple[str, float]]:
    """(part, its seconds), by the widths drawn of a run of 150 s."""
    scale = 150 / (WIDTH - LABELS - MARGIN)
    return [(piece.part, round(piece.width * scale)) for piece in row.pieces]


def test_each_part_of_an_attempt_is_as_long_as_it_took(tmp_path: Path) -> None:
    run = made_run(tmp_path / "made-00000000")
    found = timeline(run.status(), run.journal.read())
    assert found is not None
    first, second = found.rows
    # Steps 40 to 60 of the 60 that it had done were lost: a third of the time of its loop.
    assert parts(first) == [("queue", 5), ("start", 10), ("load", 5), ("train", 40), ("lost", 20), ("end", 2)]
    assert parts(second) == [("restart", 6), ("load", 2), ("train", 60)]
    assert [text for _, text in first.checkpoints] == ["checkpoint of step 40, 1.5 s"]
    assert first.end is not None
    assert first.end[1] == "killed at step 60"


def test_days_in_which_nothing_was_under_way_are_drawn_short(tmp_path: Path) -> None:
    run = made_run(tmp_path / "made-00000000", state="running")
    run.journal.append("interrupted", attempt=2, cause="user", step=80)
    status = run.status()
    status.attempts[1].ended = BEGAN + 150
    again = BEGAN + 3 * 86400
    for event, seconds, fields in (
        ("submitting", 0, {"cluster": "h100", "scheduler": "slurm"}),
        ("started", 10, {"attempt": 3, "job_id": "8"}),
        ("resumed", 20, {"attempt": 3, "step": 80}),
        ("finished", 50, {"attempt": 3, "step": 100}),
    ):
        apply(status, {"time": again + seconds, "event": event, **fields})
    found = timeline(status, run.journal.read())
    assert found is not None
    assert [text for _, text in found.breaks] == ["2 d 23 h"]
    assert all(LABELS <= piece.x <= piece.x + piece.width <= WIDTH for row in found.rows for piece in row.pieces)
    (busy,) = [piece.width for piece in found.rows[2].pieces if piece.part == "train"]
    assert busy > 100


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.42, "0.42 s"), (59.6, "1 min"), (200, "3 min 20 s"), (18600, "5 h 10 min"), (180000, "2 d 2 h")],
)
def test_times_are_written_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# The page


def test_a_page_says_how_the_run_is_and_what_to_type(tmp_path: Path) -> None:
    run = made_run(tmp_path / "made-00000000", "here")
    html = page_of(run)
    for said in (
        "ValueError: here",
        "step 77",
        "0123456789ab",
        "~ here.py",
        "3.11.7",
        "rank 1 on here (1 times, up to 5.0 times the median)",
        "Excluded nodes: here",
        "restart: notice",
        f"jobkit submit here --runs-dir {tmp_path}   (in here)",
        "-m jobkit logs made-00000000",
        "1 values of train/loss",
    ):
        assert said in html, said


def test_several_runs_are_side_by_side_and_what_differs_is_marked(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"made-{lr}", lr=lr, state="finished") for lr in (0.1, 0.3)]
    html = page_of(*runs)
    differing = re.findall(r'<tr class="differs"><th scope="row">([^<]+)</th>', html)
    assert set(differing) == {"params.lr"}
    (chart,) = re.findall(r"<figcaption>train/loss.*?</figure>", html, re.DOTALL)
    assert chart.count("<polyline") == 2
    assert "lr=0.1" in html
    assert "lr=0.3" in html


def test_no_two_runs_of_a_page_are_called_alike() -> None:
    runs = [("lr=1", "a-0000000a"), ("lr=1", "a-0000000b"), ("lr=2", "a-0000000c"), ("", "a-0000000d")]
    assert _unique(runs) == ["lr=1, 0000000a", "lr=1, 0000000b", "lr=2", "a-0000000d"]
    assert _unique([("", "a-0000000a"), ("", "a-0000000a-2"), ("", "a-0000000a")]) == [
        "a-0000000a", "a-0000000a-2", "a-0000000a (2)"
    ]  # fmt: skip


def test_nothing_of_a_run_is_anything_but_text(tmp_path: Path) -> None:
    plain = Elements(page_of(made_run(tmp_path / "plain" / "made-00000000", "plain")))
    bad = hostile("text")
    run = made_run(tmp_path / "bad" / "made-<b>&'\"", bad)
    found = Elements(page_of(run))
    assert found.names == plain.names
    assert found.handlers == []
    assert "".join(found.texts).count(bad) >= 15


def test_a_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    html = page_of(made_run(tmp_path / "made-00000000"), made_run(tmp_path / "made-00000001", state="running"))
    found = Elements(html)
    assert found.addresses
    assert all(address.startswith("data:image/png;base64,") for address in found.addresses)
    assert "http:" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in html
    assert "@import" not in html
    assert "url(" not in html


def test_secret_values_are_not_on_a_page(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.submit("--local", "+params.api_token=abcdef123", "params.steps=3", "resources.tasks_per_node=1")
    (path,) = project.runs
    in_process.jobkit(project, "report", path.name)
    html = (path / "report.html").read_text()
    assert "params.api_token" in html
    assert "abcdef123" not in html
    assert "torch" in html


# The command


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    made_run(tmp_path / "runs" / "made-00000000")
    made_run(tmp_path / "runs" / "made-00000001", state="finished")
    return project


def test_the_page_is_in_the_run_directory_or_beside_the_runs(project: Project) -> None:
    runs = project.path / "runs"
    assert in_process.jobkit(project, "report", "made-00000000").stdout.split() == [
        str(runs / "made-00000000/report.html")
    ]
    done = in_process.jobkit(project, "report", "made-00000000", "made-00000001")
    assert done.stdout.split() == [str(runs / "report.html")]
    done = in_process.jobkit(project, "report", "made-00000000", "-o", "mine.html")
    assert (project.path / "mine.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "no/folder/x.html"], "no/folder/x.html: No such file or directory; give another file with -o"),
        (["-o", "runs"], "that is a folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_a_line(project: Project, arguments: list[str], said: str) -> None:
    done = in_process.jobkit(project, "report", "made-00000000", *arguments, expect=2)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_a_report_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, jobkit.cli.report, jobkit.report.page; print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "safetensors", "tensorflow"} & set(ast.literal_eval(done.stdout))
