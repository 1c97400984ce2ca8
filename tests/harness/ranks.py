"""Groups of ranks for a test: processes that run one function together and return what it returned."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.group import RankGroup
from jobkit.supervisor.parents import WARM_PARENT, Child, Parent

PATIENCE_SECONDS = 240.0
"""After which a rank hangs, on a busy machine too."""


class Team(NamedTuple):
    rank: int
    world_size: int
    group: Any

    def checkpointer(self, root: Path, **options: Any) -> Checkpointer:
        return Checkpointer(Store(root, missing_seconds=0.2), RankGroup.of(self.group), **options)


def warm_parent() -> Parent:
    """This test process's connection to the server that has imported torch, and what the test's file imports."""
    file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    return _parent_for(Path(file).stem)


@lru_cache(maxsize=1)
def _parent_for(module: str) -> Parent:
    global _last
    if _last is not None:
        _last.close()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    _last = Parent.start(environment, [module] if module else [])
    assert _last.is_warm, f"{os.environ[WARM_PARENT]} has refused: each rank would import torch"
    return _last


_last: Parent | None = None
"""The one for the file before: no process of its tests is left."""


def start(action: Callable[..., object], *args: Any, stdout: int = 1) -> Child:
    """A process that runs `action(*args)`."""
    call = [pickle.dumps((action, args)).hex()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    target = ("harness.ranks:call", call)
    return warm_parent().fork(target, [stdout, 2], environment=environment, cwd=str(Path.cwd()))


def call(pickled: str) -> None:
    """What the process runs."""
    action, args = pickle.loads(bytes.fromhex(pickled))
    action(*args)


def wait_for_end(*children: Child, seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether processes of `start` have ended in time."""
    deadline = time.monotonic() + seconds
    while any(warm_parent().poll(child) is None for child in children):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def be_a_rank(folder: Path, team: Team, action: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if team.world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=team.rank,
            world_size=team.world_size,
            timeout=timedelta(seconds=60),
        )
        team = team._replace(group=dist.new_group(backend="gloo"))
        dist.barrier()
    try:
        result = pickle.dumps((action(team, *args), None))
    except Exception as error:
        result = pickle.dumps((None, f"rank {team.rank}: {type(error).__name__}: {error}"))
    (folder / f"result_{team.rank}").write_bytes(result)
    with contextlib.suppress(RuntimeError):  # a peer may be dead
        if team.world_size > 1:
            dist.barrier()
    os._exit(0)  # no clean-up that waits for it


def on_ranks(world_size: int, action: Callable[..., Any], *args: Any) -> list[Any]:
    """What `action(team, *args)` returns on each of so many processes; AssertionError where one raises."""
    with tempfile.TemporaryDirectory(prefix="jobkit-test-") as name:
        folder = Path(name)
        children = [start(be_a_rank, folder, Team(rank, world_size, None), action, args) for rank in range(world_size)]
        if not wait_for_end(*children):
            warm_parent().signal("KILL", children)
            raise AssertionError("a rank hangs")
        results = [_result(folder / f"result_{rank}") for rank in range(world_size)]
    problems = [problem for _, problem in results if problem]
    assert not problems, problems
    return [value for value, _ in results]


def _result(file: Path) -> tuple[Any, str | None]:
    """What a rank returned and what it raised; neither where it ended itself."""
    found: tuple[Any, str | None] = pickle.loads(file.read_bytes()) if file.exists() else (None, None)
    return found
