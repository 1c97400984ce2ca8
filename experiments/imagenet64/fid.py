"""FID: how far drawn images are from all images that a model was trained on, as an Inception network sees them.

The Frechet distance of the Gaussians fitted to the features of both (Heusel et al. 2017, arXiv:1706.08500). The
features are those of torch-fidelity's network, which has the original one's weights and enlarges images as that did.

All ranks work on both, through ctx.map. Those of the training images are kept in a file beside the data:

    train_blurred_64/box.fid/<hash of the images, the network's weights and how many are trained on>.npz
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import jobkit
from experiments.imagenet64.data import Part
from experiments.imagenet64.scores import frechet_distance
from jobkit.errors import UsageError
from jobkit.run.files import read_fresh, write_atomic

BATCH = 64
"""Images that go through the network at once: enlarged to 299 x 299 they take about 3 GB of a GPU."""

BLOCKS = 64
"""Parts of the training images, each summed up by one rank: a sum is 34 MB, and rank 0 has all of them, twice."""


class Inception(nn.Module):
    """Features [N, 2048] of uint8 images [N, 1 or 3, R, R] by torch-fidelity's Inception v3.

    `weights` is a file in its format; empty: torch-fidelity downloads its own, or takes what was downloaded before.
    Raises UsageError, with what to do, where the package or the weights cannot be had.
    """

    def __init__(self, weights: str) -> None:
        super().__init__()
        try:
            from torch_fidelity import feature_extractor_inceptionv3 as fidelity  # here, as training needs none of it
        except (ImportError, RuntimeError) as error:  # the latter: a torchvision that is of another torch
            raise UsageError(
                f"FID needs the package torch-fidelity, which cannot be imported ({error}): pip install torch-fidelity "
                "(and the torchvision of this torch), or leave FID out: params.fid_every=0, params.fid=false"
            ) from None
        try:
            self.network = fidelity.FeatureExtractorInceptionV3(
                "inception", ["2048"], str(Path(weights)) if weights else None
            )
        except Exception as error:  # no network, no such file, no or other weights in it
            address = fidelity.URL_INCEPTION_V3
            what = f"params.inception: {weights}" if weights else "the weights of FID's network cannot be downloaded"
            raise UsageError(
                f"{what}: {str(error).splitlines()[0]}; save {address} somewhere, and give its path as "
                "params.inception=PATH, or as the variable INCEPTION"
            ) from None

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(images.expand(-1, 3, -1, -1))[0]
        return features


@dataclass(frozen=True)
class Gaussian:
    """Mean [F] and covariance [F, F] of `count` features, float64, on the CPU."""

    mean: Tensor
    covariance: Tensor
    count: int

    @classmethod
    def of(cls, sums: Tensor) -> Gaussian:
        """From what `sums_of` returns, added up. Raises UsageError for fewer than two images."""
        count = int(sums[0, 0])
        if count < 2:
            raise UsageError(f"FID needs two images or more, found {count}")
        mean = sums[0, 1:] / count
        return cls(mean, (sums[1:, 1:] - count * mean.outer(mean)) / (count - 1), count)

    def distance(self, other: Gaussian) -> float:
        """The Frechet distance: FID, where features are Inception's."""
        return frechet_distance(self.mean, self.covariance, other.mean, other.covariance)


class Fid:
    """FID of drawn images against the training images, the same on any number of ranks but for rounding.

    Made on all ranks together, before the loop. `network` makes a module of a text that says where its weights are;
    `data` is the folder of the training images.
    """

    def __init__(
        self, ctx: jobkit.Context, network: Callable[[str], nn.Module], weights: str, training: Part, data: Path
    ) -> None:
        self.ctx = ctx
        if ctx.local_rank:
            ctx.barrier()
        self.network = network(weights).to(ctx.device).eval().requires_grad_(False)
        if not ctx.local_rank:  # it has downloaded what the others of its node then find
            ctx.barrier()
        self.real = self._of_training(training, data)

    def of(
        self, function: Callable[[Any, Tensor], Tensor], items: Sized | int, batch_size: int, **options: Any
    ) -> float | None:
        """FID of the images, uint8 [n, C, R, R], that `function(batch, ids)` returns for `items`: what ctx.map takes.

        All ranks together; on rank 0, and None on the others. Each image is drawn once, also over an interruption.
        """
        network = self.network

        def features(batch: Any, ids: Tensor) -> Tensor:
            return features_of(function(batch, ids), network)

        found = self.ctx.map(features, items, batch_size=batch_size, to="main", **options)
        return Gaussian.of(sums_of(found, self.ctx.device)).distance(self.real) if self.real is not None else None

    def _of_training(self, training: Part, data: Path) -> Gaussian | None:
        """The training images' features, computed where no run has done it yet; on rank 0, and None on the others."""
        ctx, network, images = self.ctx, self.network, training.images
        hashed = repr((images.fingerprint, len(training), hash_of(network)))
        name = f"{hashlib.sha256(hashed.encode()).hexdigest()[:16]}.npz"
        places = [data.with_name(f"{data.name}.fid") / name, ctx.run_dir / "fid" / name]

        def find(_: Tensor, ids: Tensor) -> list[str]:
            return [next((str(place) for place in places if is_whole(place)), "")]

        (found,) = ctx.map(find, 1)  # by one rank for all: another run may write the file just now
        if found:
            return read(Path(found)) if ctx.is_main else None
        blocks = np.array_split(np.sort(training.ids), min(BLOCKS, len(training)))
        if ctx.is_main:
            print(f"FID: features of {len(training):,} training images, once, into {places[0]}", flush=True)

        def sums(numbers: Tensor, ids: Tensor) -> Tensor:
            (block,) = (blocks[number] for number in numbers.tolist())
            total: Any = 0
            for start in range(0, len(block), BATCH):
                some = torch.stack([images[int(number)][0] for number in block[start : start + BATCH]])
                total = total + sums_of(features_of(some.to(ctx.device), network), ctx.device)
                ctx.heartbeat()
            return total[None]

        added = ctx.map(sums, len(blocks), to="main")
        if not ctx.is_main:
            return None
        real = Gaussian.of(added.sum(0))
        try:
            write(places[0], real)
        except OSError as error:
            print(f"FID: {places[0].parent} cannot be written ({error}): kept in the run directory", flush=True)
            write(places[1], real)
        return real


def features_of(images: Tensor, network: nn.Module) -> Tensor:
    """The network's features, float32 [N, F], of uint8 images [N, C, R, R]."""
    return torch.cat([network(some).float() for some in images.split(BATCH)])


def sums_of(features: Tensor, device: torch.device) -> Tensor:
    """Of features [N, F] and a 1 before each: the sum of outer products, float64 [1 + F, 1 + F], on the CPU.

    In it are their count, their sum and their second moments.
    """
    device = device if device.type == "cuda" else torch.device("cpu")  # others may have no float64
    total: Any = 0
    for some in features.split(4096):
        extended = nn.functional.pad(some.to(device, torch.float64), (1, 0), value=1)
        total = total + extended.T @ extended
    return total.cpu()  # type: ignore[no-any-return]


def hash_of(network: nn.Module) -> str:
    """16 hex digits of a network's kind and weights."""
    found = hashlib.sha256(type(network).__qualname__.encode())
    for name, value in network.state_dict().items():
        found.update(name.encode())
        found.update(value.cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def write(file: Path, gaussian: Gaussian) -> None:
    """Write the file, whole or not at all."""
    content = io.BytesIO()
    np.savez(content, mean=gaussian.mean, covariance=gaussian.covariance, count=gaussian.count)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, content.getvalue())


def read(file: Path) -> Gaussian:
    """What `write` wrote."""
    found = np.load(io.BytesIO(read_fresh(file)))
    mean, covariance = torch.from_numpy(found["mean"]), torch.from_numpy(found["covariance"])
    return Gaussian(mean, covariance, int(found["count"]))


def is_whole(file: Path) -> bool:
    """Whether there is a file that `write` wrote, and it is not damaged."""
    try:
        read(file)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except Exception as error:  # whatever its reader finds wrong with it
        print(f"FID: {file} cannot be read ({error or type(error).__name__}): it is made again", flush=True)
        return False
    return True
