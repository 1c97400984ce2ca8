"""The overhead of jobkit's callbacks: a framework's step of some milliseconds with the callback, over that without it.

Each trains in a process of its own; they take turns, a block of steps each, so that a busy machine slows both:
    python tools/bench/callbacks.py huggingface --milliseconds 10
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measured import Row, is_installed, missing, tell
from peers import (
    BLOCK_STEPS,
    NAMES,
    PACKAGES,
    WARM_UP,
    Turns,
    fit_by_lightning,
    huggingface_trainer,
    products_in,
)

TARGET = 1.02
TOLD = "turn: "
"""What a line begins with that tells the time of a block; the framework prints, too."""
BLOCKS = 24


class InLines(Turns):
    """In a framework's process: times blocks of steps, each after a line from the process that gives the turns."""

    started = cpu_started = 0.0

    def block_ended(self) -> None:
        if self.steps > WARM_UP:
            wall, cpu = time.perf_counter() - self.started, time.process_time() - self.cpu_started
            print(f"{TOLD}{wall / BLOCK_STEPS} {cpu / BLOCK_STEPS}", flush=True)
        else:
            print(f"{TOLD}0 0", flush=True)
        sys.stdin.readline()
        self.started, self.cpu_started = time.perf_counter(), time.process_time()


STEPS = WARM_UP + BLOCKS * BLOCK_STEPS + 1


def huggingface(products: int, with_jobkit: bool) -> None:
    """Trainer's steps."""
    logs = "none" if with_jobkit else "tensorboard"
    trainer = huggingface_trainer(products, InLines(), max_steps=STEPS, report_to=logs, logging_steps=10)
    checkpoint = None
    if with_jobkit:
        from jobkit.huggingface import JobkitCallback

        trainer.add_callback(job := JobkitCallback(trainer))
        checkpoint = job.checkpoint
    trainer.train(resume_from_checkpoint=checkpoint)


def lightning(products: int, with_jobkit: bool) -> None:
    """Lightning's steps."""
    callbacks: list[Any] = []
    checkpoint = None
    if with_jobkit:
        from jobkit.lightning import JobkitCallback

        callbacks.append(job := JobkitCallback())
        checkpoint = job.checkpoint
    fit_by_lightning(products, InLines(), callbacks, checkpoint, max_steps=STEPS, log_every_n_steps=10)


FRAMEWORKS = {"huggingface": huggingface, "lightning": lightning}


def start(framework: str, kind: str, products: int, folder: Path) -> subprocess.Popen[str]:
    """A process that trains with the callback, or without it."""
    (folder / kind).mkdir()
    command = [sys.executable, str(Path(__file__).resolve()), framework, "--train", kind, "--products", str(products)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder / kind, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, encoding="utf-8"
    )


def answer(process: subprocess.Popen[str]) -> list[float]:
    """The time of its block, and that of the processor, or 0 when it is ready for the first."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(TOLD):
            return [float(word) for word in line.removeprefix(TOLD).split()]
    raise SystemExit("a training ended early")


def measure(framework: str, milliseconds: float) -> Row:
    """The ratios of the blocks with the callback to those without."""
    products = products_in(milliseconds)
    times: dict[str, list[list[float]]] = {"alone": [], "jobkit": []}
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as folder:
        processes = {kind: start(framework, kind, products, Path(folder)) for kind in times}
        for process in processes.values():
            answer(process)
        for block in range(BLOCKS):
            for kind in list(times)[:: 1 if block % 2 else -1]:
                process = processes[kind]
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                times[kind].append(answer(process))
        for process in processes.values():
            process.kill()
            process.wait()
    pairs = list(zip(times["jobkit"], times["alone"], strict=True))
    alone, of_processor = (
        statistics.median(one) for one in ([wall for wall, _ in times["alone"]], [a[1] / b[1] for a, b in pairs])
    )
    note = f"a step of {1e3 * alone:.1f} ms; of the processor's time {of_processor:.3f}"
    what, against = f"step of {NAMES[framework]} with jobkit's callback", f"{NAMES[framework]} alone"
    return Row(what, against, [ours[0] / other[0] for ours, other in pairs], TARGET, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", default=list(FRAMEWORKS))
    parser.add_argument("--milliseconds", type=float, default=10.0)
    parser.add_argument("--train", choices=["alone", "jobkit"], help=argparse.SUPPRESS)
    parser.add_argument("--products", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for framework in arguments.frameworks:
        if arguments.train:
            FRAMEWORKS[framework](arguments.products, arguments.train == "jobkit")
        else:
            there = is_installed(PACKAGES[framework])
            row = f"step of {NAMES[framework]} with jobkit's callback"
            tell(
                measure(framework, arguments.milliseconds)
                if there
                else missing(row, f"{NAMES[framework]} alone", f"{PACKAGES[framework]} is not installed")
            )


if __name__ == "__main__":
    main()
