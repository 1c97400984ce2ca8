"""A script with Hugging Face's Trainer, brought under jobkit by three lines; the tests run it as train.py."""

import copy
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from jobkit.huggingface import JobkitCallback

DATA, WORKERS = os.environ.get("DATA", "map"), int(os.environ.get("WORKERS", "0"))
EXTRA: dict[str, Any] = eval(os.environ.get("EXTRA", "{}"))
SAMPLES = 52


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layers(x)
        return {"loss": (output - labels).square().mean(), "logits": output}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, number: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(number, 8, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.03 if Path("slow").exists() else 0)
        x = self.x[index]
        label = x.sum(-1, keepdim=True).sin()
        if self.noise:
            x = x + self.noise * (torch.randn(8) + random.random() + float(np.random.randn()))
        return {"x": x, "labels": label}


class Weighted(Trainer):
    """Weights the loss by what it has been."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._running = 1.0

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        found = super().compute_loss(model, inputs, *arguments, **options)
        if not model.training:
            return found
        self._running = 0.9 * self._running + 0.1 * found.item()
        return found / (1 + self._running)


class Own(TrainerCallback):
    """Keeps an average of the weights and a count, and lets the dropout fall."""

    def __init__(self) -> None:
        self.epochs, self.seen = 0, []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.average = copy.deepcopy(model)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.epochs += 1
        model.layers[3].p *= 0.8

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for average, now in zip(self.average.parameters(), model.parameters(), strict=True):
            average.data.lerp_(now.data, 0.1)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.seen.append((state.global_step, self.epochs, metrics["eval_loss"]))


def stream() -> Any:
    import datasets

    def rows() -> Any:
        samples = Samples(SAMPLES, 0.0)
        for index in range(SAMPLES):
            yield {name: value.tolist() for name, value in samples[index].items()}

    def augmented(row: dict[str, Any]) -> dict[str, Any]:
        noise = 0.1 * random.random() + 0.1 * float(torch.randn(()))
        return {"x": [value + noise for value in row["x"]], "labels": row["labels"]}

    return datasets.IterableDataset.from_generator(rows).shuffle(seed=3, buffer_size=16).map(augmented)


random.seed(1)
np.random.seed(2)
torch.manual_seed(3)
own = Own()
trainer = Weighted(
    model=Net(),
    args=TrainingArguments(
        **{
            **{"output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            **({"max_steps": 30} if DATA == "stream" else {"num_train_epochs": 3}),
            **{"learning_rate": 1e-2, "lr_scheduler_type": "reduce_lr_on_plateau"},
            **{"lr_scheduler_kwargs": {"patience": 1, "factor": 0.5}, "logging_steps": 2},
            **{"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4},
            **{"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False},
            **{"dataloader_num_workers": WORKERS, "report_to": "tensorboard", "disable_tqdm": True, "use_cpu": True},
            **{"seed": 7, "remove_unused_columns": False},
            **EXTRA,
        }
    ),
    train_dataset=stream() if DATA == "stream" else Samples(SAMPLES, 0.1),
    eval_dataset=Samples(20, 0.1 if WORKERS else 0.0),
    callbacks=[own, *([EarlyStoppingCallback(6)] if os.environ.get("EARLY") else [])],
)
trainer.add_callback(job := JobkitCallback(trainer))
trainer.train(resume_from_checkpoint=job.checkpoint)
print("evaluated:", trainer.evaluate()["eval_loss"])
trainer.save_model()
if trainer.is_world_process_zero():
    torch.save([*own.average.parameters(), torch.tensor(own.seen)], "weights_own.pt")
