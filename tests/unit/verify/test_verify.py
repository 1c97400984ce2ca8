"""Plans and comparisons of `jobkit verify`, as tables."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness.journals import began, ended, finished, make_run, submitted

from jobkit.cli.main import main
from jobkit.cli.verify import _run_and_step, shortened
from jobkit.config.load import load
from jobkit.run.records import Interruption, InterruptionKind
from jobkit.run.rundir import RunDir
from jobkit.submission.plan import LaunchPlan, Target
from jobkit.verify.compare import Excused, TraceLine, course_of, differing, first_difference, repeated_steps, seen
from jobkit.verify.explain import difference_lines, interruption_words
from jobkit.verify.plan import KINDS, Course, interruptions
from jobkit.verify.runs import Report, Verification


def test_every_kind_has_a_place_in_twenty_steps() -> None:
    course = Course(first=0, last=20, evaluations=(0, 6, 12, 18, 20), epoch_ends=(6, 12, 18))
    items = interruptions(course)
    assert [item.attempt for item in items] == [1, 2, 3, 4, 5]
    assert {item.kind for item in items} == set(KINDS)
    places = [item.at for item in items]
    assert all(after - before >= 2 for before, after in pairwise(places))


@pytest.mark.parametrize("last", range(4, 30))
@pytest.mark.parametrize("first", [0, 40])
def test_interruptions_lie_within_the_steps(first: int, last: int) -> None:
    course = Course(first=first, last=first + last, evaluations=(first, first + 3), epoch_ends=(first + 3,))
    for item in interruptions(course):
        assert first < item.at - 1
        assert item.at < first + last


@pytest.mark.parametrize(
    ("course", "begins"),
    [
        (Course(first=0, last=20), 0),
        (Course(first=0, last=20, epoch_ends=(7, 14)), 14),
        (Course(first=0, last=20, evaluations=(0, 7, 14, 20)), 14),
        (Course(first=40, last=52, epoch_ends=(44, 48)), 48),
    ],
)
def test_a_stop_lies_within_the_last_pass_and_a_kill_early(course: Course, begins: int) -> None:
    at = {item.kind: item.at for item in interruptions(course)}
    assert begins < at["stop"] < course.last
    assert at["memory"] == course.first + 2


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_words(kind: InterruptionKind) -> None:
    assert "after 3" in interruption_words(Interruption(attempt=1, at=3, kind=kind))


MODEL, GENERATOR = "model.weight", "jobkit.generators.torch"


def place(step: int, event: Any = "boundary", attempt: int = 1, **fields: Any) -> TraceLine:
    state = {"model.weight": f"m{step}", "jobkit.generators.torch": f"g{step}"}
    values = {"loss": (b"%08d" % step).hex()} if event == "boundary" else {}
    return TraceLine(
        **{"rank": 0, "attempt": attempt, "step": step, "event": event, "state": state, "values": values} | fields
    )


STRAIGHT = [
    place(0, "restored"),
    *(place(step, samples=[step]) for step in range(1, 7)),
    place(6, "end", result={"x": 1}),
]
INTERRUPTED = [
    *STRAIGHT[:4],
    place(2, "restored", 2),
    *(place(step, attempt=2, samples=[step]) for step in range(3, 7)),
    place(6, "end", 2, result={"x": 1}),
]

CHANGES: dict[str, tuple[int, dict[str, Any], tuple[str, str]]] = {
    "a restored state": (4, {"state": {MODEL: "?", GENERATOR: "g2"}}, ("restored state", MODEL)),
    "samples": (6, {"samples": [9]}, ("samples", "")),
    "a value": (6, {"values": {"loss": (b"x" * 8).hex()}}, ("values", "loss")),
    "the generators": (6, {"state": {MODEL: "?", GENERATOR: "?"}}, ("generators", GENERATOR)),
    "a state": (6, {"state": {MODEL: "?", GENERATOR: "g4"}}, ("state", MODEL)),
    "the result": (9, {"result": {"x": 2}}, ("result", "x")),
    "the end": (9, {"step": 8}, ("end", "")),
    "the state at the end": (9, {"state": {MODEL: "?", GENERATOR: "g6"}}, ("state", MODEL)),
}


def test_equal_runs_have_no_difference() -> None:
    assert first_difference({0: STRAIGHT}, {0: INTERRUPTED}) is None
    assert repeated_steps({0: INTERRUPTED}) == 1


@pytest.mark.parametrize("name", CHANGES)
def test_the_first_difference_is_named(name: str) -> None:
    number, change, expected = CHANGES[name]
    changed = list(INTERRUPTED)
    changed[number] = replace(changed[number], **change)
    difference = first_difference({0: STRAIGHT}, {0: changed})
    assert difference is not None
    assert (difference.kind, difference.name) == expected
    assert difference.line is changed[number]
    lines = difference_lines(difference, [])
    assert name not in ("samples", "a value") or ("4 steps done" in lines[0] and "step 3" in lines[1])


def test_of_several_differences_the_earliest_is_named() -> None:
    def changed_after(step: int) -> list[TraceLine]:
        return [replace(item, state={**item.state, MODEL: "?"}) if item.step > step else item for item in INTERRUPTED]

    second = {0: changed_after(4), 1: changed_after(3), 2: changed_after(5)}
    difference = first_difference(dict.fromkeys(second, STRAIGHT), second)
    assert difference is not None
    assert (difference.line.step, difference.line.attempt, difference.name) == (4, 2, MODEL)


def test_values_that_two_straight_runs_log_differently_are_ignored() -> None:
    again = [replace(item, values=dict.fromkeys(item.values, "00" * 8)) for item in STRAIGHT]
    excused = differing({0: STRAIGHT}, {0: again})
    assert excused == Excused(values=frozenset({"loss"}))
    assert excused == differing({0: STRAIGHT, 1: STRAIGHT}, {0: STRAIGHT, 1: again})
    assert first_difference({0: STRAIGHT}, {0: again}, excused) is None
    assert "logged values" in seen({0: STRAIGHT})
    assert "logged values" not in seen({0: STRAIGHT}, excused), "what was not compared is not said to be equal"


def test_times_in_results_and_values_accuse_nobody() -> None:
    def timed(places: list[TraceLine], seconds: float) -> list[TraceLine]:
        *steps, end = places
        timed_steps = [replace(item, state={**item.state, "values.began": str(seconds)}) for item in steps]
        return [*timed_steps, replace(end, result={"x": 1, "seconds": seconds})]

    traces = [{0: timed(places, number)} for number, places in enumerate([STRAIGHT, INTERRUPTED, STRAIGHT])]
    excused = differing(traces[0], traces[2])
    assert excused == Excused(leaves=frozenset({"values.began"}), results=frozenset({"seconds"}))
    assert first_difference(traces[0], traces[2], excused) is None
    assert first_difference(traces[0], traces[1], excused) is None
    changed = [replace(item, state={**item.state, "values.best": "?"}) for item in traces[1][0]]
    assert first_difference(traces[0], {0: changed}, excused), "a time takes no other value out of the comparison"


def test_the_course_of_a_straight_run() -> None:
    places = [place(0, "restored"), place(1), place(2, epoch=1), place(2, "evaluated", epoch=1), place(3, epoch=1)]
    assert course_of({0: places}) == Course(first=0, last=3, evaluations=(2,), epoch_ends=(2,))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Verification]:
    """The verifications of a project with exp.yaml, where training takes no time; of 7 steps the runs differ."""
    made: list[Verification] = []

    def run(self: Verification) -> Report:
        made.append(self)
        (self.runs_dir / ".code" / "0123").mkdir(parents=True)
        return Report(equal=self.steps != 7)

    monkeypatch.setattr(Verification, "run", run)
    monkeypatch.chdir(tmp_path)
    Path("exp.yaml").write_text("name: test\ncommand: ['true']\nclusters: {h100: {partition: big}}\n")
    return made


@pytest.mark.parametrize(("steps", "code"), [("7", 1), ("8", 0)])
def test_the_exit_code_says_whether_the_runs_are_equal(made: list[Verification], steps: str, code: int) -> None:
    assert main(["verify", "exp.yaml", "--local", "--steps", steps]) == code
    (noted,) = Path("runs/.verified").iterdir()
    assert json.loads(noted.read_text())["equal"] is (code == 0)


def a_run(*steps: int) -> RunDir:
    """Return a finished run of 100 steps with checkpoints, and with its code."""
    code = Path("runs/.code/0123").absolute()
    code.mkdir(parents=True)
    events = submitted(code="0123"), began(), ended(last_step=100), finished()
    run = make_run(code.parents[1], "test-11f5f19c", *events)
    run.config_file.write_text("name: test\ncommand: ['true']\nparams: {lr: 1}\n")
    run.code.symlink_to(code)
    for step in steps:
        run.checkpoint(step).mkdir(parents=True)
    return run


def test_a_run_with_other_values_is_not_the_one_that_was_verified(made: list[Verification]) -> None:
    run = a_run()
    assert main(["verify", run.name, "params.lr=2", "--local"]) == 0
    (noted,) = Path("runs/.verified").iterdir()
    assert not noted.stem.endswith("11f5f19c")


@pytest.mark.parametrize(("steps", "begin"), [(20, 80), (10, 90), (100, 0)])
def test_a_run_is_verified_from_a_checkpoint_that_leaves_so_many_steps(
    made: list[Verification], steps: int, begin: int
) -> None:
    run = a_run(40, 80, 90)
    assert _run_and_step(run.name, run.path.parent, steps)[1] == begin


@pytest.mark.parametrize("option", ["--local", "--cluster", "--runs-dir", "--steps", "--ranks"])
def test_an_option_of_verify(made: list[Verification], tmp_path: Path, option: str) -> None:
    options = {
        "--local": [],
        "--cluster": ["h100"],
        "--runs-dir": ["elsewhere", "--local"],
        "--steps": ["9", "--local"],
        "--ranks": ["3", "--local"],
    }
    assert main(["verify", "exp.yaml", option, *options[option]]) == 0
    assert made[0].target.scheduler == ("slurm" if option == "--cluster" else "local")
    assert made[0].steps == (9 if option == "--steps" else 20)
    assert (made[0].ranks, made[0].target.entry.get("tasks_per_node")) == (
        (3, 3) if option == "--ranks" else (None, None)
    )
    assert made[0].runs_dir.is_relative_to(tmp_path / ("elsewhere" if option == "--runs-dir" else "runs"))


def test_a_snapshot_of_a_framework_with_files_is_a_checkpoint_in_the_words(tmp_path: Path) -> None:
    values: Any = {"loaded": None, "folder": None, "runs_dir": tmp_path, "target": None, "steps": 20}
    items = [Interruption(attempt=1, at=5, kind="memory"), Interruption(attempt=2, at=9, kind="stop")]
    for has_files, kinds in ((False, {"memory", "stop"}), (True, {"disk", "stop"})):
        assert {item.kind for item in Verification(**values, _has_files=has_files)._as_done(items)} == kinds


def test_params_of_verify_reach_the_command_and_typed_ones_come_last(tmp_path: Path) -> None:
    file = tmp_path / "exp.yaml"
    file.write_text(
        "name: test\ncommand: [python, train.py, '--steps=${params.steps}']\n"
        "params: {steps: 500, lr: 0.1, model: {dim: 8, depth: 3}}\n"
        "verify: {params: {steps: 15, lr: 0.5, model: {dim: 2}}}\n"
    )
    config = shortened(file, ["params.lr=0.9"]).config
    assert config.command[-1] == "--steps=15"
    assert config.params == {"steps": 15, "lr": 0.9, "model": {"dim": 2, "depth": 3}}


@pytest.mark.parametrize(
    ("ranks", "divides", "asked", "expected"),
    [
        (2, True, None, 3),
        (2, False, None, 2),
        (2, None, None, 2),
        (1, True, None, 1),
        (4, True, None, 4),
        (2, True, 2, 2),
    ],
)
def test_two_ranks_become_three_where_the_batch_divides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, divides: bool | None, asked: int | None, expected: int
) -> None:
    def trace(self: Verification, name: str, items: Any) -> dict[int, list[TraceLine]]:
        count = self.target.entry.get("tasks_per_node", ranks)
        return {rank: [place(0, "restored", divides_by_three=divides)] for rank in range(count)}

    monkeypatch.setattr(Verification, "_trace", trace)
    values: Any = {"loaded": None, "folder": None, "runs_dir": tmp_path, "steps": 20, "ranks": asked}
    said: list[str] = []
    made = Verification(target=Target("local", "local", {}), say=said.append, **values)
    assert len(made._straight()) == expected
    assert any("--ranks 3" in line for line in said) == (ranks == 2 == expected and divides is not None)


def test_each_run_of_a_verification_has_another_hash_seed_and_is_copied_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml = tmp_path / "toy.yaml"
    yaml.write_text("name: toy\ntask: toy:train\nmirror: {wandb: {}}\nafter: [toy-11f5f19c]\n")
    seeds: list[str] = []

    def submit(plan: LaunchPlan, *_: Any, **__: Any) -> None:
        assert (plan.loaded.written["mirror"]["wandb"], plan.loaded.written["after"]) == (None, [])
        seeds.append(os.environ["PYTHONHASHSEED"])
        raise KeyboardInterrupt

    monkeypatch.setattr("jobkit.submission.transaction.submit", submit)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    target = Target("local", "local", {})
    made = Verification(loaded=load(yaml), folder=tmp_path, runs_dir=tmp_path, target=target, steps=9)
    for name in ("straight", "interrupted", "straight-again"):
        with pytest.raises(KeyboardInterrupt):
            made._trace(name, [])
    assert len(set(seeds)) == 3
