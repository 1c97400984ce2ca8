"""MiniMind (github.com/jingyaogong/minimind): a decoder-only transformer in Llama's manner, of a size to train alone.

    tokens --embed--> block_0 ... block_n --norm, head--> logits

It is an nn.Sequential, whose parts a pipeline divides and ZeRO gathers one by one; `tensor_plan` divides its layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.nn import functional as F

EPS = 1e-6
"""Of all norms."""


class MiniMind(nn.Sequential):
    """Logits [N, T, vocabulary] of the token after each of tokens int64 [N, T].

    `kv_heads` keys and values are each shared by heads / kv_heads queries (arXiv:2305.13245); `hidden` features are
    inside SwiGLU (arXiv:2002.05202); `theta` is the base of the rotary wavelengths. `tie`: the head's matrix is the
    embedding's; a pipeline, whose stages share no matrix, needs false. `std` is of the initial weights.
    """

    def __init__(
        self, vocabulary: int, dim: int, layers: int, heads: int, kv_heads: int, hidden: int, theta: float, tie: bool,
        std: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tie, self.std = tie, std
        self.embed = nn.Embedding(vocabulary, dim)
        for i in range(layers):
            self.add_module(f"block_{i}", Block(dim, heads, kv_heads, hidden, theta))
        self.norm = nn.RMSNorm(dim, eps=EPS)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all matrices. jobkit calls it where the model leaves the meta device, which unties the head."""
        if self.tie:
            self.head.weight = self.embed.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=self.std)
            else:
                nn.init.ones_(parameter)

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Each rank has some of the heads and of SwiGLU's features; the way back to the stream sums their parts.

        The norms of queries and keys have one weight for all heads, of which a rank has some: SequenceParallel, along
        the dimension of the heads, sums its gradient over the ranks.
        """
        divided, joined = ColwiseParallel(), RowwiseParallel()
        norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan = {f"block_*.{name}": divided for name in ("query", "key", "value", "gate", "up")}
        plan |= {f"block_*.{name}": joined for name in ("out", "down")}
        return plan | {f"block_*.{name}": norm for name in ("query_norm", "key_norm")}


class Block(nn.Module):
    """Causal attention, then SwiGLU, each on the normed stream [N, T, dim] and added to it."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, theta: float) -> None:
        super().__init__()
        self.features, self.theta = dim // heads, theta

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=EPS), nn.RMSNorm(dim, eps=EPS)
        self.query, self.out = linear(dim, dim), linear(dim, dim)
        self.key, self.value = (linear(dim, kv_heads * self.features) for _ in range(2))
        self.query_norm, self.key_norm = (nn.RMSNorm(self.features, eps=EPS) for _ in range(2))
        self.gate, self.up, self.down = linear(dim, hidden), linear(dim, hidden), linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        # -1, not the number of heads: with tensor parallelism a rank has some of them.
        query, key, value = (y(h).unflatten(-1, (-1, self.features)) for y in (self.query, self.key, self.value))
        query = rotate(self.query_norm(query.float()), self.theta).transpose(1, 2)
        key = rotate(self.key_norm(key.float()), self.theta).transpose(1, 2)
        h = F.scaled_dot_product_attention(query, key, value.transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of heads [N, T, heads, features] at positions 0 to T - 1.

    It rotates pairs: a feature of the first half, and the feature at the same place in the second half.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
