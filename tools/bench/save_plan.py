"""What the plan of a save costs rank 0: the first save of many tensors against those after it.

Of rank 0 the writing thread's own processor time is taken, most of it under the GIL, which the training needs. 4 ranks
of 19,200 shards make it plan as 64 of 1,200 do:
    python tools/bench/save_plan.py --tensors 76800 --ranks 4 --dir DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.group import RankGroup


class Clock:
    """Processor seconds of the writing thread of each save."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        run = threading.Thread.run

        def timed(thread: threading.Thread) -> None:
            before = time.thread_time()
            run(thread)
            if thread.name.startswith("checkpoint-") and thread.name[11:].isdigit():
                self.seconds.append(time.thread_time() - before)

        threading.Thread.run = timed  # type: ignore[method-assign]


def be_a_rank(rank: int, args: argparse.Namespace, root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/rendezvous",
        rank=rank,
        world_size=args.ranks,
        timeout=timedelta(seconds=600),
    )
    mesh = init_device_mesh("cpu", (args.ranks,))
    one = distribute_tensor(torch.zeros(args.ranks, 1), mesh, [Shard(0)])
    state = {f"blocks.{number}.weight": one.clone() for number in range(args.tensors // args.ranks)}
    checkpointer = Checkpointer(Store(root / "checkpoints"), RankGroup.of_world(), keep=1)
    clock, walls = Clock(), []
    for step in range(1, 2 + args.repeats):
        dist.barrier()
        walls.append(checkpointer.save(step, {"model": state}).wait().seconds)
        checkpointer.wait()
    if rank == 0:
        report(args, clock.seconds, walls)
    dist.barrier()


def report(args: argparse.Namespace, seconds: list[float], walls: list[float]) -> None:
    for name, values in (("processor seconds of rank 0's thread", seconds), ("seconds until durable", walls)):
        first, later = values[0], statistics.median(values[1:])
        print(f"{name:40} first {first:6.2f}   later {later:6.2f}")
        line = {"ratio": f"{name}: a later save / the first", "value": round(later / first, 3)}
        print(json.dumps({**line, "tensors": args.tensors, "ranks": args.ranks, "repeats": len(values) - 1}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=76_800, help="shards of all ranks together")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="bench_save_plan_", dir=args.dir))
    try:
        mp.start_processes(be_a_rank, (args, root), nprocs=args.ranks, start_method="fork")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
