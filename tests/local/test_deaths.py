"""Deaths on this machine: any number of them in one run, and the run ends by itself."""

from __future__ import annotations

import contextlib
import os
import signal

from harness.runs import Project, is_alive, wait_until

from jobkit.run.view import view


def test_any_number_of_deaths_in_one_run(project: Project) -> None:
    """Ranks, one and two, the agent and an exception: each costs an attempt, none the run."""
    faults = [{"kind": "raise", "rank": 2, "step": 90, "attempt": 4}]
    resources = ("resources.tasks_per_node=2", "resources.nodes=2")
    launch = project.submit("--local", "--detach", *resources, steps=100_000, every=5, faults=faults)

    launch.wait_for_step(12).kill_rank(3)
    launch.wait_for_attempt(2).wait_for_step(32)
    first, second = launch.rank_pid(0), launch.rank_pid(1)
    os.kill(first, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # its agent has ended it already
        os.kill(second, signal.SIGKILL)
    launch.wait_for_attempt(3).wait_for_step(52).kill_agent()
    launch.wait_for_attempt(5).end_training().wait_until_over()

    assert launch.status.state == "finished"
    assert launch.causes == ["killed", "killed", "killed", "crashed", "finished"]
    assert {ended.next for ended in launch.ends[:-1]} == {"in_place"}
    assert (launch.ends[0].rank, launch.ends[3].rank) == (3, 2)
    assert [ended.first_step for ended in launch.ends[1:]] == [ended.durable_step for ended in launch.ends[:-1]]
    launch.assert_repeated(*["since the checkpoint"] * (len(launch.steps_done) - 1))
    assert (launch.ends[3].step or 0) >= 90
    jobs = {attempt.began.job_id for attempt in launch.status.attempts}
    assert len(jobs) == 1


def test_ranks_train_on_while_a_killed_supervisor_starts_again(project: Project) -> None:
    launch = project.submit("--local", "--detach", "resources.tasks_per_node=2", steps=100_000)
    launch.wait_for_step(20)
    ranks = [launch.rank_pid(rank) for rank in range(2)]
    supervisors = {launch.supervisor_pid}

    for step in (40, 80, 120):
        before = launch.supervisor_pid
        launch.kill_supervisor()
        wait_until(lambda before=before: launch.supervisor_pid != before, "the next supervisor")
        launch.wait_for_step(step)
        assert [launch.rank_pid(rank) for rank in range(2)] == ranks and all(is_alive(pid) for pid in ranks)
        supervisors.add(launch.supervisor_pid)

    launch.end_training().wait_until_over()
    assert len(supervisors) == 4
    assert (launch.status.state, launch.causes) == ("finished", ["finished"])
    launch.assert_repeated()  # one attempt, each step once


def test_the_job_script_is_killed_too_and_the_same_command_continues(project: Project) -> None:
    """Nobody starts a supervisor again: the agents let their ranks save within a minute, and end."""
    launch = project.submit("--local", "--detach", steps=100_000, step_seconds=0.05)
    launch.wait_for_step(20)
    agent, rank = launch.agent_pid(), launch.rank_pid(0)
    launch.kill_job_script()
    wait_until(lambda: not is_alive(rank) and not is_alive(agent), "the ranks to save and end")
    assert (launch.run.durable_step() or 0) >= 20

    again = project.submit("--local", "--detach", steps=100_000, step_seconds=0.05)
    assert again.run.path == launch.run.path
    again.wait_for_attempt(2)
    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over().assert_repeated("none")
    assert launch.status.state == "cancelled"


def test_ranks_that_outlive_their_job_save_nothing_after_a_rewind(project: Project) -> None:
    launch = project.submit("--local", "--detach", steps=100_000, step_seconds=0.05)
    launch.wait_until(lambda me: (me.run.durable_step() or 0) >= 20, "two checkpoints")
    agent, rank = launch.agent_pid(), launch.rank_pid(0)
    launch.kill_job_script()
    wait_until(lambda: view(launch.run).state == "lost", "the end of the job")
    project.jobkit("rewind", launch.run.name, "10")
    wait_until(lambda: not is_alive(rank) and not is_alive(agent), "the end of the ranks")
    assert launch.run.durable_steps() == [10]
    project.jobkit("resume", launch.run.name, "--detach")
    launch.wait_for_attempt(2).end_training().wait_until_over()
    assert launch.ends[-1].first_step == 10
