"""The numbers that a page promises are those of the code: each is read from the page."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jobkit.agent import unsupervised
from jobkit.agent.watchdog import limit
from jobkit.cli import doctor
from jobkit.duration import parse_seconds
from jobkit.loop.agreement import AGREEMENT_SECONDS
from jobkit.loop.checkpoint_interval import MAX_OVERHEAD, AutoInterval
from jobkit.run import snapshot
from jobkit.supervisor import evidence
from jobkit.supervisor.allocation import margin_of
from jobkit.wire.pages import Beat, Phase

DOCS = Path(__file__).parents[2] / "docs"

WORDS = {"half an hour": 1800.0, "an hour": 3600.0, "a minute": 60.0, "fifth": 1 / 5, "three": 3.0, "two": 2.0}


def number(text: str) -> float:
    """Return the value of words, or of a number with its unit."""
    if text in WORDS:
        return WORDS[text]
    value, unit = re.fullmatch(r"([\d.,]+) ?(\D*)", text).groups()  # type: ignore[union-attr]
    scale = {"": 1, "s": 1, "%": 0.01, "MiB": 1 << 20, "files": 1}
    return float(value.replace(",", "")) * scale[unit] if unit in scale else parse_seconds(text.replace(" ", ""))


def waits(phase: Phase, slowest: float) -> float:
    return limit(None, Beat(attempt=1, phase=phase, step=3, time=0.0, slowest=slowest, beats=5))


def interval(stall: float) -> float:
    """Return the seconds between checkpoints that hold up the training so long, of a run that hardly ever dies."""
    auto = AutoInterval(1e9)
    auto.observe(stall, 1.0)
    return auto.seconds


PROMISES: dict[str, tuple[str, str, Callable[[], float]]] = {
    "a stop before the time limit": ("clusters", r"begin to save (.*) before the limit", lambda: margin_of(36_000)),
    "a short limit": ("clusters", r"in its last (\w+)\.", lambda: margin_of(100) / 100),
    "files of the code": ("clusters", r"More than ([\d,]+) files are refused", lambda: snapshot.MAX_FILES),
    "a large file": ("clusters", r"files over (.*), except", lambda: snapshot.MAX_FILE_BYTES),
    "a short grace": ("clusters", r"`doctor` warns if the sum is below\s+(.*)\. For", lambda: doctor.SHORT_SECONDS),
    "deaths on a node": ("clusters", r"three deaths within (an hour)", lambda: evidence.DEATHS_SECONDS),
    "a hang: steps": ("config", r"(\d+) times the slowest step", lambda: waits(Phase.STEPPING, 100.0) / 100),
    "a hang: at least": ("config", r"slowest step so far, at least (.*);", lambda: waits(Phase.STEPPING, 1.0)),
    "a hang: start": ("config", r"between two epochs, at least (.*)\. \|", lambda: waits(Phase.STARTING, 1.0)),
    "a hang: validation": ("config", r"between two epochs, at least (.*)\. \|", lambda: waits(Phase.OUTSIDE, 1.0)),
    "a hang: end": ("config", r"between two epochs, at least (.*)\. \|", lambda: waits(Phase.ENDING, 1.0)),
    "checkpoints: at most": ("config", r"failures; at most (.*), unless", lambda: interval(1.0)),
    "checkpoints: cost": ("config", r"would then take more than (.*) of the time", lambda: 100 / interval(100.0)),
    "snapshots: cost": ("config", r"hold up the training for at most (.*) of the time", lambda: MAX_OVERHEAD),
    "agreements": ("internals", r"each ([\d.]+ s): Wish of each rank", lambda: AGREEMENT_SECONDS),
}


@pytest.mark.parametrize("promise", PROMISES)
def test_a_number_of_a_page_is_the_codes(promise: str) -> None:
    page, pattern, value = PROMISES[promise]
    (text,) = re.findall(pattern, (DOCS / f"{page}.md").read_text(encoding="utf-8"))
    assert value() == pytest.approx(number(text))


def test_the_waits_of_the_internals_are_the_codes() -> None:
    waits = re.findall(r"(\d+ s) \(`([\w.]+)\.([A-Z_]+)`\)", (DOCS / "internals.md").read_text(encoding="utf-8"))
    assert len(waits) > 20
    for text, module, name in waits:
        assert getattr(importlib.import_module(f"jobkit.{module}"), name) == number(text), name


def test_ranks_whose_job_is_dead_are_told_to_save_within_the_time_of_the_guarantees() -> None:
    (text,) = re.findall(
        r"killed on this machine \| the ranks save within (.*?) \|", (DOCS / "guarantees.md").read_text()
    )
    assert number(text) > unsupervised.LOCAL_SECONDS + 2 * unsupervised.ASK_SECONDS
