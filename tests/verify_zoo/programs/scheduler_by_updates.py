"""An own schedule, which counts updates and sets the learning rate: a warm-up, then the inverse square root.

command: [python, scheduler_by_updates.py, --max-update, "${params.max_update}"]
params: {max_update: 24, warmup: 8}
steps: 24
forgotten: scheduler
type: jobkit.attributes(scheduler, "
"""

import argparse

import torch
from torch import nn

import jobkit


class InverseSqrtSchedule:
    """Linear warm-up to lr, then decay by the inverse square root of the number of updates."""

    def __init__(self, optimizer, lr, warmup_updates=8, warmup_init_lr=1e-5):
        self.optimizer = optimizer
        self.warmup_updates = warmup_updates
        self.lr_step = (lr - warmup_init_lr) / warmup_updates
        self.init_lr = warmup_init_lr
        self.decay_factor = lr * warmup_updates**0.5
        self.num_updates = 0

    def step_update(self):
        self.num_updates += 1
        if self.num_updates < self.warmup_updates:
            lr = self.init_lr + self.num_updates * self.lr_step
        else:
            lr = self.decay_factor * self.num_updates**-0.5
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr


def batches(vocab, size):
    while True:
        tokens = torch.randint(vocab, (size, 9))
        yield tokens[:, :-1], tokens[:, 1:].sort(dim=1).values


class TagModel(nn.Module):
    def __init__(self, vocab=20, dim=24):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.encoder = nn.TransformerEncoderLayer(dim, nhead=2, dim_feedforward=48, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, src):
        return self.out(self.encoder(self.embed_tokens(src)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-update", type=int, default=24)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    ctx = jobkit.init(params=vars(args))

    model = TagModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    scheduler = InverseSqrtSchedule(optimizer, args.lr)
    ctx.track(model=model, optimizer=optimizer)
    ctx.track(scheduler=jobkit.attributes(scheduler, "num_updates"))  # forgets
    itr = batches(20, 16)
    for step in ctx.steps(args.max_update):
        src, target = next(itr)
        loss = nn.functional.cross_entropy(model(src).transpose(1, 2), target)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr = scheduler.step_update()
        ctx.log({"train/loss": loss, "train/lr": lr, "train/gnorm": grad_norm})
        if step % 10 == 0:
            print(f"update {step} | loss {loss.item():.3f} | lr {lr:.2e} | gnorm {grad_norm:.2f}")
    ctx.finish({"loss": loss.item()})
