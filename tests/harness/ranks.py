"""Groups of ranks for a test: processes that run one function together and return what it returned."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.group import RankGroup

# Processes are forked off a server that has torch imported already: a group of ranks starts in a fraction of a second.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor", "jobkit.checkpoint.writer"])


class Team(NamedTuple):
    rank: int
    world_size: int
    group: Any

    def checkpointer(self, root: Path, **options: Any) -> Checkpointer:
        return Checkpointer(Store(root, patience=0.2), RankGroup.of(self.group), **options)


def be_a_rank(pipe: Any, team: Team, rendezvous: str, action: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if team.world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=team.rank,
            world_size=team.world_size,
            timeout=timedelta(seconds=20),
        )
        team = team._replace(group=dist.new_group(backend="gloo"))
        dist.barrier()
    try:
        result = pickle.dumps((action(team, *args), None))  # by value: this process is gone when it is read
    except Exception as error:
        result = pickle.dumps((None, f"rank {team.rank}: {type(error).__name__}: {error}"))
    pipe.send_bytes(result)
    with contextlib.suppress(RuntimeError):  # a peer may be dead
        if team.world_size > 1:
            dist.barrier()
    os._exit(0)  # no clean-up that waits for it


def on_ranks(world_size: int, action: Callable[..., Any], *args: Any) -> list[Any]:
    """What `action(team, *args)` returns on each of so many processes; AssertionError where one raises."""
    rendezvous = str(Path(tempfile.mkdtemp(prefix="jobkit-test-")) / "rendezvous")
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = FORKSERVER.Pipe()
        team = Team(rank, world_size, None)
        process = FORKSERVER.Process(target=be_a_rank, args=(theirs, team, rendezvous, action, args), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    results = []
    for pipe in pipes:
        assert pipe.poll(240), "a rank hangs"
        try:
            results.append(pickle.loads(pipe.recv_bytes()))
        except EOFError:
            results.append((None, None))  # it ended itself
    for process in processes:
        process.join(10)
    shutil.rmtree(Path(rendezvous).parent)
    problems = [problem for _, problem in results if problem]
    assert not problems, problems
    return [value for value, _ in results]
