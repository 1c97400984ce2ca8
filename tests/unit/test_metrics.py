"""However often a run is broken off, its curves have each step exactly once."""

from __future__ import annotations

import errno
import io
import math
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from jobkit.worker.losses import LossWatch
from jobkit.worker.metrics import MetricLog, rewind


def written(folder: Path) -> Iterator[tuple[str, int, Any]]:
    """(tag, step, value) in the order in which the event files hold them."""
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                yield value.tag, event.step, make_ndarray(value.tensor)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for tag, step, value in written(folder):
        found[tag].append((step, float(value)))
    return dict(found)


def log(folder: Path, first_step: int = 0) -> MetricLog:
    return MetricLog(folder, first_step, lambda latest: None)


def attempt(folder: Path, first: int, stop: int, position: Mapping[str, int], save_at: int) -> dict[str, int]:
    """Log steps [first, stop) as an attempt does that resumes at `position`; the position after step `save_at`."""
    rewind(folder, position)
    metrics, mark = log(folder, first), None
    for step in range(first, stop):
        metrics.scalars(step, {"loss": 100.0 - step, "lr": torch.tensor(0.5)})
        if step + 1 == save_at:
            mark = metrics.mark()
    metrics.close()
    return mark.result(timeout=10) if mark else dict(position)


def test_a_position_is_the_size_of_the_files_after_all_that_was_logged_before(tmp_path: Path) -> None:
    metrics = log(tmp_path)
    metrics.scalars(0, {"loss": 1.0})
    first = metrics.mark()
    metrics.scalars(1, {"loss": 2.0})
    second = metrics.mark().result(timeout=10)
    ((name, size),) = second.items()
    assert first.result(timeout=10)[name] < size == (tmp_path / name).stat().st_size
    metrics.close()
    rewind(tmp_path, first.result())
    assert curves(tmp_path) == {"loss": [(0, 1.0)]}


def test_a_position_counts_for_memory_only_once_the_disk_has_all_before_it(tmp_path: Path) -> None:
    metrics = log(tmp_path)
    metrics.scalars(1, {"loss": 1.0})
    position = metrics.on_disk(metrics.mark().result(timeout=60))
    assert position == {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    (name,) = position
    with pytest.raises(OSError, match="not all on the disk"):
        metrics.on_disk({name: position[name] + 1})
    metrics.close()


def test_after_a_rewind_every_step_is_there_exactly_once(tmp_path: Path) -> None:
    # Saved after 4 steps and lost at 7; saved after 10 and lost at 10; lost before its first checkpoint; to the end.
    position = attempt(tmp_path, 0, 7, {}, save_at=4)
    position = attempt(tmp_path, 4, 10, position, save_at=10)
    attempt(tmp_path, 10, 13, position, save_at=99)
    attempt(tmp_path, 10, 20, position, save_at=20)
    for values in curves(tmp_path).values():
        assert [step for step, _ in values] == list(range(20))
    assert curves(tmp_path)["loss"] == [(step, 100.0 - step) for step in range(20)]


def test_any_sequence_of_interruptions_leaves_one_unbroken_curve(tmp_path: Path) -> None:
    chosen = random.Random(0)
    saved, position = 0, {}
    for _ in range(8):
        reached = chosen.randint(saved + 1, saved + 6)
        save_at = chosen.randint(saved, reached)
        position = attempt(tmp_path, saved, reached, position, save_at=save_at)
        saved = max(saved, save_at)
    attempt(tmp_path, saved, saved + 3, position, save_at=0)
    assert [step for step, _ in curves(tmp_path)["loss"]] == list(range(saved + 3))


def test_without_a_position_everything_is_written_again(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 5, {}, save_at=0)
    rewind(tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_a_rewind_leaves_files_that_are_not_tensorboards_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    rewind(tmp_path, {})
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_that_was_cut_off_in_a_record_is_cut_back_to_a_whole_one(tmp_path: Path) -> None:
    position = attempt(tmp_path, 0, 5, {}, save_at=3)
    (file,) = tmp_path.iterdir()
    with file.open("ab") as stream:
        stream.write(b"half a rec")
    attempt(tmp_path, 3, 5, position, save_at=5)
    assert [step for step, _ in curves(tmp_path)["loss"]] == list(range(5))


def test_an_attempt_that_resumes_tells_a_tensorboard_that_is_watching(tmp_path: Path) -> None:
    position = attempt(tmp_path, 0, 7, {}, save_at=4)
    before = set(tmp_path.iterdir())
    attempt(tmp_path, 4, 8, position, save_at=0)
    (new,) = set(tmp_path.iterdir()) - before
    started = [event.step for event in EventFileLoader(str(new)).Load() if event.HasField("session_log")]
    assert started == [4]


@pytest.mark.parametrize(
    "value", [3, 0.5, True, torch.tensor(2.0), torch.tensor([2.0]), torch.tensor(3, dtype=torch.int64)], ids=repr
)
def test_numbers_and_tensors_of_one_element_are_logged(tmp_path: Path, value: Any) -> None:
    metrics = log(tmp_path)
    metrics.scalars(0, {"value": value})
    metrics.close()
    assert curves(tmp_path)["value"] == [(0, float(value))]


def test_values_that_are_not_finite_are_logged_as_they_are(tmp_path: Path) -> None:
    metrics = log(tmp_path)
    for step, value in enumerate([math.nan, math.inf, torch.tensor(-math.inf), 1.0]):
        metrics.scalars(step, {"loss": value})
    metrics.close()
    assert [repr(value) for _, value in curves(tmp_path)["loss"]] == ["nan", "inf", "-inf", "1.0"]


@pytest.mark.parametrize("value", [None, torch.ones(2)], ids=repr)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_value_that_is_no_number_costs_a_point_and_not_the_log(tmp_path: Path, value: Any) -> None:
    metrics = log(tmp_path)
    metrics.scalars(0, {"bad": value})
    metrics.scalars(1, {"good": 1.0})
    metrics.mark().result(timeout=2)
    metrics.close()
    assert curves(tmp_path) == {"good": [(1, 1.0)]}


@pytest.mark.parametrize(
    "image", [torch.rand(3, 4, 5), torch.randint(0, 255, (3, 4, 5), dtype=torch.uint8), torch.rand(1, 4, 5)]
)
def test_images_appear(tmp_path: Path, image: torch.Tensor) -> None:
    metrics = log(tmp_path)
    metrics.image(7, "samples", image)
    metrics.close()
    ((tag, step, value),) = written(tmp_path)
    assert (tag, step) == ("samples", 7)
    width, height, png, *_ = value.tolist()
    assert (int(width), int(height)) == (5, 4)
    assert png.startswith(b"\x89PNG")


@pytest.mark.parametrize("channels", [1, 3])
def test_videos_appear_as_animations(tmp_path: Path, channels: int) -> None:
    video = torch.zeros(3, channels, 4, 5, dtype=torch.uint8)
    for frame in range(3):
        video[frame, :, 1, frame] = 255  # a dot that moves
    metrics = log(tmp_path)
    metrics.video(7, "clips", video)
    metrics.close()
    ((tag, step, value),) = written(tmp_path)
    assert (tag, step) == ("clips", 7)
    width, height, gif, *_ = value.tolist()
    assert (int(width), int(height)) == (5, 4)
    with Image.open(io.BytesIO(gif)) as animation:
        frames = [np.asarray(frame.convert("L")) for frame in ImageSequence.Iterator(animation)]
    assert np.array_equal(frames, video[:, 0])


def test_texts_appear(tmp_path: Path) -> None:
    metrics = log(tmp_path)
    metrics.text(7, "sample", "Once upon a time, 从前")
    metrics.close()
    ((tag, step, value),) = written(tmp_path)
    assert (tag, step, value.item().decode()) == ("sample/text_summary", 7, "Once upon a time, 从前")


def test_the_progress_report_gets_the_latest_values_at_the_end(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    metrics = MetricLog(tmp_path, 0, lambda latest: seen.append(dict(latest)))
    for step in range(3):
        metrics.scalars(step, {"loss": float(step), "lr": 0.5})
    metrics.close()
    assert seen[-1] == {"loss": 2.0, "lr": 0.5}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_progress_report_that_cannot_be_written_does_not_stop_the_log(tmp_path: Path) -> None:
    def no_space(latest: dict[str, float]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    metrics = MetricLog(tmp_path, 0, no_space)
    metrics.mark().result(timeout=2)
    metrics.scalars(0, {"loss": 1.0})
    metrics.mark().result(timeout=2)
    metrics.close()
    assert curves(tmp_path) == {"loss": [(0, 1.0)]}


def test_a_loss_with_a_gradient_is_looked_at_without_a_warning() -> None:
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            LossWatch(torch.device("cpu")).see(torch.ones((), requires_grad=True), 0, list)
    finally:
        torch.set_warn_always(False)
