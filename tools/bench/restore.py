"""What a restore reads from the disk, and the host memory it takes: both as ratios, which a busy machine leaves alone.

A model and AdamW's state are saved, then restored by fresh processes:
    python tools/bench/restore.py --megabytes 192 --ranks 4 --dir DIRECTORY
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.group import RankGroup
from jobkit.run.config import CommConfig, ParallelConfig
from jobkit.run.layout import factor
from jobkit.train.parallel import Parallel
from jobkit.worker.tracked_state import TrackedState


class CountedFile(io.FileIO):
    """Counts the bytes that this process reads of the files of checkpoints."""

    nbytes = 0

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        CountedFile.nbytes += count
        return count


def count_reads() -> None:
    plain = Path.open

    def opened(path: Path, *args: Any, **options: Any) -> Any:
        return CountedFile(path) if path.suffix == ".bin" and args[:1] == ("rb",) else plain(path, *args, **options)

    Path.open = opened  # type: ignore[method-assign]


def memory(of: str) -> int:
    """Bytes of host memory of this process: VmRSS now, VmHWM the most so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(of))


def build(args: argparse.Namespace, rank: int) -> tuple[Parallel, nn.Module, torch.optim.Optimizer]:
    config = ParallelConfig(data=args.parallel)
    layout = factor(config, args.ranks, args.ranks)
    parallel = Parallel(layout, config, CommConfig(), torch.device("cpu"), rank)
    width = 1024
    layers = args.megabytes * (1 << 20) // (3 * 4 * width * width)  # with AdamW's two moments
    with torch.random.fork_rng():
        model = parallel.spread(nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]))
    return parallel, model, torch.optim.AdamW(model.parameters(), foreach=False)


def be_a_rank(rank: int, args: argparse.Namespace, root: Path, begin: bool) -> None:
    torch.set_num_threads(1)
    address = f"file://{root}/rendezvous_{begin}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=args.ranks)
    ranks = RankGroup.of_world()
    checkpointer = Checkpointer(Store(root / "checkpoints"), ranks)
    if begin:
        parallel, model, optimizer = build(args, rank)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        tracked = TrackedState(parallel, checkpointer, ranks, None)
        track(tracked, model, optimizer)
        shared, held_by, own = tracked.trees()
        checkpointer.save(1, shared, own, held_by=held_by).wait()
        return
    count_reads()
    started = time.perf_counter()
    loaded = checkpointer.load_newest(names=())
    assert loaded is not None
    verified = CountedFile.nbytes
    parallel, model, optimizer = build(args, rank)
    # The most so far is what it is now: without what building took.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    built = memory("VmRSS") - sum(local(one).nbytes for one in model.parameters())
    tracked = TrackedState(parallel, checkpointer, ranks, loaded)
    track(tracked, model, optimizer)
    seconds = time.perf_counter() - started
    own = sum(local(one).nbytes for one in [*model.parameters(), *moments(optimizer)])
    found = ranks.gather((verified, CountedFile.nbytes - verified, (memory("VmHWM") - built) / own, seconds))
    if rank == 0:
        report(args, found, sum(file.size for file in loaded.manifest.files.values()))
    dist.barrier()


def track(tracked: TrackedState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tracked.add_module(model)
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def report(args: argparse.Namespace, found: list[tuple[int, int, float, float]], size: int) -> None:
    for name, value in (
        ("read to verify / size of the checkpoint", sum(verified for verified, *_ in found) / size),
        ("read to restore / size of the checkpoint", sum(read for _, read, *_ in found) / size),
        ("read by the busiest rank / its share", max(read for _, read, *_ in found) * args.ranks / size),
        ("peak host memory / a rank's own state", max(peak for *_, peak, _ in found)),
        ("seconds", max(seconds for *_, seconds in found)),
    ):
        shape = {"ranks": args.ranks, "parallel": args.parallel, "megabytes": size >> 20}
        print(json.dumps({"ratio" if "/" in name else "measured": name, "value": round(value, 3), **shape}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=192, help="of the model and its optimizer's state")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parallel", choices=["ddp", "zero3"], default="ddp")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="bench_restore_", dir=args.dir))
    try:
        for begin in (True, False):
            mp.start_processes(be_a_rank, (args, root, begin), nprocs=args.ranks, start_method="fork")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
