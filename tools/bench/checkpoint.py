"""What a checkpoint costs, and a snapshot in memory: how long the loop stands still, until it is durable, its restore.

Of a few large tensors, and of many small ones. Everything is measured in one process, the candidates in turn, so that a
busy machine slows all of them; what is read is dropped from the page cache before:
    python tools/bench/checkpoint.py --megabytes 512 --small-tensors 10000 --repeats 7 --dir DIRECTORY
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measured import Row, absolute, ratios, tell

from jobkit.checkpoint.memory import SnapshotMemory
from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.group import RankGroup
from jobkit.run.files import fsync_dir
from jobkit.run.slots import environment_of, make_slots

Times = dict[str, list[float]]


def make_state(megabytes: int) -> dict[str, torch.Tensor]:
    """Tensors of 1/4, 1/8 ... of the size, and the rest in a hundred small ones."""
    numbers = megabytes * (1 << 20) // 4
    sizes = [numbers // 4, numbers // 4, numbers // 8, numbers // 8, numbers // 8]
    sizes += [(numbers - sum(sizes)) // 100] * 100
    return {f"tensor_{index}": torch.randn(size) for index, size in enumerate(sizes)}


SMALL = 1024
"""Numbers of a small tensor, as a bias has."""


def make_small(count: int) -> dict[str, torch.Tensor]:
    """So many small tensors."""
    return {f"layer_{index}.bias": torch.randn(SMALL) for index in range(count)}


def timed(times: Times, name: str, action: Callable[[], object]) -> None:
    """Run and note the seconds it took."""
    started = time.perf_counter()
    action()
    times.setdefault(name, []).append(time.perf_counter() - started)


class Plain:
    """What cannot be beaten: a copy into memory that is there, a write and an fsync of the same bytes."""

    def __init__(self, state: dict[str, torch.Tensor], root: Path) -> None:
        self.state = state
        self.path = root / "plain.bin"
        self.copies = {key: tensor.clone() for key, tensor in state.items()}

    def copy(self) -> None:
        for key, tensor in self.state.items():
            self.copies[key].copy_(tensor)

    def write(self) -> None:
        with self.path.open("wb", buffering=0) as file:
            for tensor in self.copies.values():
                rest = tensor.view(torch.uint8).numpy().data
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def read(self) -> None:
        """The same bytes into new memory, as a process has none that begins."""
        with self.path.open("rb", buffering=0) as file:
            for tensor in self.copies.values():
                rest = torch.empty(tensor.nbytes, dtype=torch.uint8).numpy().data
                while rest:
                    rest = rest[file.readinto(rest) :]


def drop_from_cache(path: Path) -> None:
    """So that the next reader has to ask the disk."""
    for file in (path, *path.rglob("*")):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def with_memory(root: Path) -> Checkpointer:
    """A checkpointer whose host copies lie where they outlive the process."""
    slots = make_slots()
    assert slots is not None, "memory that outlives a process needs Linux"
    memory = SnapshotMemory.find(environment_of(slots), RankGroup.alone(), 1)
    return Checkpointer(Store(root / "kept"), memory=memory)


def one_round(times: Times, round_: int, plain: Plain, ours: Checkpointer, kept: Checkpointer, root: Path) -> None:
    """Every candidate once; what one wrote is removed before the next is timed."""
    state = plain.state
    timed(times, "copy", plain.copy)
    timed(times, "write+fsync", plain.write)
    drop_from_cache(plain.path)
    timed(times, "read", plain.read)
    plain.path.unlink()
    fsync_dir(root)  # what a removal leaves to do is not the next one's to pay

    saved = ours.save(round_, {"state": state}).wait()
    times.setdefault("save: stall", []).append(saved.stall)
    times.setdefault("save: durable", []).append(saved.seconds)
    ours.wait()
    drop_from_cache(ours.store.path(round_))
    timed(times, "restored", Checkpointer(ours.store).load_newest)
    shutil.rmtree(ours.store.path(round_))
    fsync_dir(root)

    snapshot = kept.save(round_, {"state": state}, to_disk=False).wait()
    times.setdefault("snapshot: stall", []).append(snapshot.stall)
    times.setdefault("snapshot: complete", []).append(snapshot.seconds)
    kept.wait()

    target = root / "async"
    futures: list[Any] = []
    timed(times, "async_save: stall", lambda: futures.append(dcp.async_save({"state": state}, checkpoint_id=target)))
    futures[0].result()
    shutil.rmtree(target)
    fsync_dir(root)


def report(times: Times, of: str) -> None:
    """Medians with their spread, then a row a ratio."""
    for name, seconds in times.items():
        low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
        print(f"{name:34} {middle * 1e3:8.1f} ms   ({low * 1e3:.1f} .. {high * 1e3:.1f})")
    for what, against, ours, base, bound in (
        ("the loop stands still for a checkpoint", "a copy of the tensors", "save: stall", "copy", 1.1),
        ("the loop stands still for a checkpoint", "dcp.async_save", "save: stall", "async_save: stall", 1.0),
        ("the loop stands still for a snapshot in memory", "a copy of the tensors", "snapshot: stall", "copy", None),
        ("a checkpoint is durable", "a raw write and fsync", "save: durable", "write+fsync", 1.2),
        ("a checkpoint is verified and restored", "a raw read", "restored", "read", 1.5),
    ):
        values, note = ratios(times[ours], times[base]), absolute(times[ours], times[base], "ms", 1e3)
        tell(Row(f"{what}, {of}", against, values, bound, below="dcp" in against, note=note))


def measure(state: dict[str, torch.Tensor], of: str, repeats: int, directory: Path) -> None:
    root = Path(tempfile.mkdtemp(prefix="bench_checkpoint_", dir=directory))
    try:
        plain = Plain(state, root)
        ours = Checkpointer(Store(root / "checkpoints"))
        kept = with_memory(root)
        for first in (0, 0):  # they allocate, a slot each
            one_round({}, first, plain, ours, kept, root)
        times: Times = {}
        for round_ in range(1, repeats + 1):
            one_round(times, round_, plain, ours, kept, root)
        report(times, of)
    finally:
        shutil.rmtree(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="of a few large tensors; 0: without them")
    parser.add_argument("--small-tensors", type=int, default=10_000, help="how many; 0: without them")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if args.megabytes:
        measure(make_state(args.megabytes), f"{args.megabytes} MB", args.repeats, args.dir)
    if args.small_tensors:
        measure(make_small(args.small_tensors), f"{args.small_tensors:,} small tensors", args.repeats, args.dir)


if __name__ == "__main__":
    main()
