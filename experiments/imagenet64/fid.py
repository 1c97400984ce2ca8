"""FID: the distance of drawn images to all images that a model was trained on, as an Inception network sees them.

It is the Frechet distance of Gaussians fitted to the features of both (Heusel et al. 2017, arXiv:1706.08500). The
network is torch-fidelity's, which has the original weights and enlarges images as the original does. All ranks work
on both, through ctx.map; the Gaussian of the training images is kept beside their packed copy:

    train_64/box.uint8/<fingerprint>/fid_<number of images>_<hash of the weights>.npz
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import jobkit
from experiments.imagenet64.data import Part

BATCH = 64
"""Images that go through the network at once: enlarged to 299 x 299 they take about 3 GB of a GPU."""

BLOCKS = 64
"""Parts of the training images, each summed up by one rank: a sum is 34 MB, and rank 0 holds all of them."""

WEIGHTS = "github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"


def inception(weights: str) -> nn.Module:
    """torch-fidelity's Inception v3 with the weights of a file. Raises UsageError without the file or the package."""
    if not weights or not Path(weights).is_file():
        raise jobkit.UsageError(
            f"params.inception: FID needs its network's weights, and there is no file {weights!r}: download "
            f"https://{WEIGHTS} and add params.inception=PATH, or leave FID out (params.fid_every=0, params.fid=false)"
        )
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision of another torch
        raise jobkit.UsageError(f"FID: {error}: pip install torch-fidelity and the torchvision of this torch") from None
    return FeatureExtractorInceptionV3("inception", ["2048"], weights)


class Fid:
    """FID against the training images. All ranks make it and call it, before or between steps."""

    def __init__(self, ctx: jobkit.Context, weights: str, training: Part) -> None:
        self.network = inception(weights).to(ctx.device)
        digest = hashlib.sha256(Path(weights).read_bytes()).hexdigest()[:16]
        file = training.images.folder / f"fid_{len(training)}_{digest}.npz"
        if not ctx.map(lambda *_: torch.tensor([file.exists()]), [0], to="all"):  # one rank looks for all
            blocks = np.array_split(np.sort(training.ids), min(BLOCKS, len(training)))

            def sums(number: Tensor, ids: Tensor) -> Tensor:
                images = torch.stack([training.images[int(i)][0] for i in blocks[int(number)]])
                return sums_of(self.features(images.to(ctx.device)))[None]

            total = ctx.map(sums, range(len(blocks)))
            if ctx.is_main:
                mean, covariance = gaussian(total.sum(0))
                part = file.with_name(f".{file.stem}.tmp.npz")
                np.savez(part, mean=mean, covariance=covariance)
                part.replace(file)
        self.real = {name: torch.from_numpy(value) for name, value in np.load(file).items()} if ctx.is_main else {}

    def features(self, images: Tensor) -> Tensor:
        """The network's features, float32 [N, 2048], of uint8 images [N, 1 or 3, R, R]."""
        return torch.cat([self.network(part.expand(-1, 3, -1, -1))[0].float() for part in images.split(BATCH)])

    def of(self, features: Tensor) -> float:
        """FID of images with these features [N, 2048]. On rank 0."""
        return frechet_distance(*gaussian(sums_of(features)), self.real["mean"], self.real["covariance"])


def sums_of(features: Tensor) -> Tensor:
    """Of features [N, F] and a 1 before each: the sum of outer products, float64 [1 + F, 1 + F], on the CPU.

    It holds their number, their sum and their second moments, so that sums of parts of the images add up.
    """
    extended = nn.functional.pad(features.cpu().double(), (1, 0), value=1)
    return extended.T @ extended


def gaussian(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [F] and covariance [F, F], from the result of `sums_of` for two images or more."""
    count, mean = sums[0, 0], sums[0, 1:] / sums[0, 0]
    return mean, (sums[1:, 1:] - count * mean.outer(mean)) / (count - 1)


def frechet_distance(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float:
    """Distance of two Gaussians, means [F] and covariances [F, F] in float64 (Dowson and Landau 1982).

    It is |m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2)), where C1 C2 has the eigenvalues of C1^(1/2) C2 C1^(1/2).
    """
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    roots = torch.linalg.eigvalsh(root @ other_covariance @ root).clamp(min=0).sqrt().sum()
    return float((mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * roots)
