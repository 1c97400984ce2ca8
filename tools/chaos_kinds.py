"""The interruptions that tools/chaos.py draws from: how each comes about, and how common it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_cluster import Process, process_table

if TYPE_CHECKING:
    from chaos_run import Live

STEPS, SAVING, TOGETHER, RECOVERY = "steps", "saving", "two_at_once", "during_recovery"
MOMENTS = {
    STEPS: "after some steps of the attempt",
    SAVING: "while a checkpoint is being written",
    TOGETHER: "within a second after the one before",
    RECOVERY: "while the attempt starts",
}


@dataclass(frozen=True)
class Event:
    """One planned interruption."""

    number: int
    kind: str
    moment: str
    steps: int
    """With `steps` and `saving`: how many the attempt has done."""
    delay: float
    """With `two_at_once` and `during_recovery`: how many seconds to wait."""
    rank: int
    """Whom it strikes, where it strikes one."""
    place: float
    """Which byte of a file, from 0 to 1."""

    def __str__(self) -> str:
        when = {
            STEPS: f"after {self.steps} steps",
            SAVING: f"saving, after {self.steps} steps",
            TOGETHER: f"+{self.delay:.1f} s with the last",
        }
        return when.get(self.moment, f"+{self.delay:.1f} s in start-up")


@dataclass(frozen=True)
class Kind:
    """One way to interrupt a run."""

    fire: Callable[[Live, Event], object]
    weight: int
    """How common it is; 0: only where it is asked for."""
    place: str = ""
    """`slurm` or `local`; both where empty."""
    graceful: bool = False
    """The run gets the time for a checkpoint: no step may be repeated."""
    anytime: bool = True
    """Makes sense while the ranks start, and together with another."""
    by_hand: bool = False
    """The run has ended for its user: typing the same command again is what continues it."""
    own_cluster: bool = False
    """Disturbs all jobs of a cluster."""
    damages: bool = False
    """The newest checkpoint is no good afterwards."""


KINDS: dict[str, Kind] = {}


def kind(weight: int, **more: object) -> Callable[[Callable[[Live, Event], object]], Callable[[Live, Event], object]]:
    """Put a function into the table, under its own name."""

    def put(function: Callable[[Live, Event], object]) -> Callable[[Live, Event], object]:
        KINDS[function.__name__] = Kind(function, weight, **more)  # type: ignore[arg-type]
        return function

    return put


# By the cluster


@kind(8, place="slurm", graceful=True)
def preempt(live: Live, event: Event) -> None:
    """a job of a higher partition takes its nodes, with SIGTERM and grace"""
    live.cluster.preempt(live.job_id)


@kind(3, place="slurm")
def preempt_no_grace(live: Live, event: Event) -> None:
    """scontrol requeue from outside: what preemption without grace does"""
    live.cluster.command("scontrol", "requeue", live.job_id)


@kind(4, graceful=True)
def rehearsed(live: Live, event: Event) -> None:
    """jobkit preempt RUN"""
    live.command("preempt", live.run.name)


@kind(0, place="slurm", graceful=True, anytime=False)
def time_limit(live: Live, event: Event) -> None:
    """nothing: the limit of a minute ends the attempt (the whole run has it)"""


@kind(2, place="slurm", anytime=False, own_cluster=True)
def node_lost(live: Live, event: Event) -> None:
    """a node without the batch script dies, and is back 5 s after the product has reacted"""
    lose_node(live, batch=False)


@kind(2, place="slurm", anytime=False, own_cluster=True)
def batch_node_lost(live: Live, event: Event) -> None:
    """the node with the batch script dies, and is back 5 s after the product has reacted"""
    lose_node(live, batch=True)


def lose_node(live: Live, batch: bool) -> None:
    job, attempt = live.cluster.job(live.job_id), live.attempt
    names = live.cluster.command("scontrol", "show", "hostnames", job["NodeList"]).split()
    lost = next(name for name in names if (name == job["BatchHost"]) == batch)
    live.cluster.kill_node(lost)
    live.later(5, lambda: live.has_reacted(attempt), lambda: live.cluster.restart_node(lost))


@kind(2, place="slurm", anytime=False, own_cluster=True)
def controller_away(live: Live, event: Event) -> None:
    """a rank is killed while slurmctld is away for 20 s"""
    live.cluster.stop_controller()
    live.away = True
    live.later(20, lambda: True, live.bring_controller_back)
    kill_rank(live, event)


# By a signal


@kind(6)
def kill_rank(live: Live, event: Event) -> None:
    """SIGKILL to one rank"""
    live.rank(event.rank).send(signal.SIGKILL)


@kind(3)
def kill_all_ranks(live: Live, event: Event) -> None:
    """SIGKILL to all ranks"""
    for process in live.ranks().values():
        process.send(signal.SIGKILL)


@kind(2, place="slurm")
def kill_batch(live: Live, event: Event) -> None:
    """SIGKILL to the batch script"""
    live.of_job(lambda process: "/slurm_script" in command_line(process))[0].send(signal.SIGKILL)


@kind(2, place="slurm")
def kill_srun(live: Live, event: Event) -> None:
    """SIGKILL to srun"""
    for process in live.of_job(lambda process: process.name == "srun"):
        process.send(signal.SIGKILL)


@kind(3)
def stop_rank(live: Live, event: Event) -> None:
    """SIGSTOP to one rank: it hangs and does not say so"""
    live.rank(event.rank).send(signal.SIGSTOP)


@kind(2, anytime=False)
def kill_worker(live: Live, event: Event) -> None:
    """SIGKILL to a data loader's worker (in a run that has them)"""
    rank = live.rank(event.rank)
    children = [process for process in process_table().values() if process.parent == rank.pid]
    next(process for process in children if is_rank(process)).send(signal.SIGKILL)  # forked: it has the same words


# By the user's code: the task looks for an order at every step


@kind(4)
def exception(live: Live, event: Event) -> None:
    """one rank raises"""
    live.order("raise", event.rank)


@kind(3)
def hang(live: Live, event: Event) -> None:
    """one rank loops for ever"""
    live.order("loop", event.rank)


@kind(3)
def collective_hang(live: Live, event: Event) -> None:
    """one rank sleeps for ever, the others wait for it in a collective"""
    live.order("sleep", event.rank)


@kind(3)
def oom(live: Live, event: Event) -> None:
    """one rank asks for more memory than there is"""
    live.order("allocate", event.rank)


# To its files, and then to a rank


@kind(2, anytime=False, damages=True)
def corrupt_newest(live: Live, event: Event) -> None:
    """a byte of the newest checkpoint flips, then a rank is killed"""
    file = checkpoint_file(live, event)
    data = bytearray(file.read_bytes())
    data[int(event.place * (len(data) - 1))] ^= 1
    file.write_bytes(data)
    kill_rank(live, event)


@kind(2, anytime=False, damages=True)
def truncate_newest(live: Live, event: Event) -> None:
    """the newest checkpoint loses the end of a file, then a rank is killed"""
    file = checkpoint_file(live, event)
    os.truncate(file, int(event.place * (file.stat().st_size - 1)))
    kill_rank(live, event)


@kind(1, anytime=False)
def delete_latest(live: Live, event: Event) -> None:
    """the link checkpoints/latest goes, then a rank is killed"""
    (live.run / "checkpoints/latest").unlink(missing_ok=True)
    kill_rank(live, event)


def checkpoint_file(live: Live, event: Event) -> Path:
    """A rank's file of the newest checkpoint, which from now on counts as damaged."""
    newest = max(live.intact())
    live.damage(newest)
    return live.run / f"checkpoints/step_{newest:08d}/rank_{event.rank:05d}.bin"


# By the user, on this machine


@kind(4, place="local", graceful=True, by_hand=True)
def ctrl_c(live: Live, event: Event) -> None:
    """Ctrl-C, and the same command again"""
    live.foreground.send_signal(signal.SIGINT)


@kind(2, place="local", graceful=True, by_hand=True)
def terminate(live: Live, event: Event) -> None:
    """SIGTERM to the command, and the same command again"""
    live.foreground.send_signal(signal.SIGTERM)


@kind(3, place="local", graceful=True, by_hand=True)
def kill_command(live: Live, event: Event) -> None:
    """SIGKILL to the command in the foreground, and the same command again"""
    live.foreground.kill()


@kind(3, place="local", by_hand=True)
def kill_controller(live: Live, event: Event) -> None:
    """SIGKILL to the process that controls the ranks, and the same command again"""
    if controller := Process.read(int(live.job_id)):
        controller.send(signal.SIGKILL)


def command_line(process: Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def is_rank(process: Process) -> bool:
    """Whether it runs what jobkit starts a rank with; its data loader's workers look the same."""
    return "submitit.core._submit" in command_line(process)
