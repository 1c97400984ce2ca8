"""Hugging Face's Trainer and accelerate under jobkit: interrupted, they end with the bits of the uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import free_port, make_rank, run_ranks
from harness.runs import PATIENCE, Project
from harness.training import curve, points
from harness.training_task import digest
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from jobkit.config.schema import CheckpointConfig, Config
from jobkit.errors import Stopped, UsageError
from jobkit.huggingface import JobkitCallback
from jobkit.loop.context import Context
from jobkit.loop.join import Joined
from jobkit.run import records
from jobkit.run.records import Drill, Interruption
from jobkit.verify.compare import course_of, first_difference, read_trace, seen
from jobkit.verify.plan import interruptions
from jobkit.wire.group import RankGroup

NEVER = 1_000_000_000
BY_EPOCH: dict[str, Any] = {"eval_strategy": "epoch", "eval_steps": None}
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


def context(ranks: RankGroup, folder: Path, number: int) -> Context:
    """Return the context of an attempt."""
    # accelerate reads a launcher's variables, and makes a process group of a single rank, too.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), LOCAL_WORLD_SIZE=str(ranks.world_size))
    config = Config(name="test", task="module:function", seed=0, checkpoint=CheckpointConfig(every=NEVER, memory="off"))
    rank = make_rank(folder, config, ranks.rank, ranks.world_size)
    rank.attempt = number
    rank.check_lease = lambda: None  # type: ignore[method-assign]
    return Context(rank, Joined(torch.device("cpu"), ranks), {})


def attempt(ranks: RankGroup, folder: Path, number: int, options: dict[str, Any]) -> Any:
    """Train in one attempt of a run; returns its result, or None where it was stopped."""
    ctx = context(ranks, folder, number)
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
    records.write(run.drill_file, Drill(steps=steps, shorten=steps // 3, interruptions=stops))
    for number in range(1, len(stops) + 1):
        assert run_ranks(attempt, ranks, folder, number, options) == [None] * ranks
    return run_ranks(attempt, ranks, folder, len(stops) + 1, options), read_trace(run)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "steps": (1, {"max_steps": 40, "gradient_accumulation_steps": 2, "bf16": True, "logging_steps": 2}),
    "workers": (1, {"num_train_epochs": 2, "dataloader_num_workers": 1, "dataloader_persistent_workers": True}),
    "fractions": (1, {"max_steps": 40, "eval_steps": 0.1, "logging_steps": 0.05, "eval_on_start": True}),
    "epochs": (2, {"num_train_epochs": 3, "lr_scheduler_type": "cosine", **BY_EPOCH, **BEST}),
    "three ranks": (3, {"max_steps": 40, "gradient_accumulation_steps": 2, "ddp_find_unused_parameters": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_that_is_stopped_anywhere_ends_with_the_same_bits(tmp_path: Path, case: str) -> None:
    ranks, options = CASES[case]
    expected, straight = trained(tmp_path / "straight", ranks, 15, [], **options)
    items = [item for item in interruptions(course_of(straight)) if item.kind in ("stop", "evaluation", "epoch end")]
    stops = [replace(item, attempt=attempt) for attempt, item in enumerate(items, start=1)]
    assert len(stops) == 3
    results, trace = trained(tmp_path / "interrupted", ranks, 15, stops, **options)
    assert first_difference(straight, trace) is None
    assert results == expected
    assert set(seen(straight)) >= {"samples", "logged values"}


def trained_twice(ranks: RankGroup, folder: Path) -> str:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), LOCAL_WORLD_SIZE="1")
    with pytest.raises(UsageError, match=r"jobkit\.init"):
        JobkitCallback(make_trainer(folder))
    ctx = context(ranks, folder, 1)
    trainer = make_trainer(folder, max_steps=2, eval_strategy="no", report_to="tensorboard", save_strategy="steps")
    trainer.add_callback(JobkitCallback(trainer))
    trainer.train()
    with pytest.raises(UsageError) as second:
        trainer.train()
    ctx.finish()
    assert not list((folder / "output").iterdir())  # no checkpoints and no curves of its own
    return str(second.value)


def test_a_run_has_one_training(tmp_path: Path) -> None:
    assert "second" in run_ranks(trained_twice, 1, tmp_path)[0]


MARK = """\
def mark(ctx):
    import os
    (ctx.run_dir / "outputs" / "ranks").mkdir(parents=True, exist_ok=True)
    (ctx.run_dir / "outputs" / "ranks" / str(ctx.rank)).write_text(f"{ctx.attempt} {os.getpid()}")"""
PAUSE = """\
        import os, time
        time.sleep(float(os.environ.get("SAMPLE_SECONDS", 0)))"""
EXAMPLES = Path(__file__).parents[2] / "examples"


def example(folder: Path, name: str) -> Project:
    shutil.copytree(EXAMPLES / name, folder)
    made = Project(folder, {**os.environ, "OMP_NUM_THREADS": "1"}, plain=False)
    made.yaml = folder / "train.yaml"
    return made


@pytest.mark.parametrize("name", ["huggingface", "accelerate"])
def test_an_example_is_verified_on_two_ranks(tmp_path: Path, name: str) -> None:
    """Through stops, kills with a snapshot and kills with a checkpoint; accelerate's ends its process group, too."""
    made = example(tmp_path / name, name)
    done = made.jobkit(
        "verify", str(made.yaml), "resources.tasks_per_node=2", "--local", "--steps", "15", "--json", check=False
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["equal"]) == (0, True), report
    assert set(report["missing"]) == (set() if name == "huggingface" else {"evaluation", "epoch end"})


def test_a_script_under_torchrun_is_stopped_killed_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"]
    launches = []
    for name in ("straight", "interrupted"):
        made = example(tmp_path / name, "huggingface")
        script = (made.folder / "train.py").read_text().replace('"steps": 300', '"steps": 30')
        script = script.replace("logging_steps=5", "logging_steps=1").replace("    text =", "    mark(ctx)\n    text =")
        script = script.replace("        start = index", f"{PAUSE}\n        start = index")
        made.write("train.py", script.replace("LENGTH = 64", f"LENGTH = 64\n{MARK}"))
        # Slow enough to be stopped in the middle: a command takes seconds on a busy machine.
        slow = {**made.environment, "SAMPLE_SECONDS": "0.02" if name == "interrupted" else "0"}
        process = subprocess.Popen(words, cwd=made.folder, env=slow)
        launch = made.only_run()
        launches.append(launch)
        if name == "interrupted":
            launch.wait_for_step(5).project.jobkit("preempt", str(launch.run.path), "-y")
            process.wait(PATIENCE)
            process = subprocess.Popen(words, cwd=made.folder, env=slow)
            launch.wait_for_attempt(2).wait_for_step(launch.ends[0].last_step + 3)  # type: ignore[operator]
            launch.kill_rank(1)
            process.wait(PATIENCE)
            process = subprocess.Popen(words, cwd=made.folder, env=made.environment)
        assert process.wait(PATIENCE) == 0
    straight, interrupted = launches
    assert interrupted.causes[0] == "preempted" and interrupted.causes[-1] == "finished"
    assert len(interrupted.causes) == 3
    assert interrupted.status.result == straight.status.result
    assert curve(interrupted, "train/loss") == curve(straight, "train/loss")
    assert points(straight, "train/loss") == list(range(30))
