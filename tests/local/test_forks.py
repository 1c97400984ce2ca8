"""Runs that start from another run, go back, or are removed: real training, compared to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.training import points, result, training_project

from jobkit.run.journal import events
from jobkit.run.records import Rewound

HERE = ("--local", "--detach", "checkpoint.keep=9")


def test_starts_from_another_run_and_rewinds_are_exact(tmp_path: Path) -> None:
    project = training_project(tmp_path, every=5)
    whole = project.submit(*HERE, steps=30)
    first = project.submit(*HERE, steps=20)
    short = result(first)

    # From its end: it goes on as if it had been longer from the beginning.
    words = (*HERE, "--from", first.run.name)
    longer = project.submit(*words, steps=30)
    # With another rate: the schedule goes on as if it had been made with that.
    slower = project.submit(*HERE, "--from", f"{first.run.name}@10", steps=20, lr=0.001)
    assert result(longer) == result(whole)
    assert longer.ends[0].first_step == 20
    assert points(longer, "train/loss") == list(range(20, 30))
    shown = json.loads(project.jobkit("status", longer.run.name, "--json").stdout)
    assert (shown["start"]["run"], shown["start"]["step"]) == (first.run.name, 20)
    assert result(slower)["lr"] == pytest.approx(0.001 * 0.9**2)
    assert result(slower)["digest"] != short["digest"]

    # The weights alone, from step 0: here the rest of the state, and the step, do not matter.
    sources = [(first.run.name, 20), (longer.run.name, 20), (first.run.name, 15)]
    weights = [project.submit(*HERE, "--from", f"{name}@{step}", "--weights-only", steps=0) for name, step in sources]
    digests = [result(run)["digest"] for run in weights]
    assert digests[0] == digests[1] != digests[2]

    # Back to a checkpoint in the middle, and on to the same end.
    project.jobkit("rewind", first.run.name, "10")
    (event,) = [event for event in events(first.run) if isinstance(event, Rewound)]
    assert (event.step, event.moved) == (10, [15, 19, 20])
    assert (first.status.state, first.status.result, first.run.final.exists()) == ("interrupted", None, False)
    project.jobkit("resume", first.run.name, "--detach")
    first.wait_until(lambda me: len(me.ends) == 2, "the end of the second attempt")
    assert result(first) == short
    assert (first.ends[1].first_step, first.ends[1].differs_at) == (10, None)
    assert points(first, "train/loss") == list(range(20))

    # What becomes of the first run does not matter; the same command means the same run.
    project.jobkit("rm", first.run.name)
    assert not first.run.path.exists()
    again = json.loads(project.jobkit("submit", str(project.yaml), "params.steps=30", *words, "--json").stdout)
    assert (again["run"], again["started"]) == (longer.run.name, False)
