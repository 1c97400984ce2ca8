"""A step that logs its loss each time: jobkit's loop beside Lightning's and Hugging Face's Trainer, and one by hand.

The same model, data in random order, optimizer and DDP over gloo in each, gradients not clipped; by hand nothing is
logged. Each kind trains in processes of its own, and they take turns, a block of steps each, so that a busy machine
slows all; not alike, for one that waits for its disk at each step gets a processor sooner than one that computes. So
two times of rank 0 are told beside, which other processes lengthen less: without what its training waited for a
processor, and its processor time:
    python tools/bench/frameworks.py --ranks 1 2 4 --milliseconds 10

What cannot be made the same: Hugging Face's Trainer logs the learning rate and the epoch too, averages the loss over
the ranks, steps a schedule, and flushes TensorBoard's file at each step; jobkit seeds the generators for each sample,
looks whether losses are numbers, and takes snapshots of the state.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import measured
import peers
import torch
from measured import Row, is_installed, missing, ratios, tell
from peers import (
    BATCH,
    BLOCK_STEPS,
    NAMES,
    PACKAGES,
    Model,
    Samples,
    Turns,
    adamw,
    fit_by_lightning,
    huggingface_trainer,
    products_in,
)

YAML = """\
name: frameworks
task: frameworks:train
params: {{products: {products}, turns: {turns}}}
resources: {{tasks_per_node: {ranks}}}
"""

STEPS = 10**7
"""More than any run takes: whoever gives the turns ends it."""


class Times(NamedTuple):
    """Seconds of a step: on the clock, without those in which the training's thread waited for a processor that others
    had, and those of a processor, of all threads."""

    wall: float
    unqueued: float
    cpu: float


def now() -> Times:
    """As far as this process is."""
    wall = time.perf_counter()
    try:
        _, queued, _ = Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()
    except OSError:  # not Linux
        queued = "0"
    return Times(wall, wall - int(queued) / 1e9, time.process_time())


class InPipes(Turns):
    """Times blocks of steps, each after a line from the process that gives the turns.

    Rank 0 alone waits for its turn; the others wait for rank 0, in the all-reduce.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.started = Times(0.0, 0.0, 0.0)
        self.is_main = os.environ.get("RANK", "0") == "0"
        if self.is_main:
            self.go, self.told = (folder / "go").open(encoding="utf-8"), (folder / "told").open("w", encoding="utf-8")

    def block_ended(self) -> None:
        if not self.is_main:
            return
        began = now()
        told = ((end - start) / BLOCK_STEPS for start, end in zip(self.started, began, strict=True))
        self.told.write(f"{' '.join(map(str, told))}\n")
        self.told.flush()
        if not self.go.readline():
            self.is_over()
        self.started = now()
        self.waited(self.started.wall - began.wall)

    def waited(self, seconds: float) -> None:
        """So long it was another's turn."""

    def is_over(self) -> None:
        """There are no more turns."""
        os._exit(0)


def train(ctx: Any) -> None:
    """The task, under jobkit."""
    from step import Clock

    from jobkit.worker import checkpoint_schedule, fingerprint, stragglers, timing

    os.environ["RANK"] = str(ctx.rank)
    clock = Clock()  # of its own turns alone: what falls due by time would else all fall into them

    class OwnTurns(InPipes):
        def waited(self, seconds: float) -> None:
            clock.by_hand += seconds

        def is_over(self) -> None:
            self.is_main = False  # it trains on until all ranks have agreed to stop

    for module in (checkpoint_schedule, fingerprint, stragglers, timing):
        module.time = clock  # type: ignore[attr-defined]
    turns = OwnTurns(Path(ctx.params.turns))
    model = ctx.parallelize(Model(ctx.params.products))
    optimizer = adamw(model)
    loader = ctx.loader(Samples(), global_batch_size=BATCH * ctx.world_size)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for _ in ctx.steps(STEPS):
        turns.step_begins()
        loss = model(**next(loader))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ctx.log({"train/loss": loss})


def by_hand(products: int, folder: Path) -> None:
    """The loop as one writes it, without a log."""
    from torch.utils.data import DataLoader, DistributedSampler

    world = int(os.environ["WORLD_SIZE"])
    model: torch.nn.Module = Model(products)
    if world > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer, turns = adamw(model), InPipes(folder)
    loader = DataLoader(Samples(), BATCH, sampler=DistributedSampler(Samples(), world, int(os.environ["RANK"])))
    for batch in chain.from_iterable(repeat(loader)):
        turns.step_begins()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def huggingface(products: int, folder: Path) -> None:
    """Trainer, which logs each step to TensorBoard."""
    trainer = huggingface_trainer(
        products,
        InPipes(folder),
        max_steps=STEPS,
        report_to="tensorboard",
        logging_steps=1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,  # for a model that is not its own it looks for them
    )
    trainer.train()


def lightning(products: int, folder: Path) -> None:
    """Lightning's Trainer, which logs each step to TensorBoard."""
    from lightning.pytorch.loggers import TensorBoardLogger

    world = int(os.environ["WORLD_SIZE"])
    fit_by_lightning(
        products,
        InPipes(folder),
        max_steps=STEPS,
        strategy="ddp" if world > 1 else "auto",
        devices=world,
        logger=TensorBoardLogger("logs"),
        log_every_n_steps=1,
    )


KINDS: Mapping[str, Callable[[int, Path], None]] = {"hand": by_hand, "lightning": lightning, "huggingface": huggingface}


class Training:
    """The processes of one kind, which train when they are told to."""

    def __init__(self, kind: str, ranks: int, products: int, folder: Path) -> None:
        self.kind = kind
        folder.mkdir()
        for pipe in ("go", "told"):
            os.mkfifo(folder / pipe)
        self.log = folder / "log"
        with self.log.open("w", encoding="utf-8") as log:
            commands = self._commands(ranks, products, folder)
            self.processes = [
                subprocess.Popen(command, cwd=folder, env={**os.environ, **own}, stdout=log, stderr=log)
                for command, own in commands
            ]
        self.go, self.told = self._opened(folder / "go", "w"), self._opened(folder / "told", "r")
        self.answer()

    def _commands(self, ranks: int, products: int, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if self.kind == "jobkit":
            here = Path(__file__).parent
            for file in (__file__, measured.__file__, peers.__file__, here / "step.py"):
                shutil.copy(file, folder)
            (folder / "frameworks.yaml").write_text(
                YAML.format(products=products, turns=folder, ranks=ranks), encoding="utf-8"
            )
            return [([sys.executable, "-m", "jobkit.submit", "frameworks.yaml", "--local"], threads)]
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = str(taken.getsockname()[1])
        command = [sys.executable, str(Path(__file__).resolve()), "--train", self.kind, "--products", str(products)]
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **threads}
        # As torchrun sets them, by which Lightning sees that its processes are there.
        world |= {"TORCHELASTIC_RUN_ID": "bench", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
        return [(command, world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]

    def _opened(self, pipe: Path, mode: str) -> Any:
        """The pipe, once the training has opened its end; SystemExit where it has ended."""
        flags = os.O_RDONLY | os.O_NONBLOCK if mode == "r" else os.O_WRONLY | os.O_NONBLOCK
        until = time.monotonic() + 300
        while time.monotonic() < until:
            try:
                descriptor = os.open(pipe, flags)
            except OSError:  # no reader yet
                self._refuse_ended()
                time.sleep(0.05)
                continue
            os.set_blocking(descriptor, True)
            return os.fdopen(descriptor, mode, buffering=1, encoding="utf-8")
        raise SystemExit(f"{self.kind}: does not train after 300 s: {self.log.read_text(encoding='utf-8')[-2000:]}")

    def _refuse_ended(self) -> None:
        if any(process.poll() is not None for process in self.processes):
            raise SystemExit(f"{self.kind}: ended: {self.log.read_text(encoding='utf-8')[-2000:]}")

    def answer(self) -> Times:
        """Of a step in its last block; the first answer says that it is ready for one."""
        while not (line := self.told.readline()):  # it has not opened its end yet, or is gone
            self._refuse_ended()
            time.sleep(0.05)
        return Times(*map(float, line.split()))

    def block(self) -> Times:
        """Train for a block."""
        self.go.write("\n")
        return self.answer()

    def end(self) -> None:
        if self.kind == "jobkit":
            self.processes[0].terminate()
        with suppress(BrokenPipeError):
            self.go.close()
        for process in self.processes:
            if self.kind != "jobkit":
                process.kill()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(ranks: int, products: int, blocks: int) -> dict[str, list[Times]]:
    """The times of a step of each kind, block by block."""
    kinds = ["jobkit", "hand", *(kind for kind, package in PACKAGES.items() if is_installed(package))]
    times: dict[str, list[Times]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as folder, ExitStack() as ends:
        trainings = []
        for kind in kinds:
            trainings.append(Training(kind, ranks, products, Path(folder) / kind))
            ends.callback(trainings[-1].end)
        for block in range(blocks):
            turn = block % len(kinds)
            for training in trainings[turn:] + trainings[:turn]:
                times[training.kind].append(training.block())
    return times


BOUNDS = {1: 1.02, 2: 1.03, 4: 1.03}
"""By ranks, over the loop by hand."""


def report(ranks: int, found: Mapping[str, Sequence[Times]]) -> None:
    what = f"step, {ranks} rank{'s' * (ranks > 1)}, logging every step"

    def over(kind: str, other: str, field: str = "wall") -> list[float]:
        return ratios([getattr(one, field) for one in found[kind]], [getattr(one, field) for one in found[other]])

    def median(kind: str, other: str, field: str = "wall") -> float:
        return statistics.median(over(kind, other, field))

    def busy(other: str) -> str:
        own, waiting = median("jobkit", other, "cpu"), median("jobkit", other, "unqueued")
        return f"in processor time {own:.3f}, without rank 0's waiting for a processor {waiting:.3f}"

    length = f"a step of {1e3 * statistics.median(one.wall for one in found['hand']):.1f} ms by hand"
    note = f"{length}, with a DataLoader in each, no workers; {busy('hand')}"
    bound = BOUNDS.get(ranks)
    tell(
        Row(
            f"{what}, its data loaded", "the loop by hand, which logs nothing", over("jobkit", "hand"), bound, note=note
        )
    )
    for kind, name in NAMES.items():
        if kind not in found:
            tell(missing(what, name, f"{PACKAGES[kind]} is not installed", 1.0))
            continue
        hand = f"over it: jobkit {median('jobkit', 'hand'):.3f}, {name} {median(kind, 'hand'):.3f}"
        tell(Row(what, name, over("jobkit", kind), 1.0, below=True, note=f"{length}; {hand}; {busy(kind)}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--milliseconds", type=float, default=10.0)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--train", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--products", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.train:
        KINDS[arguments.train](arguments.products, Path.cwd())
        return
    products = products_in(arguments.milliseconds)
    for ranks in arguments.ranks:
        report(ranks, measure(ranks, products, arguments.blocks))


if __name__ == "__main__":
    main()
