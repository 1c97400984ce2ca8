"""The class-conditional UNet of ADM (Dhariwal and Nichol 2021, arXiv:2105.05233), predicting a velocity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Linear = TypeVar("Linear", nn.Conv2d, nn.Linear)


class UNet(nn.Module):
    """Velocity of images [N, channels, R, R] at times [N] in [0, 1], given labels [N]; `null_label` means "no label".

    Args:
        channels: of the input.
        classes: number of real labels.
        width: features at full resolution; `multipliers` times that many at each halving.
        blocks: residual blocks at each resolution.
        attention: downsampling factors at which every block is followed by self-attention.
        head: features of one attention head.
        dropout: probability in every residual block.
        outputs: channels of the output, where they are not those of the input.
        time_scale: the factor of times before they are embedded.
        learn_null: whether "no label" has an embedding of its own, which is trained, or adds nothing.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        width: int,
        multipliers: Sequence[int],
        blocks: int,
        attention: Sequence[int],
        head: int,
        dropout: float,
        outputs: int | None = None,
        time_scale: float = 1000,
        learn_null: bool = True,
    ) -> None:
        super().__init__()
        self.null_label = classes
        self.width = width
        self.time_scale = time_scale
        embedding = 4 * width
        self.embed_time = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.embed_label = nn.Embedding(classes + 1, embedding, padding_idx=None if learn_null else classes)

        def layer(inputs: int, outputs: int, factor: int) -> Layer:
            return Layer(inputs, outputs, embedding, dropout, head if factor in attention else None)

        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList()
        features, skips = width, [width]
        for level, multiplier in enumerate(multipliers):
            stage = nn.ModuleList()
            for _ in range(blocks):
                stage.append(layer(features, multiplier * width, 2**level))
                features = multiplier * width
                skips.append(features)
            if level + 1 < len(multipliers):
                stage.append(ResidualBlock(features, features, embedding, dropout, nn.AvgPool2d(2)))
                skips.append(features)
            self.down.append(stage)

        self.middle = Layer(features, features, embedding, dropout, head)
        self.middle_out = ResidualBlock(features, features, embedding, dropout)

        self.up = nn.ModuleList()
        self.enlarge = nn.ModuleList()
        for level, multiplier in reversed(list(enumerate(multipliers))):
            stage = nn.ModuleList()
            for _ in range(blocks + 1):
                stage.append(layer(features + skips.pop(), multiplier * width, 2**level))
                features = multiplier * width
            self.up.append(stage)
            if level > 0:
                self.enlarge.append(ResidualBlock(features, features, embedding, dropout, nn.Upsample(scale_factor=2)))

        last = _zero(nn.Conv2d(features, outputs or channels, 3, padding=1))
        self.head = nn.Sequential(_norm(features), nn.SiLU(), last)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        embedding = self.embed_time(sinusoids(t, self.width, self.time_scale)) + self.embed_label(label)
        h = self.stem(x)
        skips = [h]
        for stage in self.down:
            for layer in stage:
                h = layer(h, embedding)
                skips.append(h)
        h = self.middle_out(self.middle(h, embedding), embedding)
        for level, stage in enumerate(self.up):
            for layer in stage:
                h = layer(torch.cat([h, skips.pop()], dim=1), embedding)
            if level < len(self.enlarge):
                h = self.enlarge[level](h, embedding)
        return self.head(h)

    def shard_units(self) -> Iterable[nn.Module]:
        """Blocks to be sharded one by one."""
        return [*chain(*self.down), self.middle, self.middle_out, *chain(*self.up), *self.enlarge]


class Layer(nn.Module):
    """A residual block, followed by self-attention where `head` (features of one head) is given."""

    def __init__(self, inputs: int, outputs: int, embedding: int, dropout: float, head: int | None) -> None:
        super().__init__()
        self.block = ResidualBlock(inputs, outputs, embedding, dropout)
        self.attention = Attention(outputs, head) if head else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.attention(self.block(x, embedding))


class ResidualBlock(nn.Module):
    """Two convolutions; the embedding scales and shifts the second norm; `resize` halves or doubles on the way."""

    def __init__(
        self, inputs: int, outputs: int, embedding: int, dropout: float, resize: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.norm1 = _norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.embed = nn.Linear(embedding, 2 * outputs)
        self.norm2 = _norm(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = _zero(nn.Conv2d(outputs, outputs, 3, padding=1))
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.resize = resize or nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.conv1(self.resize(F.silu(self.norm1(x))))
        scale, shift = self.embed(F.silu(embedding))[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        h = self.conv2(self.dropout(F.silu(h)))
        return self.skip(self.resize(x)) + h


class Attention(nn.Module):
    """Self-attention over the pixels, added to its input."""

    def __init__(self, features: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm = _norm(features)
        self.qkv = nn.Linear(features, 3 * features)  # query, key and value of one head after those of another
        self.out = _zero(nn.Linear(features, features))

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        qkv = self.qkv(pixels).unflatten(-1, (-1, 3, self.head)).transpose(1, 2)
        h = F.scaled_dot_product_attention(*qkv.unbind(3))
        return x + self.out(h.transpose(1, 2).flatten(2)).transpose(1, 2).reshape(x.shape)


def sinusoids(t: Tensor, features: int, scale: float) -> Tensor:
    """Times [N] as [N, features]: cosines and sines of wavelengths from 2 pi / scale up to 10,000 times that."""
    frequencies = scale * torch.exp(torch.arange(features // 2, device=t.device) * (-2 * math.log(10000) / features))
    angles = t[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _norm(features: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, features // 4), features)


def _zero(module: Linear) -> Linear:
    """Start at zero, so that every block starts as the identity and the network's first output is 0."""
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module
