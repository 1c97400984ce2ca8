"""The class-conditional UNet of ADM (Dhariwal and Nichol 2021, arXiv:2105.05233), predicting a velocity.

Its weights have the names and shapes of flow_matching's image example, so that published weights can be loaded.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from textwrap import shorten
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import jobkit

Convolution = TypeVar("Convolution", nn.Conv1d, nn.Conv2d)


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
        self.null_label, self.width, self.time_scale = classes, width, time_scale
        embedding = 4 * width
        self.time_embed = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.label_emb = nn.Embedding(classes + 1, embedding, padding_idx=None if learn_null else classes)

        def layer(inputs: int, outputs: int, factor: int) -> list[nn.Module]:
            block = ResidualBlock(inputs, outputs, embedding, dropout)
            return [block, Attention(outputs, head)] if factor in attention else [block]

        self.input_blocks = nn.ModuleList([Layer(nn.Conv2d(channels, width, 3, padding=1))])
        features, skips = width, [width]
        for level, multiplier in enumerate(multipliers):
            for _ in range(blocks):
                self.input_blocks.append(Layer(*layer(features, multiplier * width, 2**level)))
                features = multiplier * width
                skips.append(features)
            if level + 1 < len(multipliers):
                half = ResidualBlock(features, features, embedding, dropout, nn.AvgPool2d(2))
                self.input_blocks.append(Layer(half))
                skips.append(features)

        last = ResidualBlock(features, features, embedding, dropout)
        self.middle_block = Layer(
            ResidualBlock(features, features, embedding, dropout), Attention(features, head), last
        )

        self.output_blocks = nn.ModuleList()
        for level, multiplier in reversed(list(enumerate(multipliers))):
            for i in range(blocks + 1):
                parts = layer(features + skips.pop(), multiplier * width, 2**level)
                features = multiplier * width
                if level > 0 and i == blocks:
                    parts.append(ResidualBlock(features, features, embedding, dropout, nn.Upsample(scale_factor=2)))
                self.output_blocks.append(Layer(*parts))

        self.out = nn.Sequential(
            _norm(features), nn.SiLU(), _zero(nn.Conv2d(features, outputs or channels, 3, padding=1))
        )

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        embedding = self.time_embed(sinusoids(t, self.width, self.time_scale)) + self.label_emb(label)
        skips = []
        for layer in self.input_blocks:
            x = layer(x, embedding)
            skips.append(x)
        x = self.middle_block(x, embedding)
        for layer in self.output_blocks:
            x = layer(torch.cat([x, skips.pop()], dim=1), embedding)
        return self.out(x)

    def shard_units(self) -> Iterable[nn.Module]:
        """Layers to be sharded one by one."""
        return [*self.input_blocks, self.middle_block, *self.output_blocks]


class Layer(nn.Sequential):
    """Modules one after the other; residual blocks among them are given the embedding [N, E]."""

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        for module in self:
            x = module(x, embedding) if isinstance(module, ResidualBlock) else module(x)
        return x


class ResidualBlock(nn.Module):
    """Two convolutions; the embedding scales and shifts the second norm; `resize` halves or doubles on the way."""

    def __init__(
        self, inputs: int, outputs: int, embedding: int, dropout: float, resize: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(_norm(inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(embedding, 2 * outputs))
        second = _zero(nn.Conv2d(outputs, outputs, 3, padding=1))
        self.out_layers = nn.Sequential(_norm(outputs), nn.SiLU(), nn.Dropout(dropout), second)
        self.skip_connection = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.resize = resize or nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        norm, activation, convolution = self.in_layers
        h = convolution(self.resize(activation(norm(x))))
        norm, activation, dropout, convolution = self.out_layers
        scale, shift = self.emb_layers(embedding)[:, :, None, None].chunk(2, dim=1)
        h = convolution(dropout(activation(norm(h) * (1 + scale) + shift)))
        return self.skip_connection(self.resize(x)) + h


class Attention(nn.Module):
    """Self-attention over the pixels, added to its input."""

    def __init__(self, features: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm = _norm(features)
        self.qkv = nn.Conv1d(features, 3 * features, 1)  # the queries of all heads, then all keys, then all values
        self.proj_out = _zero(nn.Conv1d(features, features, 1))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x).flatten(2)).unflatten(1, (3, -1, self.head)).transpose(-1, -2)
        h = F.scaled_dot_product_attention(*qkv.unbind(1))
        return x + self.proj_out(h.transpose(-1, -2).flatten(1, 2)).reshape(x.shape)


def load_initial(net: nn.Module, file: str) -> None:
    """Copy the weights of a file into a network: `.safetensors`, or a training checkpoint with its key `model`.

    Where the file has other classes, the embeddings of labels begin anew. Raises UsageError for another network.
    """
    if file.endswith(".safetensors"):
        weights = load_file(file)
    else:
        with torch.serialization.safe_globals([argparse.Namespace]):  # the options of the published training
            weights = torch.load(file, map_location="cpu", weights_only=True)
    weights, present, labels = dict(weights.get("model", weights)), net.state_dict(), "label_emb.weight"
    if labels in present and labels in weights and weights[labels].shape != present[labels].shape:
        print(f"{file} has other classes: the embeddings of labels begin anew", flush=True)
        weights[labels] = present[labels]
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        raise jobkit.UsageError(f"params.init_from: {file}: {shorten(str(error), 300)}") from None


def sinusoids(t: Tensor, features: int, scale: float) -> Tensor:
    """Times [N] as [N, features]: cosines and sines of wavelengths from 2 pi / scale up to 10,000 times that."""
    frequencies = scale * torch.exp(torch.arange(features // 2, device=t.device) * (-2 * math.log(10000) / features))
    angles = t[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _norm(features: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, features // 4), features)


def _zero(module: Convolution) -> Convolution:
    """Start at zero, so that every block starts as the identity and the network's first output is 0."""
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module
