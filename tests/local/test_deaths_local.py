"""Whatever kills a run on this machine, it ends: with its cause named, no step lost, and no process left behind."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.processes import processes_of, ranks_of
from harness.project import (
    Project,
    begun,
    causes,
    describe,
    events,
    is_over,
    logged_steps,
    names,
    status,
    step,
    wait_for,
    weights,
)
from slurm_cluster import Process

from jobkit.run.config import Resources
from jobkit.supervisor.time_limit import LocalTimeLimit
from jobkit.worker.checkpoint_schedule import MAX_OVERHEAD, MAX_SECONDS

STEPS = 60
EVERY = 10

ORDERS = '''\
"""Ranks die as $DEATHS says: {attempt: [ranks, step, how]}; step -1 is before the loop."""
import json
import multiprocessing
import os
import re
import resource
import signal
import time
from pathlib import Path

import torch

from jobkit.worker.stop import STOP_SIGNALS

PLAN = json.loads(os.environ.get("DEATHS", "{}"))
ATTEMPT = os.environ.get("JOBKIT_ATTEMPT", "")
SLEEP = json.loads(os.environ.get("SLEEP", "{}")).get(ATTEMPT, 0)
HOLD = json.loads(os.environ.get("HOLD", "{}")).get(ATTEMPT)

if PLAN.get(ATTEMPT, [[], 0, ""])[2] == "import" and os.environ["JOBKIT_NODEID"] == "1":
    import no_such_module


def beyond_the_limit():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**29
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.ones(2**30)


def beyond_the_cgroup():
    group, used, limit = (Path(word) for word in os.environ["CGROUP"].split(":"))
    for pid in (os.getppid(), os.getpid()):  # as under Slurm, where a job's processes are in a group together
        (group / "cgroup.procs").write_text(str(pid))
    Path("/proc/self/oom_score_adj").write_text("1000")  # the first that the kernel chooses
    (group / limit).write_text(str(int((group / used).read_text()) + 2**29))
    kept = [os.urandom(2**20) * 64 for _ in range(2**6)]


def kill_a_worker():
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    time.sleep(60)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)  # the watchdog lets it go on, to write down its stack


def fail():
    raise ValueError("a sample of the devil's")


HOW = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": stop,
    "exit": lambda: os._exit(7),
    "raise": fail,
    "memory": lambda: bytearray(2**60),
    "limit": beyond_the_limit,
    "cgroup": beyond_the_cgroup,
    "worker": kill_a_worker,
    "loop": lambda: re.match("(a+)+$", "a" * 60 + "b"),  # never lets go of the interpreter
    "sleep": lambda: time.sleep(1e6),
}


def hold(ctx, step):
    """Wait in step $HOLD[attempt] for a signal to stop, or for the test: no run ends before what is to happen to it."""
    while step == HOLD and not (STOP_SIGNALS.pending or (ctx.run_dir / f"go_{ctx.attempt}").exists()):
        time.sleep(0.02)


def die(ctx, step):
    ranks, when, how = PLAN.get(str(ctx.attempt), ([], -2, ""))
    if step != when or ctx.rank not in ranks or how not in HOW:
        return
    journal, durable = ctx.run_dir / "events.jsonl", f'"event": "checkpoint", .*"step": {step // 10 * 10}[^0-9]'
    while step >= 10 and not re.search(durable, journal.read_text()):
        time.sleep(0.02)  # until it is durable, so that the number of repeated steps is what it should be
    HOW[how]()


def before_loop(ctx):
    die(ctx, -1)


def at_step(ctx, step):
    die(ctx, step)
    hold(ctx, step)
    time.sleep(SLEEP)
'''

YAML = f"""\
name: toy
task: mytask:train
params: {{steps: {STEPS}, sleep: 0.01, dropout: 0.1, workers: 0}}
resources: {{tasks_per_node: 2}}
checkpoint: {{every: {EVERY}}}
"""


class Mortal(Project):
    """A project whose ranks die as `plan` says: (ranks, step, how) of attempt 1, 2 ..."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        (path / "orders.py").write_text(ORDERS)
        (path / "toy.yaml").write_text(YAML)

    def plan(self, *deaths: tuple[list[int], int, str] | None, **environment: str) -> None:
        plan = {attempt: death for attempt, death in enumerate(deaths, start=1) if death}
        self.env |= {"DEATHS": json.dumps(plan), **environment}

    def begin(self, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
        """Submit without waiting; the process and the run directory."""
        process = self.start("submit", "toy.yaml", "--local", *arguments)
        wait_for("a run directory", lambda: self.runs, seconds=30)
        return process, self.runs[0]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Mortal]:
    """A project, of which nothing is left running when a test has failed."""
    project = Mortal(tmp_path / "project")
    yield project
    for run in project.runs:
        for process in processes_of(run):
            process.send(signal.SIGKILL)


@pytest.fixture(scope="session")
def undisturbed(uninterrupted: Callable[[int], bytes]) -> bytes:
    """The weights of the run that nothing happened to."""
    return uninterrupted(2)


def rank_process(run: Path, attempt: int, rank: int) -> int | None:
    """The process of a rank, or None where it does not run."""
    process = ranks_of(run, attempt).get(rank)
    return process.pid if process else None


def nothing_is_left(run: Path, seconds: float = 15.0) -> None:
    wait_for("the end of all processes", lambda: not processes_of(run), run, seconds)


def reach(run: Path, attempt: int, checkpoint: int) -> None:
    """Wait until an attempt trains and a checkpoint is durable: dying now costs less than an interval."""

    def reached() -> bool:
        now = status(run)
        attempts = now.get("attempts") or []
        return len(attempts) == attempt and attempts[-1]["first_step"] is not None and step(run) >= checkpoint

    wait_for(f"step {checkpoint} in attempt {attempt}", reached, run)
    wait_for(f"checkpoint {checkpoint}", lambda: (status(run)["checkpoint"] or 0) >= checkpoint, run)


def failures(run: Path) -> list[dict[str, Any]]:
    return [attempt["failure"] or {} for attempt in status(run)["attempts"]]


def repeated(run: Path, rank: int = 0) -> list[int]:
    """How many steps each attempt but the first did again."""
    by_attempt: dict[int, list[int]] = {}
    for one in begun(run, rank):
        by_attempt.setdefault(one["attempt"], []).append(one["step"])
    steps = list(by_attempt.values())
    return [before[-1] + 1 - after[0] for before, after in itertools.pairwise(steps)]


def wait_for_checkpoint(run: Path, step: int) -> None:
    """Until it is durable: the progress report may be half an interval old, or ahead of a checkpoint under way."""
    wait_for("a checkpoint", lambda: any(e["event"] == "checkpoint" and e["step"] >= step for e in events(run)), run)


def nothing_was_lost(run: Path, weights_expected: bytes | None, ranks: int = 2) -> None:
    """The run is finished with the weights it should have, each step logged once and few done twice."""
    assert status(run)["state"] == "finished", describe(run)
    nothing_is_left(run)
    assert logged_steps(run) == list(range(STEPS)), describe(run)
    assert weights_expected is None or weights(run) == weights_expected, describe(run)
    for rank in range(ranks):
        assert {one["step"] for one in begun(run, rank)} == set(range(STEPS))
        assert all(0 <= count <= EVERY for count in repeated(run, rank)), f"{repeated(run, rank)}\n{describe(run)}"


# Deaths of ranks

# What happens in attempts 1, 2 ... of one run: (on ranks, in step, how), cause, words of the error.
DEATHS: list[tuple[tuple[list[int], int, str], str, str]] = [
    (([1], 0, "import"), "crashed", "rank 1: ModuleNotFoundError: No module named 'no_such_module'"),
    (([1], 14, "kill"), "killed", "rank 1 was killed by SIGKILL"),
    (([0, 1], 22, "kill"), "killed", "rank 0 was killed by SIGKILL"),
    (([1], 27, "exit"), "crashed", "rank 1 ended with exit code 7"),
    (([0], 33, "raise"), "crashed", "rank 0: ValueError: a sample of the devil's"),
    (([1], 42, "memory"), "out_of_memory", "rank 1: MemoryError"),
    (([0], 51, "limit"), "out_of_memory", "rank 0: RuntimeError: "),
    (([1], 57, "worker"), "crashed", "rank 1: RuntimeError: DataLoader worker (pid "),
]


def test_a_run_survives_any_number_of_deaths_of_its_ranks(project: Mortal, undisturbed: bytes) -> None:
    project.plan(*(death for death, _, _ in DEATHS))
    project.submit("--local", "resources.nodes=2", "resources.tasks_per_node=1", "params.workers=1")
    (run,) = project.runs
    assert causes(run) == [*(cause for _, cause, _ in DEATHS), "finished"], describe(run)
    for (death, cause, words), failure in zip(DEATHS, failures(run), strict=False):
        assert words in failure["error"] or (death[0] == [0, 1] and "killed by SIGKILL" in failure["error"])
        if cause == "out_of_memory":
            assert re.search(r"peak of the host's memory: \d\.\d\d GiB", failure["error"]), failure["error"]
        if death[2] in ("raise", "memory", "limit", "worker"):
            assert (failure["rank"], failure["step"]) == (death[0][0], death[1])
    nothing_was_lost(run, undisturbed)


HANGS: list[tuple[tuple[list[int], int, str], list[str]]] = [
    (([1], 15, "stop"), ["in die", "in train"]),
    (([0], 25, "loop"), ["in match", "in train"]),
    (([1], 35, "sleep"), ["in die", "in train"]),
]


def test_a_rank_that_stands_still_is_noticed_and_all_stacks_are_written_down(
    project: Mortal, undisturbed: bytes
) -> None:
    project.plan(*(death for death, _ in HANGS))
    project.submit("--local", "watchdog=6s")
    (run,) = project.runs
    assert causes(run) == ["hang", "hang", "hang", "finished"], describe(run)
    for attempt, (((rank,), where, _), words) in enumerate(HANGS, start=1):
        told = failures(run)[attempt - 1]["error"]
        found = re.fullmatch(r"no progress for 0:00:06 in step (\d+) \(watchdog: 6s\)", told)
        assert found is not None and int(found[1]) <= where, told  # by its last report, a moment old
        stacks = [(run / "logs" / str(attempt) / f"rank_{one}.err").read_text() for one in range(2)]
        assert all("most recent call first" in text for text in stacks), describe(run)
        assert all(word in stacks[rank] for word in words), stacks[rank]
        assert "in die" not in stacks[1 - rank] and "in train" in stacks[1 - rank]
    nothing_was_lost(run, undisturbed)


@pytest.fixture
def cgroup(tmp_path: Path) -> Iterator[str]:
    """A memory control group: its folder, and its files of the memory in use and of the limit. Skips where none is."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, used, limit = (
        (first, "memory.usage_in_bytes", "memory.limit_in_bytes")
        if first.is_dir()
        else (second, "memory.current", "memory.max")
    )
    group = root / f"jobkit-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).read_text()
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory control group can be made here: {error}")
    yield f"{group}:{used}:{limit}"
    wait_for("an empty control group", lambda: not (group / "cgroup.procs").read_text(), seconds=20)
    group.rmdir()


def test_a_rank_that_the_kernel_kills_for_its_memory_is_told_from_one_that_somebody_kills(
    project: Mortal, undisturbed: bytes, cgroup: str
) -> None:
    project.plan(([1], 15, "cgroup"), CGROUP=cgroup)
    project.submit("--local")
    (run,) = project.runs
    assert causes(run) == ["out_of_memory", "finished"], describe(run)
    error = failures(run)[0]["error"]
    assert re.match(r"rank 1 was killed for lack of memory on the host; peak of a rank: \d\.\d\d GiB", error), error
    nothing_was_lost(run, undisturbed)


# Failures that stay


def test_a_step_that_always_fails_ends_the_run_and_the_rank_that_failed_first_is_told(project: Mortal) -> None:
    project.plan(*[([1], 13, "raise")] * 9)
    told = project.submit("--local", expect=1)
    (run,) = project.runs
    assert status(run)["state"] == "failed"
    assert causes(run) == ["crashed"] * 3
    nothing_is_left(run)
    assert "failed at step" in told.stdout + told.stderr
    text = project.jobkit("status", run.name).stdout
    ids = begun(run, 1)[-1]["ids"]
    assert len(ids) == 6 and begun(run, 1)[-1]["step"] == 13
    assert "failed at: rank 1, step 13" in text, text
    assert f"samples of that rank's batch: {', '.join(map(str, ids))}" in text, text
    assert "in fail" in text and "ValueError: a sample of the devil's" in text, text
    assert "to continue it: " in text
    shown = json.loads(project.jobkit("status", run.name, "--json").stdout)
    failure = shown["attempts"][-1]["failure"]
    assert (shown["state"], failure["rank"], failure["step"], failure["samples"]) == ("failed", 1, 13, ids)
    assert "in fail" in failure["traceback"]
    assert "a sample of the devil's" in shown["error"] and "retry.crash: 3" in shown["error"]


def test_a_mistake_before_the_first_step_is_not_tried_again(project: Mortal) -> None:
    project.plan(*[([0, 1], -1, "raise")] * 9)
    project.submit("--local", "resources.nodes=2", "resources.tasks_per_node=1", expect=1)
    (run,) = project.runs
    assert (status(run)["state"], causes(run)) == ("failed", ["crashed"])
    assert "before the first step, on every node: not retried" in status(run)["error"]
    nothing_is_left(run)


def test_how_often_it_is_tried_again_is_what_the_yaml_says(project: Mortal) -> None:
    one_rank = ("--local", "resources.tasks_per_node=1")
    project.plan(*[([0], 13, "raise")] * 4)
    project.submit(*one_rank, "retry.crash=0", expect=1)
    (run,) = project.runs
    assert (status(run)["state"], causes(run)) == ("failed", ["crashed"])
    assert "never to be restarted (retry.crash: 0)" in status(run)["error"]
    project.submit(*one_rank, "retry.crash=unlimited")
    assert causes(run) == ["crashed"] * 4 + ["finished"]
    nothing_was_lost(run, None, ranks=1)


# The time limit


def test_the_time_limit_is_kept_here_too_also_by_a_step_that_outlasts_it(project: Mortal, undisturbed: bytes) -> None:
    project.plan(None, ([1], 45, "sleep"), SLEEP=json.dumps({"1": 0.5}))
    project.submit("--local", "resources.time=20s")
    (run,) = project.runs
    assert len(causes(run)) >= 3 and {*causes(run)[:-1]} == {"timeout"}, describe(run)
    # Far from any other limit; to the second it is held in unit/test_supervisor.py, with a clock of its own.
    assert all(attempt["ended"] - attempt["started"] < 200 for attempt in status(run)["attempts"])
    assert repeated(run)[0] == 0, "a graceful end repeats nothing"
    nothing_was_lost(run, undisturbed)


def test_without_a_time_limit_there_is_none_here(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [LocalTimeLimit(Resources(time=written)) for written in ("auto", "1h")]
    later = time.monotonic() + 1e6
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert [limit.is_near() for limit in limits] == [False, True]
    assert [limit.is_over() for limit in limits] == [False, True]


# Interruptions


def test_a_preemption_can_be_rehearsed_with_and_without_grace(project: Mortal, undisturbed: bytes) -> None:
    project.plan(None, ([0, 1], 55, "sleep"), HOLD=json.dumps({"1": 25}))  # without grace there is no step after it
    _, run = project.begin("--detach", "params.sleep=0.02")
    reach(run, 1, 10)
    told = project.jobkit("preempt", run.name).stdout
    assert re.search(r"attempt 1 preempted at step (\d+)\nit continues by itself from step \1;", told), told
    reach(run, 2, 50)  # it waits in step 55: a checkpoint may be under way right after 40 or 50, and count for nothing
    told = project.jobkit("preempt", run.name, "--no-grace").stdout
    assert re.search(r"attempt 2 preempted at step \d+\nit continues by itself from step \d+", told), told
    wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["preempted", "preempted", "finished"], describe(run)
    assert repeated(run)[0] == 0, "a graceful end repeats nothing"
    nothing_was_lost(run, undisturbed)
    refused = project.jobkit("preempt", run.name, expect=1)
    assert f"{run.name} is finished, not running: there is nothing to preempt" in refused.stderr


def test_ctrl_c_during_a_restart_is_obeyed_and_resume_goes_on_from_anywhere(
    project: Mortal, undisturbed: bytes, tmp_path: Path
) -> None:
    project.plan(([1], 15, "kill"), HOLD=json.dumps({"2": 18}))
    process, run = project.begin()
    wait_for("a second attempt", lambda: names(run).count("started") == 2, run)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=600)
    assert process.returncode == 75, told
    assert (status(run)["state"], causes(run)) == ("interrupted", ["killed", "user"])
    assert re.search(r"The checkpoint of step \d+ is safe; the same command continues the run", "".join(told)), told
    nothing_is_left(run)
    project.path, elsewhere = tmp_path / "elsewhere", project.path
    project.path.mkdir()
    project.jobkit("resume", run.name, "--runs-dir", str(run.parent))
    project.path = elsewhere
    assert causes(run) == ["killed", "user", "finished"]
    nothing_was_lost(run, undisturbed)


def test_two_interruptions_at_once_and_a_death_during_the_recovery(project: Mortal, undisturbed: bytes) -> None:
    project.plan(HOLD=json.dumps({"1": 22, "2": 45}))
    _, run = project.begin("--detach", "params.sleep=0.05")
    wait_for_checkpoint(run, 20)
    preempting = project.start("preempt", run.name)
    wait_for("the stop request", (run / "logs/1/notice.json").exists, run)
    os.kill(rank_process(run, 1, 1) or 0, signal.SIGKILL)
    preempting.communicate(timeout=600)
    wait_for("a second attempt", lambda: names(run).count("started") == 2 and rank_process(run, 2, 0), run)
    os.kill(rank_process(run, 2, 0) or 0, signal.SIGKILL)
    wait_for("the end", lambda: is_over(run), run)
    assert causes(run)[0] in ("killed", "preempted") and causes(run)[1:] == ["killed", "finished"], describe(run)
    nothing_was_lost(run, undisturbed)


# Deaths of the supervisor


def kill_supervisor(run: Path, attempt: int) -> None:
    """Kill the supervisor, and let its ranks go on when they have been told: the process that forked them is gone."""
    server = ranks_of(run, attempt)[0].parent
    os.kill(int(status(run)["job_id"]), signal.SIGKILL)
    wait_for("the end of the ranks' server", lambda: Process.read(server) is None, run)
    (run / f"go_{attempt}").touch()


def test_a_killed_supervisor_leaves_nothing_running_and_the_same_command_continues(
    project: Mortal, undisturbed: bytes
) -> None:
    project.plan(HOLD=json.dumps({"1": 25, "2": 45}))
    command = ("--local", "params.workers=1", "params.sleep=0.05")
    detached, run = project.begin(*command[1:], "--detach")
    detached.communicate(timeout=600)
    reach(run, 1, 10)
    kill_supervisor(run, 1)
    nothing_is_left(run)
    text = project.jobkit("status", run.name).stdout
    assert f"{run.name}: interrupted" in text
    assert re.search(
        r"to continue it: .*jobkit.submit toy.yaml params.workers=1 params.sleep=0.05 --local +\(in ", text
    ), text
    foreground, _ = project.begin(*command[1:])
    reach(run, 2, 30)
    kill_supervisor(run, 2)
    told = "".join(foreground.communicate(timeout=600))
    assert foreground.returncode == 75 and "the same command continues the run" in told, told
    project.submit(*command)  # at once: what is left of the attempt before has lost the run
    assert causes(run)[2:] == ["finished"], describe(run)
    nothing_was_lost(run, undisturbed)


def test_ranks_whose_server_was_killed_save_and_the_supervisor_starts_the_next_attempt(
    project: Mortal, undisturbed: bytes
) -> None:
    project.plan(HOLD=json.dumps({"1": 25}))
    process, run = project.begin("params.sleep=0.05")
    reach(run, 1, 10)
    server = ranks_of(run, 1)[0].parent
    os.kill(server, signal.SIGKILL)
    (run / "go_1").touch()
    told = "".join(process.communicate(timeout=600))
    assert (process.returncode, causes(run)) == (0, ["lost", "finished"]), told + describe(run)
    nothing_was_lost(run, undisturbed)


def test_a_ghost_whose_run_was_taken_over_publishes_nothing(project: Mortal, undisturbed: bytes) -> None:
    project.plan(HOLD=json.dumps({"1": 25}))
    command = ("--detach", "params.sleep=0.05")
    project.begin(*command)[0].communicate(timeout=600)
    (run,) = project.runs
    wait_for_checkpoint(run, 20)
    ghost = rank_process(run, 1, 0)
    assert ghost is not None
    os.kill(ghost, signal.SIGSTOP)
    os.kill(int(status(run)["job_id"]), signal.SIGKILL)
    project.submit("--local", *command)
    reach(run, 2, 30)
    before = {path.name for path in (run / "checkpoints").glob("*")}
    lines = len(events(run))
    os.kill(ghost, signal.SIGCONT)  # what the death of the supervisor told it to do: a last checkpoint
    wait_for("the end of the ghosts", lambda: not any(rank_process(run, 1, rank) for rank in (0, 1)), run, 60)
    wait_for("the end", lambda: is_over(run), run)
    assert [event for event in events(run)[lines:] if event.get("attempt") == 1] == []
    assert "attempt 2 has taken" in (run / "logs" / "1" / "rank_0.err").read_text()
    kept = {path.name for path in (run / "checkpoints").glob("*")}
    kept = {name for name in kept if not name.startswith(".")}  # unfinished, and for the next owner to remove
    assert not [name for name in kept - before if not re.fullmatch(r"step_000000(40|50|59|60)", name)], kept
    assert causes(run)[1:] == ["finished"], describe(run)
    nothing_was_lost(run, undisturbed)


# Another number of ranks


def curve(run: Path, tag: str = "train/loss") -> list[float]:
    """The values of a curve in TensorBoard's files, in the order in which they are there."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for file in sorted(run.glob("tensorboard/events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            found += [value.tensor.float_val[0] for value in event.summary.value if value.tag == tag]
    return found


def global_batches(run: Path, ranks: int = 4) -> dict[int, list[int]]:
    """The sample ids of each step's global batch, over the ranks in their order."""
    batches: dict[int, list[int]] = {}
    for rank in range(ranks):
        for one in begun(run, rank) if (run / f"steps_{rank}.jsonl").exists() else []:
            batches.setdefault(one["step"], []).extend(one["ids"])
    return batches


LOSS_TOLERANCE = 1e-4
"""Relative, without dropout; measured: 6e-7, from the order in which the ranks' gradients are added up."""


def test_another_number_of_ranks_sees_the_same_samples_and_learns_the_same(project: Mortal, tmp_path: Path) -> None:
    ranks = ["--local", "+params.dropout=0", "params.steps=45"]
    alone = Mortal(tmp_path / "alone")
    alone.submit(*ranks, "resources.tasks_per_node=4")
    project.plan(HOLD=json.dumps({"2": 35}))
    first, run = project.begin(*ranks[1:], "resources.tasks_per_node=4", "params.sleep=0.05")
    reach(run, 1, 10)
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 75
    project.submit(*ranks, "resources.tasks_per_node=2", "params.sleep=0.05", "--detach")
    reach(run, 2, 20)
    project.jobkit("cancel", run.name)
    project.submit(*ranks, "resources.tasks_per_node=3", "params.sleep=0.05")
    assert project.runs == [run] and causes(run) == ["user", "cancelled", "finished"], describe(run)
    assert global_batches(run) == global_batches(alone.runs[0])
    assert len(global_batches(run)) == 45 and all(len(ids) == 12 for ids in global_batches(run).values())
    assert [status(one)["result"]["optimizer_steps"] for one in (run, alone.runs[0])] == [45, 45]
    assert logged_steps(run) == list(range(45))
    losses = list(zip(curve(run), curve(alone.runs[0]), strict=True))
    difference = max(abs(one - other) / other for one, other in losses)
    print(f"largest relative difference of the loss: {difference:.2g}")
    assert 0 < difference < LOSS_TOLERANCE
    nothing_is_left(run)


# The interval


@pytest.mark.parametrize(("override", "mtbf"), [("checkpoint.keep=3", 8 * 3600), ("checkpoint.mtbf=1h", 3600)])
def test_the_automatic_interval_is_journalled(project: Mortal, override: str, mtbf: int) -> None:
    project.submit("--local", "resources.tasks_per_node=1", "checkpoint.every=auto", "params.steps=20", override)
    (run,) = project.runs
    (told,) = [event for event in events(run) if event["event"] == "checkpoint_interval"][:1]
    assert told["mtbf"] == mtbf
    young = min(math.sqrt(2 * told["cost"] * mtbf), max(MAX_SECONDS, told["cost"] / MAX_OVERHEAD))
    first = next(event for event in events(run) if event["event"] == "checkpoint")
    assert told["seconds"] == pytest.approx(max(young, 2 * first["seconds"]), abs=0.02)
    assert "a checkpoint every " not in (run / "logs" / "1" / "rank_0.out").read_text(), "no other follows"
