"""MiniMind (github.com/jingyaogong/minimind): a decoder-only transformer in Llama's manner, of a size to train alone.

It is an nn.Sequential, so that `parallel: pipeline` can cut it; `tensor_plan` and `shard_units` say how else it can be
spread over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.nn import functional as F

from jobkit.train.tensor_styles import DividedHeads


class MiniMind(nn.Sequential):
    """Logits [N, T, vocabulary] of the token after each of tokens [N, T], given it and those before it.

    Args:
        vocabulary: number of tokens.
        dim: features of a token.
        layers: blocks of attention and SwiGLU.
        heads: of the queries; `kv_heads` of the keys and values, each shared by `heads / kv_heads` queries
            (grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245).
        hidden: features inside SwiGLU (Shazeer 2020, arXiv:2002.05202).
        theta: base of the rotary embedding's wavelengths.
        tie: whether the head's matrix is the embedding's.
        std: of the normal distribution that all matrices are drawn from.
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        theta: float,
        tie: bool,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        for i in range(layers):
            self.add_module(f"block_{i}", Block(dim, heads, kv_heads, hidden, theta))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=std)
        if tie:
            self.head.weight = self.embed.weight

    def shard_units(self) -> list[nn.Module]:
        """The blocks; embedding and head stay together, because they may share their matrix."""
        return [module for module in self.children() if isinstance(module, Block)]

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Heads and SwiGLU's features are split over the ranks; the way back to the stream sums their parts.

        The norms of queries and keys have one weight for all heads, of which a rank sees its own: SequenceParallel sums
        the gradient over the ranks.
        """
        plan: dict[str, ParallelStyle] = {}
        for name in ("attention.query", "attention.key", "attention.value"):
            plan[f"block_*.{name}"] = DividedHeads(self.block_0.attention.features)
        for name in ("mlp.gate", "mlp.up"):
            plan[f"block_*.{name}"] = ColwiseParallel()
        for name in ("attention.query_norm", "attention.key_norm"):
            plan[f"block_*.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        for name in ("attention.out", "mlp.down"):
            plan[f"block_*.{name}"] = RowwiseParallel()
        return plan


class Block(nn.Module):
    """Attention and SwiGLU, each on the normed stream [N, T, dim] and added to it."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, theta: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads, kv_heads, theta)
        self.mlp_norm = nn.RMSNorm(dim, eps=1e-6)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal self-attention with normed queries and keys, grouped key and value heads and rotary positions."""

    def __init__(self, dim: int, heads: int, kv_heads: int, theta: float) -> None:
        super().__init__()
        self.features, self.theta = dim // heads, theta
        self.query = nn.Linear(dim, heads * self.features, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.features, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.features, bias=False)
        self.query_norm = nn.RMSNorm(self.features, eps=1e-6)
        self.key_norm = nn.RMSNorm(self.features, eps=1e-6)
        self.out = nn.Linear(heads * self.features, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        query = rotate(self.query_norm(query.float()), self.theta)
        key = rotate(self.key_norm(key.float()), self.theta)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        h = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(h.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.features))  # -1: under tensor parallelism a rank has some of the heads


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864) of heads [N, T, heads, features] at positions 0 to T - 1.

    What is rotated are pairs of a feature in the first half and its like in the second.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
