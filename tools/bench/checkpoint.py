"""Measure checkpoints against the plain operations that they are made of, in turns and in one process.

    .venv/bin/python tools/bench/checkpoint.py [--repeats 7] [--folder DIR] [--device cuda] [--quick]

stall     the copy that the loop waits for     / one copy of the same tensors into memory that is there
durable   from the begin of a save to its name / write and fsync of as many bytes
restore   read, checked, into live tensors     / one thread's read of the same bytes into the same tensors, one by one
dcp stall, dcp durable   the first two / torch's dcp.async_save of the same tensors, with a DefaultStager that is kept

On a GPU the copy is one into pinned memory, to its end, and the read is followed by a copy to the device.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from table import QUICK, options, show
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from jobkit.checkpoint.checkpointer import Checkpointer
from jobkit.checkpoint.leaves import Entry
from jobkit.checkpoint.staging import RankPosition
from jobkit.wire.group import RankGroup

STATES = {"512 MB": [(8 << 20,)] * 16, "10,000 small": [(1024,)] * 10_000}
if QUICK:
    STATES = {"4 MB": [(1 << 16,)] * 16, "100 small": [(1024,)] * 100}
BOUNDS = {"stall": (1.0, 1.1), "durable": (1.2, 1.2), "restore": (1.0, 1.2), "dcp stall": (1, 1), "dcp durable": (1, 1)}


class Many(nn.Module):
    """A module of many parameters."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.rand(shape)))


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(shapes: list[tuple[int, ...]], folder: Path, repeats: int, device: torch.device) -> dict[str, list[float]]:
    model = Many(shapes).to(device)
    entries = [Entry(name="model", live=model)]
    parameters = [parameter.detach() for parameter in model.parameters()]
    pin = device.type == "cuda"
    copies = [torch.zeros(parameter.shape, pin_memory=pin) for parameter in parameters]
    size = sum(parameter.numel() * 4 for parameter in parameters)
    block = memoryview(bytearray(size))
    shutil.rmtree(folder, ignore_errors=True)
    checkpointer = Checkpointer(folder, RankGroup.alone(), RankPosition(), attempt=1, keep=1)
    checkpointer.copy_to_host(0, entries, {})
    stager = DefaultStager(StagingOptions(pin, False, pin, pin))
    dcp_seconds(model, folder.with_name("dcp"), stager)  # its first save makes the memory
    ratios: dict[str, list[float]] = {row: [] for row in BOUNDS}
    for step in range(1, repeats + 1):
        plain = seconds(lambda: torch._foreach_copy_(copies, parameters, non_blocking=True))
        began = time.perf_counter()
        pending = checkpointer.copy_to_host(step, entries, {})
        stall = time.perf_counter() - began
        ratios["stall"].append(stall / plain)
        raw = seconds(lambda: write_raw(folder.with_name("raw"), block))
        began = time.perf_counter()
        checkpointer.write(pending, wait=True)
        durable = time.perf_counter() - began
        ratios["durable"].append(durable / raw)
        theirs = dcp_seconds(model, folder.with_name("dcp"), stager)
        ratios["dcp stall"].append(stall / theirs[0])
        ratios["dcp durable"].append((stall + durable) / theirs[1])
        for file in (folder / "latest").glob("*.safetensors"):  # written past the page cache; the raw file was not
            file.read_bytes()
        raw = seconds(lambda: read_raw(folder.with_name("raw"), copies if pin else parameters))
        if pin:
            raw += seconds(lambda: torch._foreach_copy_(parameters, copies, non_blocking=True))
        reader = Checkpointer(folder, RankGroup.alone(), RankPosition(), attempt=2, keep=1)
        ratios["restore"].append(seconds(lambda reader=reader: reader.restore(entries)) / raw)  # type: ignore[misc]
    return ratios


def dcp_seconds(model: nn.Module, folder: Path, stager: DefaultStager) -> tuple[float, float]:
    """Return how long torch's own save holds the loop up, and how long it takes in all."""
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    saved = dcp.async_save(model.state_dict(), checkpoint_id=folder, async_stager=stager, no_dist=True)
    if isinstance(saved, AsyncSaveResponse):  # on a GPU it copies in the background
        saved.staging_completion.result()
        saved = saved.upload_completion
    stall = time.perf_counter() - began
    saved.result()
    return stall, time.perf_counter() - began


def write_raw(file: Path, data: memoryview) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    position = 0
    while position < len(data):
        position += os.write(descriptor, data[position : position + (4 << 20)])
    os.fsync(descriptor)
    os.close(descriptor)


def read_raw(file: Path, tensors: list[torch.Tensor]) -> None:
    with file.open("rb", buffering=0) as source:
        for tensor in tensors:
            memory = tensor.view(torch.uint8).numpy().data
            while memory:
                memory = memory[source.readinto(memory) or len(memory) :]


def main() -> None:
    parser = options(__doc__, 7)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder or Path.cwd()))
    try:
        for column, (name, shapes) in enumerate(STATES.items()):
            measured = measure(shapes, folder / "checkpoints", arguments.repeats, arguments.device)
            for row, ratios in measured.items():
                show(f"{row}, {name}", ratios, BOUNDS[row][column], "times")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
