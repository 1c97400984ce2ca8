"""The report's page: what it shows of runs made of files, and that nothing in those files becomes markup."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from harness.journals import START, began, ended, finished, make_run, submitted

from jobkit.cli.main import main
from jobkit.config.yamlfile import dump
from jobkit.report import charts
from jobkit.report.logged import Series, stretches
from jobkit.report.page import page
from jobkit.run.accounting import Account
from jobkit.run.metrics import EventFile, image, scalar
from jobkit.run.rundir import RunDir
from jobkit.run.view import views

NAN, INFINITY = math.nan, math.inf
HOSTILE = "\"'><script>alert(1)</script><img src=http://x onerror=alert(2)>&amp;</title></style></svg>{{ 7 * 7 }}"


class Parsed(HTMLParser):
    """A page as a browser sees it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.css, self._in_style = "", "", False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.css += data
        else:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False


def series(*values: float, steps: Sequence[int] = ()) -> Series:
    made = Series()
    made.steps.extend(steps or range(len(values)))
    made.values.extend(values)
    return made


@pytest.mark.parametrize(
    ("values", "count", "expected"),
    [
        ([], 4, []),
        ([1, 3, 2], 4, [[(0, 0, 1, 1, 1), (1, 1, 3, 3, 3), (2, 2, 2, 2, 2)]]),
        ([1, 3, -8, 2, 5, 5], 2, [[(0, 2, -8, -4 / 3, 3), (3, 5, 2, 4, 5)]]),
        ([1, NAN, 2, INFINITY], 4, [[(0, 0, 1, 1, 1)], [(2, 2, 2, 2, 2)]]),
        ([1, NAN, 2, 4, NAN, NAN], 3, [[(0, 1, 1, 1, 1), (2, 3, 2, 3, 4)]]),
        ([NAN, -INFINITY], 1, []),
    ],
)
def test_stretches_keep_the_range_and_the_mean(values: list[float], count: int, expected: object) -> None:
    assert [[tuple(item) for item in piece] for piece in stretches(series(*values), count)] == expected


def test_stretches_are_equal_parts_of_the_steps() -> None:
    curve = series(1, 2, 3, 4, steps=[0, 1, 2, 1000])
    assert [(s.first, s.last) for s in stretches(curve, 3)[0]] == [(0, 2), (1000, 1000)]


@pytest.mark.parametrize(
    "values", [(1.0,), (NAN,), (0.0, 0.0), (-3e38, 3e38), (1e-45, 1.0), (1e8, 1e8 + 8), (-2.0, 5.0), (1e5, 1, 1, 1)]
)
def test_a_chart_holds_any_values(values: tuple[float, ...]) -> None:
    svg = charts.curves("tag", [(0, series(*values))])
    assert "nan" not in svg and "inf" not in svg
    assert len(svg) < 4000


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_number_that_is_none_has_a_text(value: float) -> None:
    assert charts.number(value).strip("\N{MINUS SIGN}") in ("nan", "inf")


def test_texts_in_pictures_are_escaped() -> None:
    account = Account(attempt=1, began=5.0, until=9.0, queue=1.0, starting=1.0, useful=3.0, first_step=0, last_step=3)
    curves = charts.curves(HOSTILE, [(number, series(1, 2)) for number in range(2)])
    for svg in (curves, charts.timeline([(HOSTILE, [account], [HOSTILE])])):
        parsed = Parsed(str(svg))
        assert {tag for tag, _ in parsed.tags} <= {"svg", "path", "text", "rect", "title"}
        assert HOSTILE in parsed.text or parsed.tags[0][1]["aria-label"] == HOSTILE


def test_labels_tell_neighbours_apart() -> None:
    axis = charts._axis([1e8, 1e8 + 8])
    assert 3 <= len({label for _, label in axis.ticks}) == len(axis.ticks)


def test_time_without_attempts_is_drawn_short() -> None:
    day = 86400.0
    knots = charts._without_idle([(0, 60), (30, 90), (day, day + 60)])
    assert knots[-1] == (day + 60, pytest.approx(90 + 60 + 6))  # 6: a thirtieth of all spans


def failed_run(runs_dir: Path, name: str = "toy-11f5f19c", lr: float = 0.1) -> RunDir:
    """A run whose every text is hostile."""
    fault = {"error": f"rank 0: ValueError: {HOSTILE}", "traceback": f"Traceback\n{HOSTILE}\n", "samples": [17, 404]}
    ends = {"first_step": 0, "last_step": 40, "loop_began": START + 6, "last_seen": START + 50, "step": 41, "rank": 0}
    again = {"first_step": 20, "loop_began": START + 67, "last_seen": START + 90}
    run = make_run(
        runs_dir,
        name,
        submitted(folder=HOSTILE, host=HOSTILE, code="0fe96acaa56e"),
        began(),
        ended("crashed", "in_place", **ends, **fault),
        began(2, START + 61, how="in place", nodes=[HOSTILE]),
        ended("crashed", "fail", 2, START + 99, reason=f"crashed: {HOSTILE}", **(ends | again), **fault),
    )
    values = {"name": "toy", "params": {"lr": lr, "text": HOSTILE, "secret": "${oc.env:HOME}"}, "seed": 0}
    run.config_file.write_text(dump(values), encoding="utf-8")
    run.tensorboard.mkdir()
    events = EventFile(run.tensorboard, 0)
    for step in range(1000):
        events.add(step, scalar(f"loss {HOSTILE}", NAN if 5 <= step < 10 else lr * step))
    events.add(500, image(f"samples {HOSTILE}", torch.zeros(3, 8, 8)))
    events.add(600, image("too large", torch.randint(0, 256, (3, 640, 640), dtype=torch.uint8)))
    events.write()
    return run


def test_nothing_that_a_run_holds_becomes_markup(tmp_path: Path) -> None:
    html = page(views([failed_run(tmp_path), failed_run(tmp_path, "toy-22f5f19c", lr=0.2)]), START + 100)
    parsed = Parsed(html)
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "form", "base", "a"}
    for tag, attributes in parsed.tags:
        assert not [key for key in attributes if key.startswith("on") or key in ("style", "href")], (tag, attributes)
        assert (attributes.get("src") or "data:image/png;").startswith("data:image/png;")
    digest = base64.b64encode(hashlib.sha256(parsed.css.encode()).digest()).decode()
    policy = next(value["content"] or "" for tag, value in parsed.tags if value.get("http-equiv"))
    assert policy.startswith(f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'")
    assert parsed.text.count(f"loss {HOSTILE}") == 1
    for text in (f"Traceback\n{HOSTILE}", "17, 404", "${oc.env:HOME}", "0fe96acaa56e"):
        assert text in parsed.text
    assert str(Path.home()) not in html or str(Path.home()) == "/"
    assert sum(tag == "img" for tag, _ in parsed.tags) == 2
    assert "too large of lr=0.1" in parsed.text


def test_every_picture_is_drawn_by_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, draw = [], charts.chart

    def counted(*arguments: object) -> object:
        calls.append(arguments[0])
        return draw(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(charts, "chart", counted)
    html = page(views([failed_run(tmp_path)]), START + 100)
    assert len(calls) == html.count("<svg") == 2
    assert 'class="repeated"' in html  # steps 20 to 40
    assert html.count('<path class="band') == 2  # a stretch without a finite value parts the curve
    assert "5 of 1000 points not finite, first at step 5" in html


def test_differing_keys_come_first(tmp_path: Path) -> None:
    html = page(views([failed_run(tmp_path), failed_run(tmp_path, "toy-22f5f19c", lr=0.2)]), START + 100)
    shown, _, folded = html[html.index("<h2>Config") :].partition("<details>")
    assert "params.lr" in shown and "seed" not in shown
    assert "seed" in folded and "params.lr" not in folded


def test_runs_in_all_states_have_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = make_run(tmp_path, "toy-11f5f19c", submitted())
    done = make_run(tmp_path, "toy-22f5f19c", submitted(), began(), ended(last_step=3), finished({"loss": {"a": 0.25}}))
    assert main(["report", new.name, "--runs-dir", str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()) == new.path / "report.html"
    lost = make_run(tmp_path, "toy-33f5f19c", submitted(), began())  # its attempt has no end
    assert main(["report", new.name, done.name, lost.name, "--runs-dir", str(tmp_path)]) == 0
    assert "0.25" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert main(["status", "*", "--runs-dir", str(tmp_path)]) == 0  # the page is no run


@pytest.mark.parametrize("option", ["--output", "--open"])
def test_an_option_of_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    run, page = make_run(tmp_path, "toy-11f5f19c", submitted()), tmp_path / "x.html"
    words = ["report", run.name, "--runs-dir", str(tmp_path)]
    if option == "--open":
        assert main([*words, option]) == 0
        assert opened == [(run.path / "report.html").as_uri()]
    else:
        assert main([*words, option, str(page)]) == 0
        assert (page.exists(), (run.path / "report.html").exists(), opened) == (True, False, [])
        assert main([*words, option, str(tmp_path / "none" / "x.html")]) == 2
