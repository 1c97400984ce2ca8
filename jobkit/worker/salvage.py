"""`jobkit/start.py jobkit.worker.salvage RUNDIR`: the program of ranks that only save the newest snapshot in memory.

    supervisor --StartRanks(salvage)--> agents --fork--> these ranks: the slots of the last attempt --> a checkpoint

The user's program has no part in it, nor has a device. A stop does not concern them: the supervisor kills them in time,
and a checkpoint that is not complete has no name.
"""

from __future__ import annotations

import os
from typing import NoReturn

from jobkit.log import configure, log
from jobkit.loop.rank import Rank
from jobkit.run.rundir import RunDir
from jobkit.wire.pages import Phase, slots_of
from jobkit.worker.forked import run_and_end


def run_salvage(run: RunDir) -> NoReturn:
    """Save the newest snapshot of all ranks, and end this process."""

    def program() -> None:
        # Here: the agent of a `command:` has not imported torch.
        from jobkit.checkpoint.salvage import save_newest
        from jobkit.checkpoint.store import Store
        from jobkit.loop.join import form_group
        from jobkit.wire.group import RankGroup

        rank = Rank.of_environment(run)
        rank.beat(-1, Phase.SAVING)
        if rank.world_size > 1:
            form_group(rank, "gloo")
        ranks = RankGroup.of_world()
        # Another folder than the attempt's own: one of its ranks may write there yet, on a node that was cut off.
        store = Store(run.checkpoints, f"{rank.attempt}.memory")
        keep, slots = rank.config.checkpoint.keep, slots_of(os.environ) or ()
        step = save_newest(slots, ranks, store, keep=keep, check_lease=rank.check_lease)
        if ranks.is_main and step is not None:
            log.info("the snapshot of step %d is a checkpoint now", step)

    configure("stdout")
    run_and_end(program)


def main(arguments: list[str]) -> NoReturn:
    run_salvage(RunDir(arguments[0]))
