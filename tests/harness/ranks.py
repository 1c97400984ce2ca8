"""Several real ranks in a test: processes that are forked, joined by gloo on this machine.

def add(ranks: RankGroup) -> int:
    return int(ranks.sum(torch.tensor([ranks.rank + 1])))

assert run_ranks(add, 3) == [6, 6, 6]
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here, so that forked ranks have it: their first optimizer imports it
import torch.distributed as dist

from jobkit.config.schema import Config
from jobkit.loop.context import Context
from jobkit.loop.join import Joined
from jobkit.loop.rank import Rank
from jobkit.run import records
from jobkit.run.records import Lease
from jobkit.run.rundir import RunDir
from jobkit.wire.group import RankGroup
from jobkit.wire.pages import Page
from jobkit.worker.rendezvous import Reservation

PATIENCE = float(os.environ.get("JOBKIT_TEST_PATIENCE", 300))


def free_port() -> int:
    """Return a port that no program gets which takes any: each rank of gloo does."""
    reservation = Reservation()
    reservation.close()
    return reservation.port


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Return `function(ranks, *arguments)` of each rank, in their order; fail with the first error of a rank."""
    context = multiprocessing.get_context("fork")
    reservation, pipes, processes = Reservation(), [], []  # held: ranks of another test take ports meanwhile
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(sender, function, rank, world_size, reservation.port, arguments))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    answers: list[tuple[Any, str | None]] = []
    for rank, receiver in enumerate(pipes):
        try:
            answers.append(receiver.recv() if receiver.poll(PATIENCE) else (None, f"rank {rank} hangs"))
        except EOFError:
            answers.append((None, f"rank {rank} died"))
    errors = [error for _, error in answers if error is not None]
    for process in processes:
        process.join(5 if errors else PATIENCE)  # others may wait for one that failed
        process.kill()
        process.join()  # until then it writes its reports
    reservation.close()
    assert not errors, "\n".join(errors)
    return [value for value, _ in answers]


def _run(
    sender: Any, function: Callable[..., Any], rank: int, world_size: int, port: int, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        if world_size > 1:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
        value = function(RankGroup.of_world(), *arguments)
        pickle.dumps(value)
        sender.send((value, None))
        if world_size > 1:
            dist.barrier()
    except BaseException:
        sender.send((None, f"rank {rank}: {traceback.format_exc()}"))
    os._exit(0)


def make_rank(folder: Path, config: Config | None = None, rank: int = 0, world_size: int = 1) -> Rank:
    """Return a Rank in a run directory."""
    run = RunDir(folder / "test-01234567")
    run.path.mkdir(parents=True, exist_ok=True)
    made = Rank(
        run=run,
        attempt=1,
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        node=0,
        page=Page.create(),
    )
    made.config = config or Config(name="test", task="module:function")
    return made


def make_context(folder: Path, ranks: RankGroup, config: Config | None = None, attempt: int = 1) -> Context:
    """Return a Context, as an attempt has it that begins in a run directory; the one before is over."""
    rank = make_rank(folder, config, ranks.rank, ranks.world_size)
    rank.attempt = attempt
    if ranks.is_main:
        records.write(rank.run.lease_file, Lease(attempt=attempt, writer="w", token="t", job_id="1"))
    ranks.barrier()
    return Context(rank, Joined(torch.device("cpu"), ranks), {})
