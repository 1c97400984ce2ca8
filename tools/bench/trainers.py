"""Measure a step under jobkit against Hugging Face's Trainer and Lightning's, and what jobkit's callbacks cost them.

    .venv/bin/python tools/bench/trainers.py [trainer lightning trainer-callback lightning-callback]
                                             [--repeats 12] [--quick]

trainer             a step of jobkit's loop               / the same step under Hugging Face's Trainer
lightning           the same                              / under Lightning's Trainer
trainer-callback    a step of a Trainer with the callback / without it
lightning-callback  the same of Lightning's Trainer

The two of a ratio take turns in one process, with the same model, data and batch; processor seconds are counted, which
other programs disturb least. Lightning's rows are left out where a package is missing.
"""

from __future__ import annotations

import importlib.util

from table import QUICK, options, show
from training import project, result

TASK = """\
import gc, logging, time, warnings
import torch
from torch import nn

WARM = 5  # steps of each turn that are not measured
BATCH = 64

class Net(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 256)
        )

    def forward(self, x, labels):
        output = self.layers(x)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}

class Points(torch.utils.data.Dataset):
    x = torch.rand(4096, 256)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index]}

class Turns:  # Trainer's AdamW is fused by default, so that all are
    '''Measures blocks of steps; after each one the other has its turn.'''

    def __init__(self, other, block):
        self.other, self.block, self.steps, self.ratios = other, block, 0, []

    def step(self):
        self.steps += 1
        if self.steps % self.block == WARM:
            self.began = time.process_time()
        elif self.steps % self.block == 0:
            self.seconds = time.process_time() - self.began
            if self.other is not None:
                self.ratios.append(self.seconds / self.other(self.block))
                gc.collect()  # the other's Trainer, whose end would count as ours

# Hugging Face

def make_trainer(steps):
    from transformers import Trainer, TrainingArguments
    args = TrainingArguments(
        output_dir="output", max_steps=steps, per_device_train_batch_size=BATCH, logging_steps=50, use_cpu=True,
        disable_tqdm=True, save_strategy="no", report_to="none", max_grad_norm=0.0, log_level="error",
        lr_scheduler_type="constant",
    )
    return Trainer(Net(), args, train_dataset=Points())

def add_steps(trainer, watch):
    from transformers import PrinterCallback, TrainerCallback
    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            watch.step()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Steps())

def by_trainer(steps):
    trainer, watch = make_trainer(steps), Turns(None, steps)
    add_steps(trainer, watch)
    trainer.train()
    return watch.seconds

def trainer_callback(ctx):
    from jobkit.huggingface import JobkitCallback
    turns = Turns(by_trainer, ctx.params.block)
    trainer = make_trainer(ctx.params.block * ctx.params.turns)
    trainer.add_callback(JobkitCallback(trainer, ctx))
    add_steps(trainer, turns)
    trainer.train()
    return {"ratios": turns.ratios}

# Lightning

def fit(steps, watch, callbacks=(), job=None):
    import lightning
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()
        def training_step(self, batch, _):
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=5e-5, fused=True)
    class Steps(lightning.Callback):
        def on_train_batch_end(self, *_):
            watch.step()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks, Steps()],
    )
    loader = torch.utils.data.DataLoader(Points(), batch_size=BATCH, shuffle=True)
    trainer.fit(Module(), loader, ckpt_path=job.checkpoint if job else None)

def by_lightning(steps):
    watch = Turns(None, steps)
    fit(steps, watch)
    return watch.seconds

def lightning_callback(ctx):
    from jobkit.lightning import JobkitCallback
    turns, job = Turns(by_lightning, ctx.params.block), JobkitCallback(ctx)
    fit(ctx.params.block * ctx.params.turns, turns, [job], job)
    return {"ratios": turns.ratios}

# jobkit

def loop(ctx, other):
    model = ctx.parallelize(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    loader = ctx.loader(Points(), global_batch_size=BATCH)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    turns = Turns(other, ctx.params.block)
    for step in ctx.steps(ctx.params.block * ctx.params.turns):
        batch = next(loader)
        loss = ctx.backward(model, (batch, batch["labels"]), lambda output, _: output["loss"])
        ctx.update(optimizer)
        ctx.log({"train/loss": loss})
        turns.step()
    return {"ratios": turns.ratios}

def trainer(ctx):
    return loop(ctx, by_trainer)

def against_lightning(ctx):
    return loop(ctx, by_lightning)
"""

ROWS = {
    "trainer": ("jobkit / Trainer", 1.0),
    "lightning": ("jobkit / Lightning", 1.0),
    "trainer-callback": ("Trainer with / without", 1.02),
    "lightning-callback": ("Lightning with / without", 1.02),
}


def ratios(row: str, turns: int, block: int) -> list[float]:
    """Run a row's task as a job; return the ratio of each turn but the first."""
    made = project({"lightning": "against_lightning"}.get(row, row.replace("-", "_")), 1, turns=turns + 1, block=block)
    made.write("bench_task.py", TASK)
    return result(made)["ratios"][1:]


def main() -> None:
    arguments = options(__doc__, 12, ROWS).parse_args()
    for row in arguments.parts or ROWS:
        needs = {"lightning": ["lightning"], "lightning-callback": ["lightning", "jobkit.lightning"]}.get(row, [])
        if missing := next((name for name in needs if importlib.util.find_spec(name) is None), None):
            print(f"{ROWS[row][0]:28} left out: no {missing}", flush=True)
            continue
        name, bound = ROWS[row]
        show(name, ratios(row, arguments.repeats, 20 if QUICK else 200), bound, "times")


if __name__ == "__main__":
    main()
