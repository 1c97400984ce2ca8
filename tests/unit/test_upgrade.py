"""A run of the edition before goes on while jobkit is replaced under it: the names by which its processes ask."""

from __future__ import annotations

import subprocess

import pytest

from jobkit import start
from jobkit.wire.messages import RankExited, StartRanks, decode


@pytest.mark.parametrize("old", ["jobkit.worker.agent", "jobkit.supervisor.gpus"])
def test_programs_start_by_their_old_names(old: str) -> None:
    begun = subprocess.run(start.words(old), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert "ModuleNotFoundError" not in begun.stderr  # the agent misses its argument, and that is all


def test_messages_keep_their_names() -> None:
    exited = decode(b'{"kind": "Exited", "rank": 2, "attempt": 1, "code": -9, "serial": 4}')
    assert isinstance(exited, RankExited)
    assert (exited.rank, exited.code) == (2, -9)
    begun = decode(
        b'{"kind": "Start", "attempt": 1, "ranks": [{"rank": 0, "local_rank": 0, "local_world_size": 1, "node": 0}],'
        b' "world_size": 1, "nodes": 1, "master_addr": "10.0.0.1", "master_port": 4711}'
    )
    assert isinstance(begun, StartRanks)
