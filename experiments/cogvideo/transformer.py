"""The expert transformer of CogVideoX (Yang et al. 2024, arXiv:2408.06072): text and video in one attention.

It is a sequence of blocks with several inputs, so that `parallel: pipeline` can cut it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from jobkit.train.pipeline import Blocks
from jobkit.train.tensor_styles import DividedHeads


class VideoTransformer(Blocks):
    """Velocity of latents [N, channels, T, H, W] at noise steps t [N], given text embeddings [N, L, text].

    Args:
        channels: of the latents.
        text: features of one text embedding.
        dim: features of a token, an even number.
        layers: blocks.
        heads: of attention, of dim / heads features each.
        time: features of the time embedding.
        patch: a token is patch x patch positions of one latent frame.
        rescale: what rows and columns are divided by in the embedding of positions: 1.875 lets a transformer that was
            begun at a smaller size go on at 60 x 90.
        recompute: forget activations inside the blocks and compute them again for the gradients.
    """

    def __init__(
        self,
        channels: int,
        text: int,
        dim: int,
        layers: int,
        heads: int,
        time: int,
        patch: int = 2,
        rescale: float = 1.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.embed = Embedding(channels, text, dim, time, patch, rescale)
        for i in range(layers):
            self.add_module(f"block_{i}", Block(dim, heads, time, recompute))
        self.velocity = Velocity(channels, dim, time, patch)

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Each rank has some of the heads, of the features between the two layers of a feed-forward, and of the rows
        that make shifts, scales and gates of the time; of what those make each rank needs all.

        What is outside the blocks stays whole.
        """
        divided, joined = ColwiseParallel(), RowwiseParallel()
        heads, modulation = DividedHeads(self.block_0.attention.head), ColwiseParallel(output_layouts=Replicate())
        per_head = SequenceParallel(sequence_dim=1, use_local_output=True)  # [N, heads, tokens, features of a head]
        return {
            "block_*.attention.query": heads,
            "block_*.attention.key": heads,
            "block_*.attention.value": heads,
            "block_*.attention.norm_query": per_head,
            "block_*.attention.norm_key": per_head,
            "block_*.attention.out": joined,
            "block_*.norm1.modulation": modulation,
            "block_*.norm2.modulation": modulation,
            "block_*.feed_forward.0": divided,
            "block_*.feed_forward.2": joined,
        }

    def shard_units(self) -> list[nn.Module]:
        """What is gathered and freed as one: a block."""
        return [module for module in self if isinstance(module, Block)]


class Embedding(nn.Module):
    """Tokens of the text [N, L, dim] and of the latents [N, T, H/patch, W/patch, dim], and the time [N, time]."""

    def __init__(self, channels: int, text: int, dim: int, time: int, patch: int, rescale: float) -> None:
        super().__init__()
        self.dim, self.patch, self.rescale = dim, patch, rescale
        self.video = nn.Linear(channels * patch**2, dim)
        self.text = nn.Linear(text, dim)
        self.time = nn.Sequential(nn.Linear(dim, time), nn.SiLU(), nn.Linear(time, time))

    def forward(self, latent: Tensor, t: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        patches, grid = patchify(latent, self.patch)
        video = self.video(patches) + positions(*grid, self.dim, latent.device, self.rescale)
        words = self.text(text).float()  # under autocast the streams stay fp32, as what is added to them adds up
        return words, video.unflatten(1, grid), self.time(sinusoids(t, self.dim))


class Block(nn.Module):
    """Attention over text and video together, then a feed-forward layer; each gated, and added to its input."""

    def __init__(self, dim: int, heads: int, time: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm1 = ExpertNorm(dim, time)
        self.attention = Attention(dim, heads)
        self.norm2 = ExpertNorm(dim, time)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim))

    def forward(self, words: Tensor, video: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        streams = words, video.flatten(1, 3), time
        if self.recompute and torch.is_grad_enabled():
            words, tokens = checkpoint(self._add, *streams, use_reentrant=False, preserve_rng_state=False)
        else:
            words, tokens = self._add(*streams)
        return words, tokens.view_as(video), time

    def _add(self, words: Tensor, video: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        lengths = [words.shape[1], video.shape[1]]
        for norm, layer in ((self.norm1, self.attention), (self.norm2, self.feed_forward)):
            tokens, words_gate, video_gate = norm(words, video, time)
            words_change, video_change = layer(tokens).split(lengths, dim=1)
            words, video = words + words_gate * words_change, video + video_gate * video_change
        return words, video


class Velocity(nn.Module):
    """The latents' velocity from the video's tokens, normed, and scaled and shifted by the time."""

    def __init__(self, channels: int, dim: int, time: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.norm = nn.LayerNorm(dim)
        self.out_norm = nn.LayerNorm(dim)
        self.modulation = _zero(nn.Linear(time, 2 * dim))
        self.out = _zero(nn.Linear(dim, channels * patch**2))

    def forward(self, words: Tensor, video: Tensor, time: Tensor) -> Tensor:
        frames, rows, columns = video.shape[1:4]
        shift, scale = self.modulation(F.silu(time))[:, None].chunk(2, dim=-1)
        tokens = self.out_norm(self.norm(video.flatten(1, 3))) * (1 + scale) + shift
        return unpatchify(self.out(tokens), (frames, rows, columns), self.patch)


class ExpertNorm(nn.Module):
    """Expert adaptive LayerNorm: one norm; a shift, a scale and a gate for video and others for text, from the time."""

    def __init__(self, dim: int, time: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.modulation = _zero(nn.Linear(time, 6 * dim))

    def forward(self, words: Tensor, video: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens [N, L + V, dim], text first; the gates [N, 1, dim] of text and of video."""
        modulation = self.modulation(F.silu(time))[:, None]
        shift, scale, gate, words_shift, words_scale, words_gate = modulation.chunk(6, dim=-1)
        video = self.norm(video) * (1 + scale) + shift
        words = self.norm(words) * (1 + words_scale) + words_shift
        return torch.cat([words, video], dim=1), words_gate, gate


class Attention(nn.Module):
    """Self-attention over all tokens, with queries and keys normalised in each head."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head = dim // heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.norm_query, self.norm_key = (nn.LayerNorm(self.head, eps=1e-6) for _ in range(2))
        self.out = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        # -1, not the number of heads: with tensor parallelism a rank has some of them.
        query, key, value = (
            layer(tokens).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        h = F.scaled_dot_product_attention(self.norm_query(query), self.norm_key(key), value)
        return self.out(h.transpose(1, 2).flatten(2))


def patchify(latent: Tensor, patch: int) -> tuple[Tensor, tuple[int, int, int]]:
    """Latents [N, C, T, H, W] as tokens [N, T * H/patch * W/patch, C * patch^2], and how many along each axis."""
    n, channels, frames, height, width = latent.shape
    rows, columns = height // patch, width // patch
    cut = latent.reshape(n, channels, frames, rows, patch, columns, patch).permute(0, 2, 3, 5, 1, 4, 6)
    return cut.flatten(4).flatten(1, 3), (frames, rows, columns)


def unpatchify(tokens: Tensor, grid: tuple[int, int, int], patch: int) -> Tensor:
    """The inverse of `patchify`."""
    frames, rows, columns = grid
    cut = tokens.reshape(len(tokens), frames, rows, columns, -1, patch, patch)
    return cut.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)


def positions(frames: int, rows: int, columns: int, dim: int, device: torch.device, rescale: float = 1.0) -> Tensor:
    """Where each video token is, [frames * rows * columns, dim]: sinusoids of its frame, its column and its row.

    About 3/8 of the features are for each axis of space, the rest for time. Rows and columns are divided by `rescale`.
    """
    space = 2 * (3 * dim // 16)
    frame, column, row = (
        torch.cat(_angles(torch.arange(count, device=device) / divided_by, features), dim=1)
        for count, features, divided_by in (
            (frames, dim - 2 * space, 1.0),
            (columns, space, rescale),
            (rows, space, rescale),
        )
    )
    size = (frames, rows, columns, -1)
    axes = [frame[:, None, None].expand(size), column[None, None].expand(size), row[None, :, None].expand(size)]
    return torch.cat(axes, dim=-1).flatten(0, 2)


def sinusoids(t: Tensor, features: int) -> Tensor:
    """Steps [N] as [N, features]: cosines and then sines of wavelengths from 2 pi to 2 pi x 10000."""
    sines, cosines = _angles(t, features)
    return torch.cat([cosines, sines], dim=1)


def _angles(t: Tensor, features: int) -> tuple[Tensor, Tensor]:
    frequencies = torch.exp(torch.arange(features // 2, device=t.device) * (-2 * math.log(10000) / features))
    angles = t[:, None].float() * frequencies
    return angles.sin(), angles.cos()


def _zero(layer: nn.Linear) -> nn.Linear:
    """Start at zero, so that every block starts as the identity and the network's first output is 0."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
