"""Caches: functools.lru_cache, masks in a dict by shape, and positional encodings that grow when they are needed.

task: sound_cache:train
params: {steps: 24}
steps: 24
"""

import math
from functools import lru_cache

import torch
from torch import nn

_MASKS = {}
hits, misses = 0, 0


def causal_mask(size):
    global hits, misses
    if size not in _MASKS:
        misses += 1
        _MASKS[size] = torch.full((size, size), float("-inf")).triu(1)
    else:
        hits += 1
    return _MASKS[size]


@lru_cache(maxsize=8)
def alibi_slopes(heads):
    return torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)])


class PositionalEncoding(nn.Module):
    """Sinusoids, computed for the longest sequence so far."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.pe = None

    def forward(self, x):
        if self.pe is None or self.pe.size(0) < x.size(1):
            position = torch.arange(x.size(1)).unsqueeze(1)
            div = torch.exp(torch.arange(0, self.dim, 2) * (-math.log(10000.0) / self.dim))
            self.pe = torch.zeros(x.size(1), self.dim)
            self.pe[:, 0::2] = torch.sin(position * div)
            self.pe[:, 1::2] = torch.cos(position * div)
        return x + self.pe[: x.size(1)]


class Rotary:
    """Cosines and sines by length and device."""

    def __init__(self, dim):
        self.inv_freq = 1.0 / (100 ** (torch.arange(0, dim, 2).float() / dim))
        self.seq_len_cached = 0
        self.cos_cached = self.sin_cached = None

    def __call__(self, x):
        if x.size(1) != self.seq_len_cached:
            self.seq_len_cached = x.size(1)
            freqs = torch.outer(torch.arange(x.size(1)).float(), self.inv_freq)
            emb = torch.cat([freqs, freqs], -1)
            self.cos_cached, self.sin_cached = emb.cos(), emb.sin()
        half = torch.cat([-x[..., x.size(-1) // 2 :], x[..., : x.size(-1) // 2]], -1)
        return x * self.cos_cached + half * self.sin_cached


class TinyLM(nn.Module):
    def __init__(self, vocab=16, dim=16):
        super().__init__()
        self.embed, self.pos, self.rotary = nn.Embedding(vocab, dim), PositionalEncoding(dim), Rotary(dim)
        self.qkv, self.head = nn.Linear(dim, 3 * dim), nn.Linear(dim, vocab)

    def forward(self, tokens):
        q, k, v = self.qkv(self.pos(self.embed(tokens))).chunk(3, -1)
        scores = self.rotary(q) @ self.rotary(k).transpose(1, 2) / 4 * (1 + alibi_slopes(1))
        return self.head((scores + causal_mask(tokens.size(1))).softmax(-1) @ v)


def train(ctx):
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ctx.track(model=model, optimizer=optimizer)
    for _ in ctx.steps(ctx.params.steps):
        length = int(torch.randint(4, 12, ()))
        tokens = torch.arange(length + 1).add(torch.randint(16, (8, 1))) % 16
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log({"loss": loss})
    print(f"mask cache: {hits} hits, {misses} misses")
    return {"loss": loss.item()}
