"""torchrun keeps one store over its restarts (`--max-restarts`): what the ranks of this start write, and what earlier
ones have left there."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from jobkit.addresses import RENDEZVOUS_SECONDS, new_token
from jobkit.errors import DistributedError

LOOK_SECONDS = 0.05


def outlives_ranks() -> bool:
    """Whether the store at MASTER_ADDR and MASTER_PORT is the launcher's own, and is there for its next start too."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_this_start(store: Store, rank: int, world_size: int, purpose: str) -> Store:
    """The part of a launcher's store in which the ranks of this start are by themselves. Collective.

    Rank 0 counts the starts, and admits the ranks that have joined its own: another rank may first see the number of
    an earlier one. TORCHELASTIC_RESTART_COUNT would not do: agents on two machines count differently.
    Raises DistributedError, on all ranks, where one does not come within RENDEZVOUS_SECONDS.
    """
    newest = f"{purpose}/newest"
    if rank == 0:
        number = store.add(f"{purpose}/starts", 1)
        own = PrefixStore(f"{purpose}/{number}", store)
        store.set(newest, str(number))
        return _admit(own, world_size)
    token, joined = new_token(), ""
    deadline = time.monotonic() + RENDEZVOUS_SECONDS + 30  # longer than rank 0 waits, so that its answer arrives
    while time.monotonic() < deadline:
        found = store.get(newest).decode() if store.check([newest]) else ""
        if found:
            own = PrefixStore(f"{purpose}/{found}", store)
            if found != joined:
                own.set(f"joined/{rank}", token)
                joined = found
            if own.check(["admitted"]):
                missing, admitted = json.loads(own.get("admitted"))
                if admitted.get(str(rank)) == token:
                    _refuse(missing, world_size)
                    return own
        time.sleep(LOOK_SECONDS)
    raise DistributedError(f"rank 0 did not come within {RENDEZVOUS_SECONDS:g} s")


def _admit(own: Store, world_size: int) -> Store:
    others = range(1, world_size)
    try:
        own.wait([f"joined/{rank}" for rank in others], timedelta(seconds=RENDEZVOUS_SECONDS))
        here = list(others)
    except RuntimeError:
        here = [rank for rank in others if own.check([f"joined/{rank}"])]
    missing = [rank for rank in others if rank not in here]
    own.set("admitted", json.dumps([missing, {str(rank): own.get(f"joined/{rank}").decode() for rank in here}]))
    _refuse(missing, world_size)
    return own


def _refuse(missing: list[int], world_size: int) -> None:
    if missing:
        ranks = ", ".join(map(str, missing))
        raise DistributedError(f"rank(s) {ranks} of {world_size} did not come within {RENDEZVOUS_SECONDS:g} s")
