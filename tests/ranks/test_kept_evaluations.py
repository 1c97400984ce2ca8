"""What a broken-off evaluation keeps for the next attempt, and for which evaluation of it."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.attempts import STOPPED, attempt
from harness.project import names

from jobkit.run.rundir import RunDir
from jobkit.supervisor.retry import decide
from jobkit.worker import evaluation


def with_a_baseline(ctx: Any, stop: bool) -> tuple[float, float]:
    model = ctx.parallelize(torch.nn.Linear(3, 1))
    ctx.track(model=model)
    held_out = torch.utils.data.TensorDataset(torch.ones(200, 3))
    baseline = ctx.evaluate(lambda batch, ids: ids * 0 + 1000.0, held_out, batch_size=2)

    def error(batch: Any, ids: torch.Tensor) -> torch.Tensor:
        if stop and ctx.step == 1 and ids[0] == 100:
            os.kill(os.getpid(), signal.SIGTERM)
        return ids * 0 + 1.0

    for _ in ctx.steps(2):
        found = ctx.evaluate(error, held_out, batch_size=2)
    return baseline, found


def test_what_is_kept_of_an_evaluation_is_not_given_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOBKIT_CODE", "1")
    assert attempt(1, tmp_path, with_a_baseline, True) == [STOPPED]
    assert attempt(1, tmp_path, with_a_baseline, False) == [(1000.0, 1.0)]


def endless(ctx: Any) -> None:
    """Two evaluations, of which each attempt does a little more, and nothing else."""

    def score(batch: Any, ids: torch.Tensor) -> torch.Tensor:
        if ids[0] % 8 == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return ids.double()

    for _ in range(2):
        ctx.evaluate(score, HELD_OUT, batch_size=2)


def test_an_attempt_that_has_come_further_in_an_evaluation_has_made_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a time limit: what is computed in attempt after attempt does not fail for want of checkpoints."""
    monkeypatch.setenv("JOBKIT_CODE", "1")
    for number, known in enumerate((8, 16, 28, 36), start=1):
        assert attempt(1, tmp_path, endless) == [STOPPED]
        (run,) = tmp_path.glob("run-*")
        status = RunDir(run).status()
        assert [one.evaluated for one in status.attempts][number - 1 :] == [known]
    timeouts = [dataclasses.replace(one, cause="timeout") for one in status.attempts]
    assert decide(timeouts).action == "requeue"
    assert decide([*timeouts, *[timeouts[-1]] * 3]).failed


def before_and_in_the_step(ctx: Any) -> None:
    """The first attempt ends in the evaluation before the loop, others in that of the first step, ever later."""

    def baseline(batch: Any, ids: torch.Tensor) -> torch.Tensor:
        if ctx.attempt == 1 and ids[0] == 16:
            os.kill(os.getpid(), signal.SIGTERM)
        return ids.double()

    def score(batch: Any, ids: torch.Tensor) -> torch.Tensor:
        if ids[0] == 2 * ctx.attempt:
            os.kill(os.getpid(), signal.SIGTERM)
        return ids.double()

    ctx.evaluate(baseline, HELD_OUT, batch_size=2)
    for _ in ctx.steps(2):
        ctx.evaluate(score, HELD_OUT, batch_size=2)


def test_the_evaluation_of_a_step_is_further_than_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOBKIT_CODE", "1")
    for _ in range(4):
        assert attempt(1, tmp_path, before_and_in_the_step) == [STOPPED]
    (run,) = tmp_path.glob("run-*")
    attempts = RunDir(run).status().attempts
    assert [(one.evaluated_place, one.evaluated) for one in attempts] == [(0, 18), (1, 6), (1, 8), (1, 10)]
    assert decide([dataclasses.replace(one, cause="timeout") for one in attempts]).action == "requeue"


HELD_OUT = torch.utils.data.TensorDataset(torch.arange(20.0))
STOPS: list[float] = []
"""The scale at which an evaluation is told to stop; no part of what the function holds."""


def several(ctx: Any, results: Path, stop: bool) -> list[float]:
    """Evaluations that differ by what their function holds, of which those that are done are not asked for again."""
    STOPS[:] = [2.0] if stop else []

    def of(scale: float) -> Callable[..., torch.Tensor]:
        def score(batch: Any, ids: torch.Tensor) -> torch.Tensor:
            if scale in STOPS and ids[0] == 10:
                os.kill(os.getpid(), signal.SIGTERM)
            return batch[0] * scale

        return score

    found = []
    for scale in (1.0, 2.0, 3.0):
        if not (file := results / str(scale)).exists():
            file.write_text(repr(ctx.evaluate(of(scale), HELD_OUT, batch_size=2)))
        found.append(float(file.read_text()))
    return found


def test_what_is_kept_is_of_the_same_function_with_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOBKIT_CODE", "1")
    assert attempt(1, tmp_path, several, tmp_path, True) == [STOPPED]
    assert attempt(1, tmp_path, several, tmp_path, False) == [[9.5, 19.0, 28.5]]


class Scaled:
    """A callable object, and one whose method is called."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, batch: Any, ids: torch.Tensor) -> torch.Tensor:
        if self.scale in STOPS and ids[0] == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch[0] * self.scale

    def score(self, batch: Any, ids: torch.Tensor) -> torch.Tensor:
        return self(batch, ids)


class Numbers(torch.utils.data.Dataset[Any]):
    """The same for a dataset: its samples are numbers times `scale`."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> float:
        return index * self.scale


def plain(batch: Any, ids: torch.Tensor) -> torch.Tensor:
    if STOPS and batch[0] == 10 * STOPS[0]:
        os.kill(os.getpid(), signal.SIGTERM)
    return batch


def by_objects(ctx: Any, results: Path, kind: str, stop: bool) -> list[float]:
    """As `several`, of functions and datasets that are objects."""
    STOPS[:] = [2.0] if stop else []
    found = []
    for scale in (1.0, 2.0, 3.0):
        function = {"an object": Scaled(scale), "a method": Scaled(scale).score, "a dataset": plain}[kind]
        dataset = Numbers(scale) if kind == "a dataset" else HELD_OUT
        if not (file := results / str(scale)).exists():
            file.write_text(repr(ctx.evaluate(function, dataset, batch_size=2)))
        found.append(float(file.read_text()))
    return found


@pytest.mark.parametrize("kind", ["an object", "a method", "a dataset"])
def test_what_is_kept_is_of_an_object_that_holds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("JOBKIT_CODE", "1")
    assert attempt(1, tmp_path, by_objects, tmp_path, kind, True) == [STOPPED]
    (tmp_path / "2.0").write_text("19.0")  # by somebody else: the next evaluation stands where this one did
    assert attempt(1, tmp_path, by_objects, tmp_path, kind, False) == [[9.5, 19.0, 28.5]]


def never(*_: Any) -> str:
    raise AssertionError("looked at for nothing")


def test_where_nothing_can_be_kept_nothing_is_looked_at(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, unlooked) == [9.5]


def unlooked(ctx: Any) -> float:
    os.environ.pop("JOBKIT_CODE", None)
    evaluation.called = never
    found: float = ctx.evaluate(lambda batch, ids: batch[0], HELD_OUT, batch_size=2)
    return found


def before_or_after(ctx: Any, stop: bool) -> None:
    """In the first attempt before the loop, which has no step; in the second one after it."""
    STOPS[:] = [1.0] if stop else []
    for _ in ctx.steps(0) if not stop else ():
        pass
    ctx.evaluate(plain, HELD_OUT_NUMBERS, batch_size=2)


HELD_OUT_NUMBERS = Numbers(1.0)


def test_what_is_kept_of_an_evaluation_before_the_loop_is_not_given_to_one_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOBKIT_CODE", "1")
    assert attempt(1, tmp_path, before_or_after, True) == [STOPPED]
    assert attempt(1, tmp_path, before_or_after, False) == [None]
    (run,) = tmp_path.glob("run-*")
    found = names(run)
    assert "evaluation_interrupted" in found and "evaluation_resumed" not in found
