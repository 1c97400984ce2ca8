"""The interruptions of chaos_plan.py, carried out: one function each, which strikes a run that is live."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from chaos_plan import Event
from chaos_run import Live
from harness.processes import command_line
from slurm_cluster import Process, process_table

# By the cluster


def preempt(live: Live, event: Event) -> None:
    """a job of a higher partition takes its nodes, with SIGTERM and grace"""
    live.cluster.preempt(live.job_id)


def preempt_no_grace(live: Live, event: Event) -> None:
    """scontrol requeue from outside: what preemption without grace does"""
    live.cluster.command("scontrol", "requeue", live.job_id)


def rehearsed(live: Live, event: Event) -> None:
    """jobkit preempt RUN"""
    live.command("preempt", live.run.name)


def time_limit(live: Live, event: Event) -> None:
    """nothing: the limit of a minute ends the attempt (the whole run has it)"""


def node_lost(live: Live, event: Event) -> None:
    """a node without the batch script dies, and is back 5 s after the product has reacted"""
    lose_node(live, batch=False)


def batch_node_lost(live: Live, event: Event) -> None:
    """the node with the batch script dies, and is back 5 s after the product has reacted"""
    lose_node(live, batch=True)


def lose_node(live: Live, batch: bool) -> None:
    job, attempt = live.cluster.job(live.job_id), live.attempt
    names = live.cluster.command("scontrol", "show", "hostnames", job["NodeList"]).split()
    lost = next(name for name in names if (name == job["BatchHost"]) == batch)
    live.cluster.kill_node(lost)
    live.later(5, lambda: live.has_reacted(attempt), lambda: live.cluster.restart_node(lost))


def controller_away(live: Live, event: Event) -> None:
    """a rank is killed while slurmctld is away for 20 s"""
    live.cluster.stop_controller()
    live.away = True
    live.later(20, lambda: True, live.bring_controller_back)
    kill_rank(live, event)


# By a signal


def kill_rank(live: Live, event: Event) -> None:
    """SIGKILL to one rank"""
    live.rank(event.rank).send(signal.SIGKILL)


def kill_all_ranks(live: Live, event: Event) -> None:
    """SIGKILL to all ranks"""
    for process in live.ranks().values():
        process.send(signal.SIGKILL)


def kill_batch(live: Live, event: Event) -> None:
    """SIGKILL to the batch script"""
    live.of_job(lambda process: "/slurm_script" in command_line(process))[0].send(signal.SIGKILL)


def kill_srun(live: Live, event: Event) -> None:
    """SIGKILL to srun"""
    found = live.of_job(lambda process: process.name == "srun")
    own = {process.pid for process in found}
    for process in found:
        if process.parent not in own:  # the other one of each pair then ends the step; without both it goes on
            process.send(signal.SIGKILL)


def stop_rank(live: Live, event: Event) -> None:
    """SIGSTOP to one rank: it hangs and does not say so"""
    live.rank(event.rank).send(signal.SIGSTOP)


def kill_worker(live: Live, event: Event) -> None:
    """SIGKILL to a data loader's worker (in a run that has them)"""
    rank = live.rank(event.rank)
    children = [process for process in process_table().values() if process.parent == rank.pid]
    next(process for process in children if process.has_open(f"{live.run}/logs/")).send(signal.SIGKILL)


# By the user's code: the task looks for an order at every step


def exception(live: Live, event: Event) -> None:
    """one rank raises"""
    live.order("raise", event.rank)


def hang(live: Live, event: Event) -> None:
    """one rank loops for ever"""
    live.order("loop", event.rank)


def collective_hang(live: Live, event: Event) -> None:
    """one rank sleeps for ever, the others wait for it in a collective"""
    live.order("sleep", event.rank)


def oom(live: Live, event: Event) -> None:
    """one rank asks for more memory than there is"""
    live.order("allocate", event.rank)


# To its files, and then to a rank


def corrupt_newest(live: Live, event: Event) -> None:
    """a byte of the newest checkpoint flips, then a rank is killed"""
    file = damaged_file(live, event.rank)
    data = bytearray(file.read_bytes())
    data[int(event.place * (len(data) - 1))] ^= 1
    file.write_bytes(data)
    kill_rank(live, event)


def truncate_newest(live: Live, event: Event) -> None:
    """the newest checkpoint loses the end of a file, then a rank is killed"""
    file = damaged_file(live, event.rank)
    os.truncate(file, int(event.place * (file.stat().st_size - 1)))
    kill_rank(live, event)


def delete_latest(live: Live, event: Event) -> None:
    """the link checkpoints/latest goes, then a rank is killed"""
    (live.run / "checkpoints/latest").unlink(missing_ok=True)
    kill_rank(live, event)


def damaged_file(live: Live, rank: int) -> Path:
    """A rank's file of the newest checkpoint, which from now on counts as damaged."""
    newest = max(live.intact())
    live.damage(newest)
    return live.run / f"checkpoints/step_{newest:08d}/rank_{rank:05d}.bin"


# By the user, on this machine


def ctrl_c(live: Live, event: Event) -> None:
    """Ctrl-C, and the same command again"""
    live.foreground.send_signal(signal.SIGINT)


def terminate(live: Live, event: Event) -> None:
    """SIGTERM to the command, and the same command again"""
    live.foreground.send_signal(signal.SIGTERM)


def kill_command(live: Live, event: Event) -> None:
    """SIGKILL to the command in the foreground, and the same command again"""
    live.foreground.kill()


def kill_supervisor(live: Live, event: Event) -> None:
    """SIGKILL to the supervisor, and the same command again"""
    if supervisor := Process.read(int(live.job_id)):
        supervisor.send(signal.SIGKILL)


ACTIONS: dict[str, Callable[[Live, Event], object]] = {
    name: function
    for name, function in inspect.getmembers(sys.modules[__name__], inspect.isfunction)
    if list(inspect.signature(function).parameters) == ["live", "event"]
}
"""By the name that chaos_plan.py gives them."""
