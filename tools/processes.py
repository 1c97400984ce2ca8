"""Processes that run a model each, one for each GPU, or several on the cores of a CPU: their options and devices."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import TypeVar

import preparing
import torch
from preparing import Done, Failure
from rich.console import Console

from jobkit import JobkitError
from jobkit.run.command_line import to_install

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CORES = 4
"""Of a CPU, for one process: as many as a convolution divides well over."""

Item = TypeVar("Item")

device = torch.device("cpu")
"""Of this process."""


def spread(
    function: Callable[[Item], Done],
    items: Sequence[Item],
    what: str,
    workers: int,
    devices: Sequence[str],
    console: Console,
) -> Done:
    """function(item) of all items, in processes that take the devices in turn, under a progress bar."""
    if not items:
        return Done()
    workers = min(workers, len(items))
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    for number in range(workers):
        queue.put(devices[number % len(devices)])
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    try:
        results = preparing.in_processes(function, items, workers, _begin, queue, threads)
        return preparing.progress(results, what, len(items), console)
    except JobkitError as error:
        raise Failure(str(error), 1) from None
    except RuntimeError as error:
        if not is_of_device(error):
            raise
        hint = "the same command continues" if _is_broken(error) else "--tiling or fewer --workers take less"
        raise Failure(f"{preparing.reason(error)[:200]}; {hint}", 1) from None


def is_of_device(error: BaseException) -> bool:
    """Whether what went wrong is the device's, or its memory's, and says nothing of the file that was worked on."""
    return isinstance(error, torch.OutOfMemoryError) or _is_broken(error) or "DefaultCPUAllocator" in str(error)


def _is_broken(error: BaseException) -> bool:
    return isinstance(error, torch.AcceleratorError)


def _begin(devices: SimpleQueue[str], threads: int) -> None:
    global device
    device = torch.device(devices.get())
    torch.set_num_threads(threads)


def check_packages(*names: str) -> None:
    """Failure where a package of the extras is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        names = ("pillow" if name == "PIL" else name for name in missing)
        raise Failure(f"not installed: {', '.join(missing)}; type: {to_install(*names)}")


def check_folder(weights: Path, *parts: str) -> None:
    """Failure where a folder of weights is not there, or lacks a file."""
    if not weights.is_dir():
        raise Failure(
            f"{weights}: no such folder; --weights is a folder of CogVideoX as diffusers keeps it, such as a copy of "
            "huggingface.co/THUDM/CogVideoX-2b"
        )
    for part in parts:
        if not (weights / part).is_file():
            raise Failure(f"{weights}: no {part} in it; --weights is a folder of CogVideoX as diffusers keeps it")


def add_options(parser: argparse.ArgumentParser, parts: str) -> None:
    """--weights, of which `parts` are needed, --device, --workers, --precision and --tiling."""
    parser.add_argument(
        "--weights", type=Path, required=True, metavar="DIR", help=f"CogVideoX-2b as diffusers keeps it: {parts}"
    )
    parser.add_argument("--device", help="one of torch's, as cpu, cuda or cuda:1 (default: all GPUs, else cpu)")
    parser.add_argument(
        "--workers", type=int, help=f"processes (default: one for each GPU; on a CPU one for {CORES} cores)"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="of the models and of what they make (default: fp32 on a CPU, else bf16)",
    )
    parser.add_argument("--tiling", action="store_true", help="work in overlapping tiles, for little memory")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with `devices` and every default filled in."""
    arguments = parser.parse_args()
    found = torch.cuda.device_count()
    wanted = arguments.device or ("cuda" if found else "cpu")
    try:
        named = torch.device(wanted)
    except RuntimeError:
        parser.error(f"--device: found {wanted}, expected one of torch's, as cpu, cuda or cuda:1")
    if named.type == "cuda" and (named.index or 0) >= found:
        parser.error(f"--device: found {wanted}, and torch sees {found} such devices")
    each = named.type == "cuda" and named.index is None
    arguments.devices = [f"cuda:{index}" for index in range(found)] if each else [wanted]
    if arguments.workers is None:
        cores = len(os.sched_getaffinity(0))
        arguments.workers = max(1, cores // CORES) if wanted == "cpu" else len(arguments.devices)
    if arguments.workers < 1:
        parser.error(f"--workers: found {arguments.workers}, expected 1 or more")
    arguments.precision = arguments.precision or ("fp32" if wanted == "cpu" else "bf16")
    return arguments
