"""Discrete flow matching (Gat et al. 2024, arXiv:2407.15595): paths from masked pixels to images, one jump a pixel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.imagenet64.flow import guided
from experiments.imagenet64.unet import UNet


class DiscreteFlowMatching:
    """Images as tokens 0 to levels - 1, one a pixel and channel; the network learns the token behind each mask.

    The mask is token number `levels`. On its path each token is masked until a time of its own, uniform in [0, 1]: at
    time t a fraction t of them is visible. The methods are those of flow.FlowMatching.
    """

    def __init__(self, levels: int) -> None:
        self.levels = levels

    def network(self, channels: int, classes: int, unet: DictConfig) -> TokenUNet:
        """A network whose forward takes tokens, t [N] and labels [N]."""
        return TokenUNet(channels, classes, self.levels, unet)

    def noise(
        self, shape: Sequence[int], generator: torch.Generator | None = None, device: torch.device | None = None
    ) -> Tensor:
        """The times at which tokens become visible."""
        return torch.rand(shape, generator=generator, device=device)

    def path(self, image: Tensor, visible_from: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the paths at times t [N], and the tokens of the images, uint8 [N, C, R, R], as the target."""
        tokens = (image.float() * ((self.levels - 1) / 255)).round().long()
        return tokens.masked_fill(visible_from >= t[:, None, None, None], self.levels), tokens

    def error(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Mean cross-entropy [N] of the tokens, in nats."""
        return F.cross_entropy(logits.float(), tokens, reduction="none").flatten(1).mean(1)

    @torch.no_grad()
    def sample(self, net: nn.Module, label: Tensor, shape: Sequence[int], p: DictConfig) -> Tensor:
        """Images, uint8 [N, *shape], of labels [N]; `p` has guidance and solver_steps.

        In a step of h from t on, a masked token is replaced with probability h / (1 - t) by a draw from the network's
        prediction: the paper's Euler step for a masked source and kappa = t.
        """
        logits = guided(net, label, p.guidance)
        tokens = torch.full((len(label), *shape), self.levels, device=label.device)
        for i in range(p.solver_steps):
            probabilities = logits(tokens, torch.full(label.shape, i / p.solver_steps, device=label.device)).softmax(1)
            # The largest of p / e, with e exponentially distributed, is a draw from p.
            drawn = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(1)
            jumps = torch.rand(tokens.shape, device=label.device) < 1 / (p.solver_steps - i)
            tokens = torch.where(jumps & (tokens == self.levels), drawn, tokens)
        return (tokens * (255 / (self.levels - 1))).round().to(torch.uint8)


class TokenUNet(nn.Module):
    """Logits [N, levels, C, R, R] of the tokens behind the masks, from tokens [N, C, R, R], times and labels [N]."""

    def __init__(self, channels: int, classes: int, levels: int, unet: DictConfig) -> None:
        super().__init__()
        self.null_label, self.levels = classes, levels
        self.embed = nn.Embedding(levels + 1, unet["width"])
        self.unet = UNet(channels * unet["width"], classes, outputs=channels * levels, **unet)

    def forward(self, tokens: Tensor, t: Tensor, label: Tensor) -> Tensor:
        features = self.embed(tokens).movedim(-1, 2).flatten(1, 2)
        return self.unet(features, t, label).unflatten(1, (-1, self.levels)).transpose(1, 2)

    def shard_units(self) -> Iterable[nn.Module]:
        """Blocks to be sharded one by one."""
        return self.unet.shard_units()
