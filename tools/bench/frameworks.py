"""A step that logs its loss each time: jobkit's loop beside Lightning's and Hugging Face's Trainer, and one by hand.

The same model, data, optimizer and DDP over gloo in each; by hand nothing is logged. Each kind trains in processes of
its own, and they take turns, a block of steps each, so that a busy machine slows all:
    python tools/bench/frameworks.py --ranks 1 2 4 --milliseconds 10
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
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import measured
import torch
from measured import Row, is_installed, missing, ratios, tell

YAML = """\
name: frameworks
task: frameworks:train
params: {{products: {products}, turns: {turns}}}
resources: {{tasks_per_node: {ranks}}}
"""

WIDTH, BATCH = 256, 32
WARM_UP, BLOCK_STEPS = 100, 50
STEPS = 10**7
"""More than any run takes: whoever gives the turns ends it."""


def work(products: int, matrix: torch.Tensor, product: torch.Tensor) -> None:
    """So many products of matrices: a known time in torch's own kernels, as training takes it."""
    for _ in range(products):
        torch.mm(matrix, matrix, out=product)


def products_in(milliseconds: float) -> int:
    """How many take so long."""
    matrix, product = torch.randn(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)
    work(2000, matrix, product)  # a processor that has slept is slow at first
    started = time.perf_counter()
    work(500, matrix, product)
    return max(1, round(milliseconds / 1e3 / ((time.perf_counter() - started) / 500)))


class Model(torch.nn.Module):
    """A layer, after the work."""

    def __init__(self, products: int) -> None:
        super().__init__()
        self.linear, self.products = torch.nn.Linear(WIDTH, WIDTH), products
        self.matrix, self.product = torch.randn(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        work(self.products, self.matrix, self.product)
        return {"loss": (self.linear(x) - labels).square().mean()}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Enough for each step of a run."""

    def __init__(self) -> None:
        self.x = torch.randn(1024, WIDTH)

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index % 1024], "labels": self.x[(index + 1) % 1024]}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Turns:
    """In a training: times blocks of steps, each after a line from the process that gives the turns.

    Rank 0 alone waits for its turn; the others wait for rank 0, in the all-reduce.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.steps, self.started = 0, 0.0
        self.is_main = os.environ.get("RANK", "0") == "0"
        if self.is_main:
            self.go, self.told = (folder / "go").open(encoding="utf-8"), (folder / "told").open("w", encoding="utf-8")

    def step_begins(self) -> None:
        """Called before each step."""
        if self.is_main and self.steps >= WARM_UP and (self.steps - WARM_UP) % BLOCK_STEPS == 0:
            began = time.perf_counter()
            self.told.write(f"{(began - self.started) / BLOCK_STEPS}\n")
            self.told.flush()
            if not self.go.readline():
                self.is_over()
            self.started = time.perf_counter()
            self.waited(self.started - began)
        self.steps += 1

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

    class OwnTurns(Turns):
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
    optimizer, turns = adamw(model), Turns(folder)
    sampler = DistributedSampler(Samples(), world, int(os.environ["RANK"]), shuffle=False)
    for batch in DataLoader(Samples(), BATCH, sampler=sampler):
        turns.step_begins()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def huggingface(products: int, folder: Path) -> None:
    """Trainer, which logs each step to TensorBoard."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    turns = Turns(folder)

    class InTurns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.step_begins()

    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=BATCH,
        max_steps=STEPS // int(os.environ["WORLD_SIZE"]) // BATCH,
        report_to="tensorboard",
        logging_steps=1,
        save_strategy="no",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    trainer = Trainer(model=Model(products), args=arguments, train_dataset=Samples())
    trainer.pop_callback(PrinterCallback)
    trainer.add_callback(InTurns())
    trainer.train()


def lightning(products: int, folder: Path) -> None:
    """Lightning's Trainer, which logs each step to TensorBoard."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    turns, world = Turns(folder), int(os.environ["WORLD_SIZE"])

    class InTurns(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *_: Any) -> None:
            turns.step_begins()

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(products)

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            loss = self.model(**batch)["loss"]
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        strategy="ddp" if world > 1 else "auto",
        devices=world,
        callbacks=[InTurns()],
        logger=TensorBoardLogger("logs"),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Samples(), BATCH, shuffle=False))


KINDS: Mapping[str, Callable[[int, Path], None]] = {"hand": by_hand, "lightning": lightning, "huggingface": huggingface}
PEERS = {"lightning": ("Lightning's Trainer", "lightning"), "huggingface": ("Hugging Face's Trainer", "transformers")}
"""What a peer is called, and its package."""


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
            for file in (__file__, measured.__file__, here / "step.py"):
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

    def answer(self) -> float:
        """Seconds of a step in its last block; the first answer says that it is ready for one."""
        while not (line := self.told.readline()):  # it has not opened its end yet, or is gone
            self._refuse_ended()
            time.sleep(0.05)
        return float(line)

    def block(self) -> float:
        """Train for a block; seconds of a step."""
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


def measure(ranks: int, products: int, blocks: int) -> dict[str, list[float]]:
    """Seconds of a step of each kind, block by block."""
    kinds = ["jobkit", "hand", *(kind for kind, (_, package) in PEERS.items() if is_installed(package))]
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
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


def report(ranks: int, times: Mapping[str, list[float]]) -> None:
    what = f"step, {ranks} rank{'s' * (ranks > 1)}, logging every step"
    hand = times["hand"]
    over = {kind: statistics.median(ratios(seconds, hand)) for kind, seconds in times.items()}
    length = f"a step of {1e3 * statistics.median(hand):.1f} ms by hand"
    note = f"{length}, with a DataLoader in each"
    tell(
        Row(
            f"{what}, its data loaded", "the loop by hand, which logs nothing", ratios(times["jobkit"], hand), note=note
        )
    )
    for kind, (name, package) in PEERS.items():
        if kind not in times:
            tell(missing(what, name, f"{package} is not installed", 1.0))
            continue
        note = f"{length}; over it: jobkit {over['jobkit']:.3f}, {name} {over[kind]:.3f}"
        tell(Row(what, name, ratios(times["jobkit"], times[kind]), 1.0, below=True, note=note))


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
