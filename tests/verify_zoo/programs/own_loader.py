"""A GPT-like loop with a loader of its own: a permutation of the text's chunks, and a position in it.

params: {max_iters: 48}
config: {verify: {params: {max_iters: 20}}}
forgotten: train_loader
type: jobkit.attributes(train_loader, "current_position", "perm")
"""

import math
import time

import torch
import torch.nn as nn
from torch.nn import functional as F

import jobkit

batch_size, block_size = 8, 16
n_embd = 32
learning_rate, warmup_iters, min_lr = 1e-2, 4, 1e-3
text = (__doc__ + "the quick brown fox jumps over the lazy dog. " * 40).encode()


class DataLoaderLite:
    def __init__(self, tokens, B, T):
        self.B, self.T = B, T
        self.tokens = tokens
        self.num_chunks = (len(tokens) - 1) // T
        print(f"loaded {len(tokens)} tokens, 1 epoch = {self.num_chunks // B} batches")
        self.reset()

    def reset(self):
        self.perm = torch.randperm(self.num_chunks)
        self.current_position = 0

    def next_batch(self):
        B, T = self.B, self.T
        if self.current_position + B > self.num_chunks:
            self.reset()
        starts = self.perm[self.current_position : self.current_position + B] * T
        self.current_position += B
        buf = torch.stack([self.tokens[i : i + T + 1] for i in starts.tolist()])
        return buf[:, :-1], buf[:, 1:]


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(256, n_embd)
        self.block = nn.GRU(n_embd, n_embd, batch_first=True)
        self.lm_head = nn.Linear(n_embd, 256)

    def forward(self, idx, targets):
        logits = self.lm_head(self.block(self.wte(idx))[0])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


ctx = jobkit.init(params={"max_iters": 48})
max_iters = ctx.params.max_iters
torch.manual_seed(1337)
train_loader = DataLoaderLite(torch.tensor(list(text)), batch_size, block_size)
model = TinyLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
ctx.track(model=model, optimizer=optimizer)
ctx.track(train_loader=jobkit.attributes(train_loader, "perm", "current_position"))  # forgets

iter_num = ctx.step
t0 = time.time()
while True:
    ctx.boundary(iter_num, total=max_iters)
    if iter_num >= max_iters:
        break
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    x, y = train_loader.next_batch()
    loss = model(x, y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt = t1 - t0
    t0 = t1
    if iter_num % 10 == 0:
        print(f"step {iter_num:4d} | loss: {loss.item():.6f} | norm: {norm:.4f} | dt: {dt * 1000:.2f}ms")
    ctx.log({"train/loss": loss.item()})
    iter_num += 1
ctx.finish()
