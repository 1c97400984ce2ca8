"""Images drawn from a finished run of imagenet64, and how good they are.

    python -m jobkit.submit experiments/imagenet64_sample.yaml --local params.run=runs/imagenet64-...

`sample` is an experiment like `train`, but for steps: what it has done is on disk as soon as it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import Dataset

import jobkit
from experiments.imagenet64.data import Part, is_image, open_images, read_png, split, write_png
from experiments.imagenet64.fid import BATCH, Fid, Inception
from experiments.imagenet64.scores import pixel_frechet_distance, recognised
from experiments.imagenet64.train import draws, errors, method_of, tiled
from jobkit.train.exported import load_weights, weights_digest


def sample(ctx: jobkit.Context, network: Callable[[str], nn.Module] = Inception) -> dict[str, float | None]:
    """Draw `params.samples` images into samples/<class>/<number>.png, all classes equally often, and score them.

    An image that is there already, from an attempt that was interrupted, is not drawn again, unless the run has other
    weights now. `network` is what FID's features are of, made of `params.inception`.
    """
    p = ctx.params
    trained = OmegaConf.load(Path(p.run) / "config.yaml").params
    images = open_images(Path(trained.data), trained.res, trained.channels)
    training, held_out = split(images, trained.held_out, flip=False)
    fid = Fid(ctx, network, p.inception, training, Path(trained.data)) if p.fid else None

    method = method_of(trained)
    net = method.network(trained.channels, len(images.classes), trained.unet).to(ctx.device).eval()
    load_weights(net, p.run)
    made_of = weights_digest(p.run)
    labels = [number % len(images.classes) for number in range(p.samples)]
    files = [
        ctx.run_dir / "samples" / images.classes[label] / f"{number:06d}.png" for number, label in enumerate(labels)
    ]
    drawn_of = draws(ctx, method, net, (trained.channels, trained.res, trained.res))

    def draw(label: Tensor, ids: Tensor) -> None:
        here = [files[number] for number in ids.tolist()]
        # All or none: dopri5 chooses its steps for a batch as a whole.
        if not all(is_image(one, trained.res, trained.channels, made_of) for one in here):
            for one, image in zip(here, drawn_of(label, ids).cpu(), strict=True):
                write_png(one, image, made_of)

    ctx.map(draw, labels, batch_size=p.batch)
    if ctx.is_main:
        print(f"samples: {ctx.run_dir / 'samples'}", flush=True)
    scores: dict[str, float | None] = {}
    if len(held_out):
        scores["validation_loss"] = ctx.evaluate(errors(method, net, ctx.autocast), held_out, batch_size=p.batch)
    drawn = Drawn(files, trained.res, trained.channels)
    if fid is not None:
        scores["fid"] = fid.of(lambda batch, ids: batch, drawn, BATCH)
    if ctx.is_main:
        if fid is not None:
            print(
                f"FID of {len(drawn):,} samples against {len(training):,} training images: {scores['fid']}", flush=True
            )
        samples = torch.stack([drawn[number] for number in range(len(drawn))])
        ctx.log_image("samples", tiled(samples[:100], 10))
        if trained.digits:
            scores["recognised"] = recognised(samples, torch.tensor(labels))
        real = _first(held_out if len(held_out) else training, len(held_out) or len(drawn))
        scores["pixel_frechet_distance"] = pixel_frechet_distance(samples, real)
        if len(held_out):
            known = _first(training, p.samples)
            scores["pixel_frechet_distance_of_training_images"] = pixel_frechet_distance(known, real)
    return scores


class Drawn(Dataset):
    """The images that were drawn, uint8 [C, R, R]."""

    def __init__(self, files: list[Path], res: int, channels: int) -> None:
        self.files, self.res, self.channels = files, res, channels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Tensor:
        return read_png(self.files[i], self.res, self.channels)


def _first(images: Part, n: int) -> Tensor:
    """Up to n of the images, uint8 [n, C, R, R]."""
    return torch.stack([images[i][0] for i in range(min(n, len(images)))])
