"""A loop as nanoGPT's: `while True`, a batch drawn at random, a learning rate by hand, a loss now and then."""

import math

import torch
from torch import nn

import jobkit

text = torch.tensor(list((__doc__ or "").encode() * 20))


def get_batch(batch_size=16, block_size=16):
    starts = torch.randint(len(text) - block_size, (batch_size,)).tolist()
    return (torch.stack([text[i + shift : i + shift + block_size] for i in starts]) for shift in (0, 1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(128, 32), nn.GRU(32, 32, batch_first=True)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(32, 128)

    def forward(self, tokens):
        return self.head(self.drop(self.mix(self.embed(tokens))[0]))


def train(ctx):
    max_iters, warmup = ctx.params.max_iters, 5
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ctx.track(model=model, optimizer=optimizer)
    iter_num = ctx.step
    while True:
        ctx.boundary(iter_num, total=max_iters)
        if iter_num >= max_iters:
            break
        share = min(1.0, iter_num / max_iters)
        lr = 3e-3 * min((iter_num + 1) / warmup, 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        tokens, targets = get_batch()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss})
        iter_num += 1
    return {"loss": loss.item()}


if __name__ == "__main__":
    ctx = jobkit.init(params={"max_iters": 200})
    ctx.finish(train(ctx))
