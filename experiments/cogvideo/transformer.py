"""The expert transformer of CogVideoX (Yang et al. 2024, arXiv:2408.06072): text and video in one attention.

    latent, t, text --embed--> (words, video, time) --block_0 ... block_n--> (words, video, time) --velocity--> velocity

Its parts a pipeline divides and ZeRO gathers one by one; `tensor_plan` divides their layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import jobkit


class VideoTransformer(jobkit.Blocks):
    """Velocity of latents [N, channels, T, H, W] at noise steps t int64 [N], given text embeddings [N, L, text].

    A token has `dim` features, dim / heads of them in each head, and stands for patch x patch positions of a latent
    frame. `time` features embed t. `rescale` divides rows and columns in the embedding of positions: with 1.875 a
    transformer that began at a smaller size goes on at 60 x 90. With `recompute` the activations inside blocks are
    computed again for the gradients.
    """

    def __init__(
        self, channels: int, text: int, dim: int, layers: int, heads: int, time: int, patch: int, rescale: float,
        recompute: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = Embedding(channels, text, dim, time, patch, rescale)
        for i in range(layers):
            self.add_module(f"block_{i}", Block(dim, heads, time, recompute))
        self.velocity = Velocity(channels, dim, time, patch)
        self.init_weights()

    def init_weights(self) -> None:
        """torch's own initial weights, and zeros where a block must begin as the identity."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                module.reset_parameters()
        for name, parameter in self.named_parameters():
            if "modulation" in name or name.startswith("velocity.out."):
                nn.init.zeros_(parameter)

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Each rank has some of the heads and of the features between the two layers of a feed-forward, and some rows
        of the modulations, whose outputs all ranks need.

        The norms of queries and keys have one weight for all heads, of which a rank has some: SequenceParallel, along
        the dimension of the heads, sums its gradient over the ranks.
        """
        divided, joined, gathered = ColwiseParallel(), RowwiseParallel(), ColwiseParallel(output_layouts=Replicate())
        norm = SequenceParallel(sequence_dim=1, use_local_output=True)
        plan: dict[str, ParallelStyle] = {f"block_*.{name}": divided for name in ("query", "key", "value", "widen")}
        plan |= {f"block_*.{name}": joined for name in ("out", "narrow")}
        plan |= {f"block_*.{name}.modulation": gathered for name in ("norm1", "norm2")}
        return plan | {f"block_*.{name}": norm for name in ("norm_query", "norm_key")}


class Embedding(nn.Module):
    """Tokens of the text [N, L, dim] and of the latents [N, T, H/patch, W/patch, dim], and the time [N, time]."""

    def __init__(self, channels: int, text: int, dim: int, time: int, patch: int, rescale: float) -> None:
        super().__init__()
        self.dim, self.patch, self.rescale = dim, patch, rescale
        self.video = nn.Linear(channels * patch**2, dim)
        self.text = nn.Linear(text, dim)
        self.time = nn.Sequential(nn.Linear(dim, time), nn.SiLU(), nn.Linear(time, time))

    def forward(self, latent: Tensor, t: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        patches = latent.unflatten(4, (-1, self.patch)).unflatten(3, (-1, self.patch))  # [N, C, T, rows, p, columns, p]
        patches = patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4)
        video = self.video(patches) + positions(*patches.shape[1:4], self.dim, latent.device, self.rescale)
        words = self.text(text).float()  # under autocast the streams stay float32, as what is added to them adds up
        sines, cosines = angles(t, self.dim)
        return words, video, self.time(torch.cat([cosines, sines], dim=1))


class Block(nn.Module):
    """Attention over text and video together, then a feed-forward layer; each gated, and added to its input."""

    def __init__(self, dim: int, heads: int, time: int, recompute: bool) -> None:
        super().__init__()
        self.head, self.recompute = dim // heads, recompute
        self.norm1, self.norm2 = ExpertNorm(dim, time), ExpertNorm(dim, time)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_query, self.norm_key = (nn.LayerNorm(self.head, eps=1e-6) for _ in range(2))
        self.widen, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, words: Tensor, video: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        streams = words, video.flatten(1, 3), time
        words, tokens = checkpoint(self._add, *streams, use_reentrant=False) if self.recompute else self._add(*streams)
        return words, tokens.view_as(video), time

    def _add(self, words: Tensor, video: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        lengths = [words.shape[1], video.shape[1]]
        for norm, layer in ((self.norm1, self._attention), (self.norm2, self._feed_forward)):
            tokens, words_gate, video_gate = norm(words, video, time)
            words_change, video_change = layer(tokens).split(lengths, dim=1)
            words, video = words + words_gate * words_change, video + video_gate * video_change
        return words, video

    def _attention(self, tokens: Tensor) -> Tensor:
        # -1, not the number of heads: with tensor parallelism a rank has some of them.
        heads = [layer(tokens).unflatten(-1, (-1, self.head)) for layer in (self.query, self.key, self.value)]
        query, key, value = (part.transpose(1, 2) for part in heads)
        h = F.scaled_dot_product_attention(self.norm_query(query), self.norm_key(key), value)
        return self.out(h.transpose(1, 2).flatten(2))

    def _feed_forward(self, tokens: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.widen(tokens), approximate="tanh"))


class ExpertNorm(nn.Module):
    """Expert adaptive LayerNorm: one norm; a shift, a scale and a gate for video and others for text, from the time."""

    def __init__(self, dim: int, time: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.modulation = nn.Linear(time, 6 * dim)

    def forward(self, words: Tensor, video: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens [N, L + V, dim], text first; the gates [N, 1, dim] of text and of video."""
        modulation = self.modulation(F.silu(time))[:, None]
        shift, scale, gate, words_shift, words_scale, words_gate = modulation.chunk(6, dim=-1)
        video = self.norm(video) * (1 + scale) + shift
        words = self.norm(words) * (1 + words_scale) + words_shift
        return torch.cat([words, video], dim=1), words_gate, gate


class Velocity(nn.Module):
    """The latents' velocity from the video's tokens, normed, and scaled and shifted by the time."""

    def __init__(self, channels: int, dim: int, time: int, patch: int) -> None:
        super().__init__()
        self.channels, self.patch = channels, patch
        self.norm, self.out_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.modulation = nn.Linear(time, 2 * dim)
        self.out = nn.Linear(dim, channels * patch**2)

    def forward(self, words: Tensor, video: Tensor, time: Tensor) -> Tensor:
        shift, scale = self.modulation(F.silu(time))[:, None, None, None].chunk(2, dim=-1)
        patches = self.out(self.out_norm(self.norm(video)) * (1 + scale) + shift)
        patches = patches.unflatten(4, (self.channels, self.patch, self.patch))  # [N, T, rows, columns, C, p, p]
        return patches.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)


def positions(frames: int, rows: int, columns: int, dim: int, device: torch.device, rescale: float) -> Tensor:
    """Where each token is, [frames, rows, columns, dim]: sinusoids of its frame, its column and its row.

    About 3/8 of the features are for each axis of space, the rest for time. Rows and columns are divided by `rescale`.
    """
    space, size = 2 * (3 * dim // 16), (frames, rows, columns, -1)

    def axis(count: int, features: int, unit: float) -> Tensor:
        return torch.cat(angles(torch.arange(count, device=device) / unit, features), dim=1)

    frame, column, row = axis(frames, dim - 2 * space, 1.0), axis(columns, space, rescale), axis(rows, space, rescale)
    return torch.cat([frame[:, None, None].expand(size), column.expand(size), row[:, None].expand(size)], dim=-1)


def angles(t: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """Sines and cosines [N, features / 2] of numbers [N], at wavelengths from 2 pi to 2 pi x 10000."""
    frequencies = torch.exp(torch.arange(features // 2, device=t.device) * (-2 * math.log(10000) / features))
    phases = t[:, None].float() * frequencies
    return phases.sin(), phases.cos()
