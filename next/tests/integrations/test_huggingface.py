"""Hugging Face's Trainer and accelerate under jobkit: interrupted, they end with the bits of the uninterrupted run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import free_port, make_rank, run_ranks
from harness.training_task import digest
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from jobkit.errors import Stopped
from jobkit.group import RankGroup
from jobkit.huggingface import JobkitCallback
from jobkit.run import records
from jobkit.run.records import Drill, Interruption
from jobkit.run.schema import CheckpointConfig, Config
from jobkit.verify.compare import course_of, first_difference, read_trace, seen
from jobkit.verify.plan import interruptions
from jobkit.worker.context import Context
from jobkit.worker.join import Joined

NEVER = 1_000_000_000
BEST = {"load_best_model_at_end": True, "save_strategy": "epoch", "save_total_limit": 1, "learning_rate": 0.3}
"""With a learning rate at which the best model is not the last."""


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Counting texts, with a mask that is drawn when a sample is loaded."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) * (index % 7 + 1) + index) % 30
        masked = torch.where(torch.rand(12) < 0.2, 31, ids)
        return {"input_ids": masked, "labels": ids}


def make_trainer(folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, bos_token_id=0, eos_token_id=0, n_positions=12, n_embd=16, n_layer=1, n_head=2)
    given = {"per_device_train_batch_size": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, **options}
    callbacks = given.pop("callbacks", [])
    args = TrainingArguments(output_dir=str(folder / "output"), use_cpu=True, disable_tqdm=True, **given)
    return Trainer(GPT2LMHeadModel(config), args, train_dataset=Texts(50), eval_dataset=Texts(10), callbacks=callbacks)


def attempt(ranks: RankGroup, folder: Path, number: int, options: dict[str, Any]) -> Any:
    """Train in one attempt of a run; returns its result, or None where it was stopped."""
    # accelerate reads a launcher's variables, and makes a process group of a single rank, too.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), LOCAL_WORLD_SIZE=str(ranks.world_size))
    config = Config(name="test", task="module:function", seed=0, checkpoint=CheckpointConfig(every=NEVER, memory="off"))
    rank = make_rank(folder, config, ranks.rank, ranks.world_size)
    rank.attempt = number
    rank.check_lease = lambda: None  # type: ignore[method-assign]
    ctx = Context(rank, Joined(torch.device("cpu"), ranks), {})
    trainer = make_trainer(folder, **options)
    trainer.add_callback(JobkitCallback(trainer))
    try:
        output = trainer.train()
    except Stopped:
        ctx.close()
        return None
    result = {
        "loss": output.training_loss,
        "digest": digest(trainer.model.state_dict(), trainer.optimizer.state_dict()),
    }
    ctx.finish(result)
    return {**result, "step": ctx.step, "best": trainer.state.best_global_step}


def trained(
    folder: Path, ranks: int, steps: int, stops: Sequence[Interruption], **options: Any
) -> tuple[list[Any], Any]:
    """Train in as many attempts as it takes; returns the results of the ranks, and the trace."""
    run = make_rank(folder).run
    records.write(run.drill_file, Drill(steps=steps, shorten=steps // 3, interruptions=stops, locals=False))
    for number in range(1, len(stops) + 1):
        assert run_ranks(attempt, ranks, folder, number, options) == [None] * ranks
    return run_ranks(attempt, ranks, folder, len(stops) + 1, options), read_trace(run)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "steps": (1, {"max_steps": 40, "gradient_accumulation_steps": 2, "bf16": True, "logging_steps": 2}),
    "workers": (1, {"num_train_epochs": 2, "dataloader_num_workers": 1, "dataloader_persistent_workers": True}),
    "epochs": (2, {"num_train_epochs": 3, "eval_strategy": "epoch", "lr_scheduler_type": "cosine", **BEST}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_that_is_stopped_anywhere_ends_with_the_same_bits(tmp_path: Path, case: str) -> None:
    ranks, options = CASES[case]
    expected, straight = trained(tmp_path / "straight", ranks, 15, [], **options)
    stops = interruptions(course_of(straight), ["stop", "evaluation", "epoch end"])
    assert len(stops) == 3
    results, trace = trained(tmp_path / "interrupted", ranks, 15, stops, **options)
    assert first_difference(straight, trace) is None
    assert results == expected
    assert set(seen(straight)) >= {"samples", "logged values"}
