"""tools/bench/simulate.py: the simulator against closed forms, and that it plays jobkit's own decisions."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.simulation import run as simulated
from bench.simulation.cluster import DAY, HOUR, MTTF_HOURS, Cluster, Trace, draw_trace, mttf
from bench.simulation.pace import Pace
from bench.simulation.policy import JOBKIT, SPARES, Policy, jobkit, peers, spares_for, youngs_optimum
from bench.simulation.run import Account, Run

from jobkit.run.config import CheckpointConfig, RetryConfig
from jobkit.supervisor.retry import Decision

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "tools/bench/simulate.py")]

NEVER = 1e6 * DAY

QUIET = Cluster(8, mttf=NEVER, preempted_every=NEVER, time_limit=NEVER)
"""On which nothing happens."""

IN_PLACE = Policy("in place", RetryConfig(), CheckpointConfig(every="300s", memory="off"), ideal=True)


def play(cluster: Cluster, policy: Policy, seed: int = 0, days: float = 4.0) -> Run:
    run = Run(cluster, policy, draw_trace(cluster, days * DAY, seed), days * DAY)
    run.play()
    return run


def goodput(cluster: Cluster, policy: Policy, traces: int = 6, **more: Any) -> float:
    return statistics.fmean(play(cluster, policy, seed, **more).account.goodput for seed in range(traces))


# Against closed forms


def test_without_failures_only_checkpoints_and_the_start_take_time() -> None:
    account = play(QUIET, IN_PLACE).account
    assert account.starting == QUIET.start
    loop = 4 * DAY - QUIET.start
    assert account.checkpoints == pytest.approx(loop * QUIET.stall / (QUIET.stall + 300), rel=2e-3)
    assert account.new == pytest.approx(loop - account.checkpoints)


def test_with_failures_the_mean_is_dalys_exact_one() -> None:
    """J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 20."""
    between, interval, dump = HOUR, 300.0, 20.0
    cluster = replace(QUIET, mttf=between, causes={"rank": 1.0}, lemon_share=0.0, durable=dump)
    restart = cluster.notice_death + cluster.restart_in_place + dump
    took = between * math.exp(restart / between) * (math.exp((interval + dump) / between) - 1)
    found = [play(cluster, replace(IN_PLACE, blocks=True), seed, days=15).account.goodput for seed in range(10)]
    spread = statistics.stdev(found) / len(found) ** 0.5
    assert statistics.fmean(found) == pytest.approx(interval / took, abs=3 * spread)
    assert spread < 0.004


def test_youngs_interval_is_the_best_of_those_around_it() -> None:
    cluster = replace(QUIET, mttf=HOUR, causes={"rank": 1.0}, lemon_share=0.0, stall=10.0, durable=10.0)
    young = math.sqrt(2 * cluster.stall * HOUR)

    def of(seconds: float) -> float:
        checkpoint = CheckpointConfig(every=f"{seconds}s", memory="off")
        return goodput(cluster, replace(IN_PLACE, checkpoint=checkpoint), days=10)

    assert of(young) > max(of(young / 3), of(young * 3))


def by_steps(pace: Pace, seconds: int) -> tuple[float, float | None, float | None, float, float]:
    """The same as Pace.after, second by second."""
    progress = stalled = snapshots = 0.0
    durable: float | None = None
    memory: float | None = None
    writing: list[tuple[float, float]] = []
    since_memory, due, now = -pace.memory, pace.first, 0.0
    while now < seconds:
        if now >= due:
            saved, began = progress, now
            stop = min(now + pace.stall, seconds)
            stalled, now, since_memory, due = stalled + stop - now, stop, began, stop + pace.every
            writing.append((began + pace.durable, saved))
            memory = saved if stop == began + pace.stall and pace.memory < math.inf else memory
            continue
        busy = any(end > now for end, _ in writing)
        soon = now > due - pace.margin and now > 0
        if pace.memory < math.inf and now - since_memory >= pace.memory and not busy and not soon:
            saved, since_memory = progress, now
            stop = min(now + pace.memory_stall, seconds)
            memory = saved if stop == now + pace.memory_stall else memory
            snapshots, now = snapshots + stop - now, stop
            continue
        now, progress = now + 1, progress + 1
    for end, saved in writing:
        durable = saved if end <= seconds else durable
    return progress, durable, memory, stalled, snapshots


@pytest.mark.parametrize(
    "pace",
    [
        Pace(30, 200, 2, 10),
        Pace(30, 200, 2, 10, 20, 2),
        Pace(30, 200, 2, 10, 20, 2, 10),
        Pace(30, 60, 5, 40, 100, 5, 50),
        Pace(300, 300, 20, 20),
        Pace(30, 118, 1, 30, 100, 1, 50),
    ],
)
def test_the_way_of_a_loop_in_closed_form_is_that_of_its_seconds(pace: Pace) -> None:
    for seconds in range(1, 900):
        way = pace.after(seconds)
        found = way.progress, way.durable, way.memory, way.checkpoints, way.snapshots
        assert found == pytest.approx(by_steps(pace, seconds)), seconds


# What holds for all policies


EVERYTHING = [JOBKIT, jobkit("spares", spares=4), jobkit("fewer", spare_share=0.05), jobkit("off", memory="off")]


@pytest.mark.parametrize("gpus", [8, 1024, 8192])
def test_each_second_is_accounted_for_once_and_no_step_twice(gpus: int) -> None:
    cluster = Cluster(gpus, queue=1800.0)
    for policy in [*EVERYTHING, youngs_optimum(cluster), *peers(cluster)]:
        run = play(cluster, policy)
        assert run.account.seconds == pytest.approx(4 * DAY)
        assert run.account.new == pytest.approx(run._best)
        assert min(vars(run.account).values()) >= 0.0


@pytest.mark.parametrize("policy", EVERYTHING, ids=lambda policy: policy.name)
def test_neither_more_failures_nor_longer_queues_help(policy: Policy) -> None:
    cluster = Cluster(2048, queue=HOUR)
    found = [goodput(replace(cluster, mttf=cluster.mean_time_to_failure * factor), policy) for factor in (0.5, 2, 8)]
    assert found == sorted(found)
    waits = [goodput(replace(cluster, queue=hours * HOUR), policy) for hours in (6, 1, 0)]
    assert waits == sorted(waits)


def test_the_same_seed_is_the_same_run_and_another_is_another() -> None:
    first, again, other = (play(Cluster(1024), JOBKIT, seed).account for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(("gpus", "hours"), MTTF_HOURS.items())
def test_the_times_between_failures_are_the_papers(gpus: int, hours: float) -> None:
    assert mttf(gpus) == pytest.approx(hours * HOUR)
    cluster = Cluster(gpus, preempted_every=NEVER)
    counts = [sum(node < cluster.nodes for node in draw_trace(cluster, 400 * DAY, seed).nodes) for seed in range(12)]
    assert statistics.fmean(counts) == pytest.approx(400 * DAY / mttf(gpus), rel=0.5 if gpus == 8 else 0.15)


# jobkit's own decisions


def one(cause: str, node: int = 3, at: float = 2 * HOUR) -> Trace:
    return Trace([at], [cause], [node])


def alone(trace: Trace, policy: Policy, **more: Any) -> Run:
    run = Run(Cluster(64, queue=HOUR, **more), policy, trace, 10 * HOUR)
    run.play()
    return run


def test_what_comes_next_is_asked_of_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def decide(attempts: Any, retry: RetryConfig, **more: Any) -> Decision:
        asked.append(attempts[-1].cause)
        return Decision("stop", "as the test says", failed=True)

    assert alone(one("rank"), JOBKIT).resubmitted == 0
    monkeypatch.setattr(simulated, "decide", decide)
    run = alone(one("rank"), JOBKIT)
    assert (asked, run.resubmitted, run.account.person) == (["killed"], 1, 4 * HOUR)


def ends(run: Run) -> list[tuple[str | None, str]]:
    return [(attempt.cause, attempt.began) for attempt in run.attempts]


@pytest.mark.parametrize(
    ("cause", "node", "policy", "requeued", "attempts"),
    [
        ("rank", 3, JOBKIT, 0, 1),
        ("hang", 3, JOBKIT, 0, 1),
        ("node", 3, JOBKIT, 1, 1),
        ("node", 3, jobkit("a spare", spares=1), 0, 1),
        ("node", 3, jobkit("fewer", spare_share=0.2), 0, 1),
        ("node", 0, jobkit("a spare", spares=1), 1, 1),  # that of the batch script
        ("gpu", 3, jobkit("a spare", spares=1), 0, 2),  # which fails once more before the node is left out
        ("gpu", 3, JOBKIT, 1, 2),
        ("rank", 3, jobkit("not in place", retry={"in_place": False}), 1, 1),
        ("preempted", 0, jobkit("a spare", spares=1), 1, 1),
    ],
)
def test_what_one_failure_costs(cause: str, node: int, policy: Policy, requeued: int, attempts: int) -> None:
    run = alone(one(cause, node), policy)
    assert (run.requeued, len(run.attempts), run.resubmitted) == (requeued, attempts, 0)
    assert (run.account.queue > 0) is (requeued > 0)


def test_after_a_death_in_place_only_what_no_snapshot_holds_is_repeated() -> None:
    every = {"every": "1h"}
    snapshots = alone(one("rank"), jobkit("snapshots", memory="1min", **every)).account
    none = alone(one("rank"), jobkit("none", memory="off", **every)).account
    assert snapshots.repeated < 61 < 1000 < none.repeated


def test_peers_wait_for_a_person_where_their_run_is_lost() -> None:
    submitit, lightning = peers(Cluster(64))
    for policy in (submitit, lightning):
        for cause in ("rank", "hang", "node", "gpu"):
            assert alone(one(cause), policy).resubmitted == 1
        assert alone(one("node", 0), policy).resubmitted == 0  # Slurm requeues it
    assert alone(one("preempted"), submitit).resubmitted == 0
    assert alone(one("preempted"), lightning).resubmitted == 1


def test_two_weeks_on_16384_gpus_need_no_person() -> None:
    """With several broken GPUs and lost nodes at a time: the budgets of `retry:` fill up again with progress."""
    cluster = Cluster(16384, queue=0.0)
    runs = [play(cluster, jobkit("spares", spares=8), seed, days=14) for seed in range(3)]
    assert [run.resubmitted for run in runs] == [0, 0, 0]
    assert min(run.account.goodput for run in runs) > 0.9


# The command


def told(*arguments: str) -> list[str]:
    done = subprocess.run([*COMMAND, "--quick", *arguments], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.splitlines()


def test_the_row_for_the_table_is_told_as_the_others_are() -> None:
    rows = [json.loads(line) for line in told("--table")]
    assert [row["against"] for row in rows] == ["Young's optimum", "Submitit's pattern", "Lightning, auto_requeue"]
    for row in rows:
        assert next(iter(row)) == "row"
        assert row["met"] is (row["value"] >= row["bound"]) is True
        assert len(row["values"]) == 2


def test_everything_is_written_for_programs(tmp_path: Path) -> None:
    lines = told("--gpus", "8", "256", "--queue", "1", "--json", str(tmp_path / "all.json"))
    played = json.loads((tmp_path / "all.json").read_text())["played"]
    assert len(lines) == len(played) == 12
    for one in played:
        assert sum(one["shares"].values()) == pytest.approx(1.0)
        assert one["goodput"] == pytest.approx(one["shares"]["new"])


@pytest.mark.parametrize("what", ["--settings", "--spares"])
def test_the_comparisons_of_the_docs_are_made(what: str) -> None:
    lines = told(what, "--gpus", "64", "--queue", "1")
    assert len(lines) > 6
    assert all(re.search(r"queue 1 h  jobkit, .* 0\.\d{4} \+- 0\.\d{4}", line) for line in lines)


@pytest.mark.parametrize("wrong", [["--gpus", "0"], ["--queue", "-1"], ["--traces", "0"], ["--durable", "0.5"]])
def test_numbers_that_make_no_sense_are_refused(wrong: Sequence[str]) -> None:
    done = subprocess.run([*COMMAND, *wrong], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "simulate.py: error: --" in done.stderr


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    told("--gpus", "8", "256", "--draw", str(tmp_path / "goodput.png"))
    image = (tmp_path / "goodput.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) < 300_000


def test_the_docs_ask_for_as_many_spares_as_the_simulation() -> None:
    rows = re.findall(
        r"^\| ([\d,]+)(?: to [\d,]+| and more) \| (\d+) \|", (ROOT / "docs/clusters.md").read_text(), re.M
    )
    sizes = [(int(nodes.replace(",", "")), int(spares)) for nodes, spares in rows]
    assert len(sizes) == len(SPARES)
    for nodes, spares in sizes:
        assert spares_for(nodes) == spares != (spares_for(nodes - 1) if nodes > 1 else None)


def test_an_account_adds_up() -> None:
    assert Account(new=3.0, queue=1.0).goodput == 0.75
