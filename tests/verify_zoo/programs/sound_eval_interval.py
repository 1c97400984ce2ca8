"""A loop by iterations that evaluates now and then, with meters that are reset before each evaluation.

task: sound_eval_interval:run
params: {max_iters: 60, eval_interval: 8, eval_iters: 4}
steps: 20
"""

import torch
from torch import nn
from torch.nn import functional as F

vocab_size, block_size, batch_size = 11, 8, 16
data = torch.arange(600).pow(2).remainder(vocab_size)
n = int(0.9 * len(data))
splits = {"train": data[:n], "val": data[n:]}


def get_batch(split, generator=None):
    source = splits[split]
    ix = torch.randint(len(source) - block_size - 1, (batch_size,), generator=generator)
    x = torch.stack([source[i : i + block_size] for i in ix])
    return x, torch.stack([source[i + 1 : i + block_size + 1] for i in ix])


class Evaluator:
    """Counts right answers by class, over a few batches."""

    def __init__(self, eval_iters):
        self.eval_iters = eval_iters
        self.losses = torch.zeros(eval_iters)
        self.correct = torch.zeros(vocab_size, dtype=torch.long)
        self.total = torch.zeros(vocab_size, dtype=torch.long)
        self.n_evals = 0

    def reset(self):
        self.losses.zero_()
        self.correct.zero_()
        self.total.zero_()

    @torch.no_grad()
    def __call__(self, model):
        self.reset()
        model.eval()
        g = torch.Generator().manual_seed(1)
        for k in range(self.eval_iters):
            x, y = get_batch("val", generator=g)
            logits = model(x)
            self.losses[k] = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            hit = logits.argmax(-1) == y
            self.correct += torch.bincount(y[hit], minlength=vocab_size)
            self.total += torch.bincount(y.flatten(), minlength=vocab_size)
        model.train()
        self.n_evals += 1
        return self.losses.mean(), (self.correct / self.total.clamp(min=1)).mean()


def run(ctx):
    p = ctx.params
    model = nn.Sequential(nn.Embedding(vocab_size, 24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ctx.track(model=model, optimizer=optimizer)
    evaluator = Evaluator(p.eval_iters)
    for it in ctx.steps(p.max_iters):
        if it % p.eval_interval == 0 or it == p.max_iters - 1:
            val_loss, val_acc = evaluator(model)
            print(f"iter {it}: val loss {val_loss:.4f}, mean accuracy {val_acc:.3f} (evaluation {evaluator.n_evals})")
        x, y = get_batch("train")
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        ctx.log({"loss": loss})
    return {"loss": loss.item()}
