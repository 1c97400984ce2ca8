"""Whatever kills a run under a real Slurm, it goes on by itself to its end, with nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from harness.processes import ranks_of as processes_of_ranks
from harness.project import (
    Project,
    begun,
    describe,
    events,
    logged_steps,
    names,
    queue,
    status,
    step,
    wait_for,
    weights,
)
from harness.quick_slurm import NO_ANSWER, QUICK
from slurm_cluster import Cluster, process_table

from jobkit import slurm as scheduler

STEPS = 60
EVERY = 10
UNDER_WAY = 6
"""Steps that may be done while a checkpoint is being written, and until a death is felt."""

Weights = Callable[[int], bytes]
Action = Callable[[Cluster, Project, Path], object]


# A run, and what is asked of it in the end


# Each rank of each attempt imports torch: there are no more of them than what is shown needs.
ON_TWO_NODES = ("resources.nodes=2", "resources.tasks_per_node=1")
ON_ONE_NODE = ("resources.nodes=1", "resources.tasks_per_node=2")
ALONE = ("resources.nodes=1", "resources.tasks_per_node=1")


def submit(project: Project, *overrides: str) -> Path:
    """Submit a run with a checkpoint after every ten steps."""
    project.submit(*command(*overrides))
    (run,) = project.runs
    return run


def command(*overrides: str) -> list[str]:
    return ["--cluster", "slurm", "params.sleep=0.1", f"checkpoint.every={EVERY}", *overrides]


def causes(run: Path) -> list[str]:
    return [attempt["cause"] for attempt in status(run)["attempts"]]


def reach(run: Path, attempt: int, checkpoint: int) -> None:
    """Wait until an attempt trains, and has made a checkpoint."""

    def reached() -> bool:
        now = status(run)
        return len(now.get("attempts", [])) == attempt and (now["checkpoint"] or 0) >= checkpoint < step(run)

    wait_for(f"step {checkpoint} in attempt {attempt}", reached, run, seconds=900)


def end_of(run: Path, attempt: int) -> str:
    """The cause of an attempt's end, waited for."""
    wait_for(f"the end of attempt {attempt}", lambda: status(run)["attempts"][attempt - 1]["cause"], run, seconds=900)
    return str(causes(run)[attempt - 1])


def wait_until_over(cluster: Cluster, project: Project, run: Path, look: Callable[[], object] = lambda: None) -> None:
    def is_over() -> bool:
        look()
        return status(run).get("state") in ("finished", "failed", "cancelled")

    wait_for("the end of the run", is_over, run)
    wait_for("an empty queue", lambda: not queue(cluster, project), run)


def assert_nothing_lost(run: Path, uninterrupted: Weights) -> None:
    """The weights and the curve are those of a run that nothing happened to, and little was done twice."""
    assert status(run)["state"] == "finished", describe(run)
    assert logged_steps(run) == list(range(STEPS)), describe(run)
    ranks = len(list(run.glob("steps_*.jsonl")))
    assert weights(run) == uninterrupted(ranks)
    for rank in range(ranks):
        done = [one["step"] for one in begun(run, rank)]
        assert sorted(set(done)) == list(range(STEPS))
        repeated = [last + 1 - following for last, following in pairwise(done) if following != last + 1]
        assert all(0 < count <= EVERY + UNDER_WAY for count in repeated), f"rank {rank}: {repeated}\n{describe(run)}"
    for before, after in pairwise(status(run)["attempts"]):
        assert before["durable_step"] <= (after["first_step"] or STEPS), describe(run)


# Processes of a run, and nobody else's


def processes(run: Path, program: str) -> dict[int, dict[str, str]]:
    """The environments, as they were at the start, of a run's processes that have a program's name, by process id."""
    found = {}
    for pid in process_table():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            if f"JOBKIT_RUN={run}" in environment and Path(words[0]).name.startswith(program):
                found[pid] = dict(line.split("=", 1) for line in environment if "=" in line)
    return found


def node_of(pid: int) -> str:
    """The node of a process of a job step."""
    lines = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return next(line.partition("=")[2] for line in lines if line.startswith("SLURMD_NODENAME="))


def ranks_of(run: Path, node: str = "") -> dict[int, int]:
    """Process ids of a run's ranks by rank, those of one node or all."""
    found = processes_of_ranks(run, len(status(run)["attempts"]))
    return {rank: process.pid for rank, process in found.items() if node_of(process.pid).startswith(node)}


def nodes_of(run: Path) -> set[str]:
    """The nodes where a run's ranks are."""
    return {node_of(pid) for pid in ranks_of(run).values()}


def srun_of(run: Path) -> tuple[int, int]:
    """srun, which the batch script waits for, and the shepherd that it has started."""
    table = process_table()
    pids = processes(run, "srun")
    (main,) = [pid for pid in pids if table[pid].parent not in pids]
    (shepherd,) = [pid for pid in pids if table[pid].parent == main]
    return main, shepherd


def kill(*pids: int, number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# Deaths


def kill_a_rank(cluster: Cluster, project: Project, run: Path) -> None:
    kill(ranks_of(run)[max(ranks_of(run))])


def kill_all_ranks(cluster: Cluster, project: Project, run: Path) -> None:
    kill(*ranks_of(run).values())


def kill_srun(cluster: Cluster, project: Project, run: Path) -> None:
    kill(srun_of(run)[0])


def kill_srun_after_its_shepherd(cluster: Cluster, project: Project, run: Path) -> None:
    main, shepherd = srun_of(run)
    kill(shepherd)
    time.sleep(1)
    kill(main)


def supervisor_of(run: Path) -> int:
    """The supervisor, which has started srun."""
    supervisor = process_table()[srun_of(run)[0]].parent
    assert "jobkit.supervisor" in Path(f"/proc/{supervisor}/cmdline").read_text()
    return supervisor


def kill_the_supervisor(cluster: Cluster, project: Project, run: Path) -> None:
    kill(supervisor_of(run))


def kill_the_batch_script(cluster: Cluster, project: Project, run: Path) -> None:
    script = process_table()[supervisor_of(run)].parent
    assert "slurm_script" in Path(f"/proc/{script}/cmdline").read_text()
    kill(script)


def preempt(cluster: Cluster, project: Project, run: Path) -> None:
    cluster.preempt(status(run)["job_id"])


def rehearse(cluster: Cluster, project: Project, run: Path) -> None:
    assert "preempted at step" in project.jobkit("preempt", run.name).stdout


def rehearse_without_grace(cluster: Cluster, project: Project, run: Path) -> None:
    assert "preempted at step" in project.jobkit("preempt", run.name, "--no-grace").stdout


def kill_a_rank_and_preempt(cluster: Cluster, project: Project, run: Path) -> None:
    """The job is preempted while it starts the ranks again: what of two at once comes first is Slurm's to say."""
    number = len(status(run)["attempts"])
    kill_a_rank(cluster, project, run)
    end_of(run, number)
    preempt(cluster, project, run)


def stop_a_rank(cluster: Cluster, project: Project, run: Path) -> None:
    kill(ranks_of(run)[1], number=signal.SIGSTOP)


Deaths = Sequence[tuple[Action, list[str]]]
"""What is done, and the causes of the attempts that end of it."""

NODES: Deaths = [
    (stop_a_rank, ["hang"]),
    (kill_a_rank, ["killed"]),
    (kill_srun, ["killed"]),
    (kill_the_batch_script, ["killed"]),
]
NODE: Deaths = [
    (kill_a_rank_and_preempt, ["killed", "preempted"]),
    (rehearse, ["preempted"]),
    (kill_all_ranks, ["killed"]),
    (kill_the_supervisor, ["killed"]),
    (rehearse_without_grace, ["preempted"]),
]
KEPT, GIVEN_BACK = "in place", "requeued"


@pytest.mark.parametrize(
    ("place", "deaths", "began"),
    [
        (ON_TWO_NODES, NODES, [KEPT, KEPT, KEPT, GIVEN_BACK]),
        (ON_ONE_NODE, NODE, [KEPT, GIVEN_BACK, GIVEN_BACK, KEPT, GIVEN_BACK, GIVEN_BACK]),
    ],
    ids=["nodes", "node"],
)
def test_whatever_is_killed_the_run_goes_on_as_the_same_job(
    slurm: Cluster, tmp_path: Path, uninterrupted: Weights, place: Sequence[str], deaths: Deaths, began: Sequence[str]
) -> None:
    project = Project(tmp_path, slurm.env)
    project.slow_down(attempts=len(began))  # what is to be killed must not have finished when a slow command comes
    run = submit(project, *place, "checkpoint.every=5", "watchdog=8s", "retry.exclude_after=9")
    for death, expected in deaths:
        number = len(status(run).get("attempts", [])) or 1
        reach(run, number, (status(run)["checkpoint"] or 0) + 5)
        death(slurm, project, run)
        assert end_of(run, number) == expected[0], describe(run)
        if expected == ["hang"]:
            for rank in range(2):
                assert "(most recent call first)" in (run / f"logs/{number}/rank_{rank}.err").read_text(), rank
            assert "watchdog" in status(run)["attempts"][number - 1]["failure"]["error"]
        following = number + len(expected)
        wait_for(f"attempt {following}", lambda n=following: len(status(run)["attempts"]) == n, run)  # type: ignore[misc]
    wait_until_over(slurm, project, run)
    assert causes(run) == [*(cause for _, causes in deaths for cause in causes), "finished"], describe(run)
    assert {attempt["job_id"] for attempt in status(run)["attempts"]} == {status(run)["job_id"]}
    assert [attempt["began"] for attempt in status(run)["attempts"]] == ["submitted", *began]
    assert_nothing_lost(run, uninterrupted)


def test_a_job_that_slurm_will_not_requeue_is_followed_by_another(
    slurm: Cluster, tmp_path: Path, uninterrupted: Weights
) -> None:
    project = Project(tmp_path, slurm.env)
    own = ["clusters.slurm.exclude=node4", "retry.exclude_after=1"]
    run = submit(project, *ALONE, "retry.in_place=false", *own)
    job = status(run)["job_id"]
    reach(run, 1, EVERY)
    slurm.command("scontrol", "update", f"JobId={job}", "Requeue=0")
    kill_a_rank(slurm, project, run)
    running = []
    look = ("squeue", "--noheader", "--states=running", f"--name={run.name}", "--format=%i")
    wait_until_over(slurm, project, run, lambda: running.append(slurm.command(*look).split()))
    assert max(map(len, running)) == 1
    assert causes(run) == ["killed", "finished"]
    first, second = status(run)["attempts"]
    assert (first["job_id"], second["job_id"]) == (job, status(run)["job_id"]) and second["job_id"] != job
    assert slurm.job(second["job_id"])["ExcNodeList"] == "node[1,4]", "the user's node, and the one that failed"
    assert_nothing_lost(run, uninterrupted)


def test_a_node_whose_ranks_die_twice_is_excluded(slurm: Cluster, tmp_path: Path, uninterrupted: Weights) -> None:
    project = Project(tmp_path, slurm.env)
    run = submit(project, *ON_TWO_NODES)
    for number in (1, 2):
        reach(run, number, number * EVERY)
        assert "excluded" not in names(run)
        kill(*ranks_of(run, "node2").values())
        assert end_of(run, number) == "killed"
        assert status(run)["attempts"][number - 1]["failure"]["node"] == "node2", describe(run)
    reach(run, 3, 3 * EVERY)
    assert [event["node"] for event in events(run) if event["event"] == "excluded"] == ["node2"]
    assert len(nodes_of(run)) == 2 and "node2" not in nodes_of(run)
    wait_until_over(slurm, project, run)
    assert "excluded nodes: node2" in project.jobkit("status", run.name).stdout
    assert causes(run) == ["killed", "killed", "finished"]
    assert_nothing_lost(run, uninterrupted)


def test_an_exception_that_always_comes_ends_the_run_and_is_shown(slurm: Cluster, tmp_path: Path) -> None:
    project = Project(tmp_path, slurm.env)
    task = project.path / "mytask.py"
    spoilt = "        if step == 14: raise ValueError('a bad sample')\n        loss.backward()"
    task.write_text(task.read_text().replace("        loss.backward()", spoilt))
    run = submit(project, *ALONE)
    wait_until_over(slurm, project, run)
    assert status(run)["state"] == "failed"
    assert causes(run) == ["crashed"] * 3
    printed = project.jobkit("status", run.name).stdout
    for words in ("Traceback", "ValueError: a bad sample", "rank 0, step 14", "samples of that rank's batch: "):
        assert words in printed
    failure = json.loads(project.jobkit("status", run.name, "--json").stdout)["attempts"][-1]["failure"]
    assert (failure["rank"], failure["step"], len(failure["samples"])) == (0, 14, 12)
    assert "raise ValueError" in failure["traceback"]


def scancel(cluster: Cluster, project: Project, run: Path) -> None:
    cluster.command("scancel", status(run)["job_id"])


def jobkit_cancel(cluster: Cluster, project: Project, run: Path) -> None:
    project.jobkit("cancel", run.name)


def is_over_for_now(cluster: Cluster, run: Path) -> bool:
    return "interrupted" in names(run)


def is_decided(cluster: Cluster, run: Path) -> bool:
    return "requeued" in names(run)


def is_queued(cluster: Cluster, run: Path) -> bool:
    return cluster.job(status(run)["job_id"])["JobState"] == "PENDING"


@pytest.mark.parametrize(
    ("moment", "cancel"),
    [(is_over_for_now, scancel), (is_decided, scancel), (is_queued, scancel), (is_queued, jobkit_cancel)],
    ids=lambda function: function.__name__,
)
def test_a_cancel_during_the_recovery_is_final(
    slurm: Cluster, tmp_path: Path, moment: Callable[[Cluster, Path], bool], cancel: Action
) -> None:
    project = Project(tmp_path, slurm.env)
    run = submit(project, *ALONE, "retry.in_place=false")
    reach(run, 1, EVERY)
    kill(ranks_of(run)[0])
    wait_for("the recovery", lambda: moment(slurm, run), run)
    cancel(slurm, project, run)
    wait_for("the end of its processes", lambda: not any(processes(run, one) for one in ("srun", "python")), run)
    wait_for("an empty queue", lambda: not queue(slurm, project), run)
    seen = json.loads(project.jobkit("status", run.name, "--json").stdout)  # which looks for the job that is gone
    assert seen["state"] == "cancelled", describe(run)
    assert names(run).count("started") == 1


def test_a_requeue_does_not_undo_a_scancel(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    job = slurm.command("sbatch", "--parsable", "--requeue", "-o/dev/null", "--wrap=trap '' TERM; sleep 3; sleep 1")
    wait_for("the job", lambda: slurm.job(job)["JobState"] == "RUNNING")
    before = scheduler.show_job(job)
    slurm.command("scancel", job)
    asked = iter([before])  # at first it seems to run yet
    monkeypatch.setattr(scheduler, "show_job", lambda job_id, ask=scheduler.show_job: next(asked, None) or ask(job_id))
    assert scheduler.requeue(job) is False
    assert slurm.job(job)["Restarts"] == "0"


# On clusters that are set up in another way, or are not well


def test_preemption_that_gives_no_time_or_no_requeue(tmp_path: Path, uninterrupted: Weights, short_dir: Path) -> None:
    with Cluster(short_dir, **QUICK, grace=0) as cluster:
        project = Project(tmp_path, cluster.env)
        run = submit(project, *ALONE)
        for number, setting in enumerate([("REQUEUE", 0), ("CANCEL", 0), ("CANCEL", 10)], start=1):
            mode, grace = setting
            cluster.command("scontrol", "update", "PartitionName=low", f"PreemptMode={mode}", f"GraceTime={grace}")
            reach(run, number, number * EVERY)
            preempt(cluster, project, run)
            assert end_of(run, number) == "preempted", describe(run)
        wait_until_over(cluster, project, run)
    assert causes(run) == ["preempted"] * 3 + ["finished"]
    assert_nothing_lost(run, uninterrupted)


def test_a_lost_node_is_named_and_the_run_goes_on_elsewhere(
    tmp_path: Path, uninterrupted: Weights, short_dir: Path
) -> None:
    # One with the batch script: tests/slurm/test_in_place.py. Both in one run: tests/soak/test_lost_nodes.py.
    with Cluster(short_dir, **QUICK | {"slurmd_timeout": 10}) as cluster:
        project = Project(tmp_path, cluster.env)
        run = submit(project, *ON_TWO_NODES)
        reach(run, 1, EVERY)
        _, lost = sorted(nodes_of(run))
        cluster.kill_node(lost)
        assert end_of(run, 1) == "node_failure"
        wait_until_over(cluster, project, run)
    assert causes(run) == ["node_failure", "finished"]
    assert status(run)["attempts"][0]["failure"]["node"] == lost, describe(run)
    assert_nothing_lost(run, uninterrupted)


def jobs_ever(cluster: Cluster, run: Path) -> list[str]:
    """Ids of all jobs of a run that Slurm remembers."""
    return cluster.command("squeue", "--noheader", "--states=all", f"--name={run.name}", "--format=%i").split()


def wait_until_it_tries_again(submission: subprocess.Popen[str]) -> None:
    """Wait until a submission has got no answer."""
    assert submission.stderr is not None
    while "trying again" not in (line := submission.stderr.readline()):
        assert line, "it ended"


def test_a_controller_that_is_away_loses_no_run_and_starts_none_twice(
    tmp_path: Path, uninterrupted: Weights, short_dir: Path
) -> None:
    with Cluster(short_dir, **QUICK, **NO_ANSWER) as cluster:
        project = Project(tmp_path, cluster.env)
        cluster.stop_controller()
        submission = project.start("submit", "toy.yaml", *command(*ALONE))
        wait_until_it_tries_again(submission)
        cluster.start_controller()
        _, errors = submission.communicate(timeout=600)
        assert submission.returncode == 0, errors
        (run,) = project.runs
        reach(run, 1, EVERY)
        cluster.stop_controller()
        kill(ranks_of(run)[0])
        assert end_of(run, 1) == "killed"
        wait_for("the next attempt", lambda: len(status(run)["attempts"]) == 2, run)
        cluster.start_controller()
        wait_until_over(cluster, project, run)
        assert len(jobs_ever(cluster, run)) == 1
        assert causes(run) == ["killed", "finished"]
        assert_nothing_lost(run, uninterrupted)

        other = Project(tmp_path / "other", cluster.env)
        controller = cluster.daemons()["slurmctld"]
        controller.send(signal.SIGSTOP)
        try:
            submission = other.start("submit", "toy.yaml", *command(*ALONE, "params.steps=20"))
            wait_until_it_tries_again(submission)
        finally:
            controller.send(signal.SIGCONT)
        _, errors = submission.communicate(timeout=600)
        assert submission.returncode == 0, errors
        (run,) = other.runs
        wait_until_over(cluster, other, run)
        assert status(run)["state"] == "finished"
        assert len(jobs_ever(cluster, run)) == 1


def test_a_time_limit_that_comes_before_the_first_step_is_survived(
    slurm: Cluster, tmp_path: Path, uninterrupted: Weights
) -> None:
    slow_import = "if os.environ.get('JOBKIT_ATTEMPT') == '1': time.sleep(70)\n"
    slow_batch = "if os.environ.get('JOBKIT_ATTEMPT') == '1': time.sleep(70)\n        "
    runs = []
    for name, place, words in [("import", "class Numbers", slow_import), ("batch", "generator = ", slow_batch)]:
        project = Project(tmp_path / name, slurm.env)
        task = project.path / "mytask.py"
        task.write_text(task.read_text().replace(place, words + place, 1))
        runs.append((project, submit(project, *ALONE, "resources.time=0:01:00", "params.sleep=0.05")))
    for project, run in runs:
        wait_until_over(slurm, project, run)
        assert causes(run) == ["timeout", "finished"], describe(run)
        assert_nothing_lost(run, uninterrupted)
