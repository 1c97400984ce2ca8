"""A prefetcher that has made the next batch already: any batch follows from the seed and its number.

task: sound_prefetch:train
params: {steps: 24, batch_size: 16}
steps: 24
"""

import torch
from torch import nn


class Shards:
    """Tokens of several shards; the batch of a step is drawn by a generator seeded for that step."""

    def __init__(self, batch_size, seq_len=12, seed=1337):
        self.batch_size, self.seq_len, self.seed = batch_size, seq_len, seed
        self.shards = [torch.arange(400).mul(k).add(k * k).remainder(17) for k in (1, 2, 3, 5)]
        self.current_shard = -1

    def batch(self, step):
        g = torch.Generator().manual_seed(self.seed + step)
        self.current_shard = step % len(self.shards)
        tokens = self.shards[self.current_shard]
        starts = torch.randint(len(tokens) - self.seq_len - 1, (self.batch_size,), generator=g)
        rows = torch.stack([tokens[i : i + self.seq_len + 1] for i in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]


class DataPrefetcher:
    """Holds the next batch, one-hot, in two buffers that take turns."""

    def __init__(self, source, first_step):
        self.source = source
        self.next_step = first_step
        self.buffers = [torch.zeros(source.batch_size, source.seq_len, 17) for _ in range(2)]
        self.fetched = 0
        self.preload()

    def preload(self):
        self.next_input, self.next_target = self.source.batch(self.next_step)
        one_hot = self.buffers[self.next_step % 2].zero_()
        self.next_input = one_hot.scatter_(2, self.next_input.unsqueeze(-1), 1.0)
        self.next_step += 1
        self.fetched += 1

    def next(self):
        x, y = self.next_input, self.next_target
        self.preload()
        return x, y


def train(ctx):
    model = nn.Sequential(nn.Linear(17, 32), nn.GELU(), nn.Linear(32, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ctx.track(model=model, optimizer=optimizer)
    prefetcher = DataPrefetcher(Shards(ctx.params.batch_size), first_step=ctx.step)
    for step in ctx.steps(ctx.params.steps):
        x, y = prefetcher.next()
        loss = nn.functional.cross_entropy(model(x).transpose(1, 2), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log({"loss": loss})
        if step % 8 == 0:
            print(f"step {step}: loss {loss.item():.3f} ({prefetcher.fetched} batches fetched)")
    return {"loss": loss.item()}
