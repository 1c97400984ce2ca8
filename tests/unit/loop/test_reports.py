"""Curves, repeated steps and losses that are no numbers."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.busy_device import BusyDevice
from harness.ranks import make_rank
from harness.training import logged

from jobkit.errors import UsageError
from jobkit.loop.health import Health
from jobkit.loop.repeated_steps import Repeats, hash_of
from jobkit.loop.reporter import Reporter
from jobkit.run import metrics
from jobkit.run.metrics import EventFile
from jobkit.run.records import Progress
from jobkit.wire.pages import NOTES, Kept, Page, Phase, page_before


def steps(folder: Path, tag: str = "loss") -> list[int]:
    return [step for step, _ in logged(folder, tag)]


def test_a_lost_attempts_points_are_cut_off(tmp_path: Path) -> None:
    file = EventFile(tmp_path, 0)
    for step in range(10):
        file.add(step, metrics.scalar("loss", step))
        if step == 4:
            position = {file.path.name: file.size}
    file.write()
    assert steps(tmp_path) == list(range(10))
    metrics.rewind(tmp_path, position)
    assert steps(tmp_path) == list(range(5))
    metrics.rewind(tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_records_that_a_full_disk_refuses_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    file = EventFile(folder, 0)
    file.add(1, metrics.scalar("loss", 1.0))
    with pytest.raises(OSError, match="No such file"):
        file.write()
    folder.mkdir()
    file.write()
    assert steps(folder) == [1]


def test_a_report_says_since_when_no_step_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make_rank(tmp_path)
    reporter, seen = Reporter(rank), []
    for now, step, phase in (
        (1, 4, Phase.STEPPING),
        (2, 5, Phase.OUTSIDE),
        (3, 5, Phase.OUTSIDE),
        (4, 7, Phase.ENDING),
    ):
        monkeypatch.setattr(time, "time", lambda now=now: float(now))
        rank.beat(step, phase)
        reporter._report()
        progress = rank.run.progress()
        assert progress is not None
        seen.append(progress.outside_since)
    assert seen == [None, 2.0, 2.0, 4.0]


def test_a_reporter_writes_curves_and_progress(tmp_path: Path) -> None:
    rank = make_rank(tmp_path)
    rank.run.tensorboard.mkdir()
    reporter = Reporter(rank)
    reporter.begin(0, None, Repeats(rank.page, None, 0))
    for step in range(3):
        reporter.log(step, {"loss": torch.tensor(0.5), "acc[/top5]": 1})
        reporter.end_step(step)
    position = reporter.position().result()
    reporter.warn("beware")
    reporter.warn("beware")
    reporter.update(step=3)
    reporter.close()
    assert steps(rank.run.tensorboard) == [0, 1, 2]
    assert sum(position.values()) == sum(file.stat().st_size for file in rank.run.tensorboard.iterdir())
    progress = rank.run.progress()
    assert isinstance(progress, Progress)
    assert (progress.step, progress.values, progress.warnings) == (3, {"loss": 0.5, "acc[/top5]": 1.0}, ["beware"])
    assert len(rank.page.notes()) == 3


def test_what_was_logged_before_the_loop_is_in_the_position_of_the_first_checkpoint(tmp_path: Path) -> None:
    rank = make_rank(tmp_path)
    reporter = Reporter(rank)
    reporter.log(0, {"parameters": 6})
    reporter.begin(0, None, None)
    position = reporter.position().result()
    reporter.close()
    again = Reporter(rank)
    again.log(0, {"parameters": 6})
    again.begin(0, position, None)
    again.close()
    assert steps(rank.run.tensorboard, "parameters") == [0]


def test_a_value_that_is_no_number_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="loss"):
        Reporter(make_rank(tmp_path)).log(1, {"loss": torch.ones(2)})


def test_repeated_steps_are_compared_by_their_bits() -> None:
    before, now = Page.create(), Page.create()
    first = Repeats(before, None, 0)
    for step in range(10):
        before.beat(1, before.read().phase, step + 1)
        first.note(step, {"loss": 1.0 / (step + 1), "perf/step_seconds": 0.1})
    again = Repeats(now, before, 6)
    assert again.repeated == 4
    for step in range(6, 12):
        value = 1.0 / (step + 1) + (1e-12 if step == 8 else 0.0)
        again.note(step, {"loss": value, "perf/step_seconds": 0.2})
    assert again.as_dict() == {"repeated": 4, "compared": 4, "differs_at": 8}


def test_steps_are_compared_with_an_attempt_of_as_many_ranks() -> None:
    kept = Kept(with_slots=False)
    reached, later = Page.create(), Page.create()
    reached.beat(1, Phase.STEPPING, 5)
    assert page_before(kept.environment(0, reached, 4)) is None
    before = page_before(kept.environment(0, later, 4))
    assert before is not None
    assert before.read().step == 5
    later.beat(2, Phase.STEPPING, 7)
    assert page_before(kept.environment(0, Page.create(), 2)) is None


def test_any_number_of_attempts_keeps_as_many_files_open() -> None:
    kept, opened = Kept(with_slots=True), []
    for attempt in range(20):
        page = Page.create()
        page.beat(attempt, Phase.STEPPING, attempt)
        kept.environment(0, page, 4 if attempt < 10 else 2)
        page.close()
        opened.append(sum(1 for _ in Path("/proc/self/fd").iterdir()))
    assert opened[5:10] == [opened[5]] * 5
    assert opened[15:] == [opened[5]] * 5


def test_a_page_has_notes_of_the_last_steps() -> None:
    page = Page.create()
    for step in range(NOTES + 5):
        page.note(step, step + 1)
    assert page.notes() == {step: step + 1 for step in range(5, NOTES + 5)}


def test_nan_has_a_hash_and_times_have_none() -> None:
    assert hash_of({"loss": math.nan}) == hash_of({"loss": math.nan, "perf/x": 3.0}) != 0
    assert hash_of({"perf/x": 1.0}) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, torch.tensor(math.nan)])
def test_a_loss_that_is_no_number_names_its_step_and_samples(value: object) -> None:
    health = Health(ignores=False)
    health.see(3, torch.tensor(1.0), lambda: [1])
    assert not health.is_bad()
    health.see(4, value, lambda: [7, 8])
    assert health.is_bad()
    error = health.error
    assert error is not None
    assert (error.step, error.samples) == (4, [7, 8])


def test_a_loss_on_a_device_is_read_once_it_is_there_and_names_the_samples_of_its_own_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, health = BusyDevice(monkeypatch), Health(ignores=False)
    for step in range(3):
        health.see(step, device.tensor(math.nan if step == 1 else 1.0), lambda step=step: [step])  # type: ignore[misc]
        assert not health.is_bad(waits=False)
    assert device.waits == 0
    device.is_done = True
    health.see(3, device.tensor(1.0), lambda: [3])
    assert health.is_bad(waits=False)
    assert health.error is not None
    assert (health.error.step, health.error.samples) == (1, [1])


def test_steps_between_frequent_evaluations_have_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    from jobkit.loop import timing

    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    logged: list[dict[str, float]] = []
    reporter: Any = SimpleNamespace(log_now=lambda step, values: logged.append(values))
    loader: Any = SimpleNamespace(global_batch_size=64, epoch=0.5)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.25)
    clock = timing.Timing(reporter, torch.device("cpu"), [loader], lambda: [optimizer])
    clock.begin(0)
    for step in (5, 10, 15):
        now[0] += 0.5
        clock.measure(step)
        clock.report(step)
        now[0] += 30.0  # an evaluation
        clock.begin(step)
    shown = {"step_seconds": 0.1, "samples_per_second": 640.0, "epoch": 0.5, "lr": 0.25}
    assert logged == [{f"perf/{name}": value for name, value in shown.items()}]


def test_only_from_step_to_step_it_is_a_step_that_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    page, times = Page.create(), iter([0.0, 2.0, 2.0, 600.0])
    monkeypatch.setattr("jobkit.wire.pages.time.monotonic", lambda: next(times))
    for phase in (Phase.STEPPING, Phase.STEPPING, Phase.ENDING, Phase.STEPPING):
        page.beat(1, phase, 3)
    assert page.read().slowest == 2.0


def test_an_attempt_that_came_to_no_step_is_passed_over_by_comparisons() -> None:
    kept, first, second, third = Kept(with_slots=False), Page.create(), Page.create(), Page.create()
    kept.environment(0, first, 2)
    first.beat(1, Phase.STEPPING, 5)
    kept.environment(0, second, 2)  # it dies in its imports
    before = page_before(kept.environment(0, third, 2))
    assert before is not None and before.read().step == 5


def test_each_attempt_goes_on_in_a_file_of_its_own_and_all_of_them_stay(tmp_path: Path) -> None:
    rank, position = make_rank(tmp_path), None
    for attempt in range(3):
        reporter = Reporter(rank)
        reporter.begin(2 * attempt, position, None)
        for step in range(2 * attempt, 2 * attempt + 2):
            reporter.log(step, {"loss": 1.0})
            reporter.end_step(step)
        position = reporter.position().result()
        reporter.close()
    assert sorted(steps(rank.run.tensorboard)) == list(range(6))
