"""What frameworks are measured with: a model of a known time, its samples, their Trainers, and blocks of steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

WIDTH, BATCH = 256, 32
WARM_UP, BLOCK_STEPS = 100, 50

NAMES = {"lightning": "Lightning's Trainer", "huggingface": "Hugging Face's Trainer"}
PACKAGES = {"lightning": "lightning", "huggingface": "transformers"}

MATRIX, PRODUCT = torch.randn(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)


def work(products: int) -> None:
    """So many products of matrices: a known time in torch's own kernels, as training takes it."""
    for _ in range(products):
        torch.mm(MATRIX, MATRIX, out=PRODUCT)


def products_in(milliseconds: float) -> int:
    """How many take so long."""
    work(2000)  # a processor that has slept is slow at first
    started = time.thread_time()  # one thread computes them, and others may have its processor meanwhile
    work(500)
    return max(1, round(milliseconds / 1e3 / ((time.thread_time() - started) / 500)))


class Model(torch.nn.Module):
    """A layer, after the work."""

    def __init__(self, products: int) -> None:
        super().__init__()
        self.linear, self.products = torch.nn.Linear(WIDTH, WIDTH), products

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        work(self.products)
        return {"loss": (self.linear(x) - labels).square().mean()}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """More than the blocks of a run take by default: none has an epoch's end in it."""

    def __init__(self) -> None:
        self.x = torch.randn(1024, WIDTH)

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index % 1024], "labels": self.x[(index + 1) % 1024]}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Turns:
    """In a training: sees the steps, and where a block of them ends after the warm-up."""

    def __init__(self) -> None:
        self.steps = 0

    def step_begins(self) -> None:
        """Called before each step."""
        if self.steps >= WARM_UP and (self.steps - WARM_UP) % BLOCK_STEPS == 0:
            self.block_ended()
        self.steps += 1

    def block_ended(self) -> None:
        """Tell the time of the block, and wait for the next turn; the first time the warm-up has ended."""
        raise NotImplementedError


def huggingface_trainer(products: int, turns: Turns, **arguments: Any) -> Any:
    """Hugging Face's Trainer; `arguments` are further ones of TrainingArguments."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class InTurns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.step_begins()

    common = {"output_dir": "out", "per_device_train_batch_size": BATCH, "save_strategy": "no"}
    common |= {"disable_tqdm": True, "use_cpu": True}
    model = Model(products)
    # Its own optimizer would be the fused kernel, with two groups of parameters.
    given = {"train_dataset": Samples(), "optimizers": (adamw(model), None)}
    trainer = Trainer(model=model, args=TrainingArguments(**common, **arguments), **given)
    trainer.pop_callback(PrinterCallback)
    trainer.add_callback(InTurns())
    return trainer


def fit_by_lightning(
    products: int, turns: Turns, callbacks: Sequence[Any] = (), checkpoint: Any = None, **options: Any
) -> None:
    """Train by Lightning's Trainer; `options` are further ones of it."""
    from lightning.pytorch import Callback, LightningModule, Trainer

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
        accelerator="cpu",
        callbacks=[InTurns(), *callbacks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Samples(), BATCH, shuffle=True), ckpt_path=checkpoint)
