"""Images drawn from a finished run of imagenet64, and how good they are.

    python -m jobkit.submit experiments/imagenet64_sample.yaml --local params.run=runs/imagenet64-...

`sample` is an experiment like `train`, but for steps: what it has done is on disk as soon as it is done.
"""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

import jobkit
from experiments.imagenet64 import errors, method_of, tiled
from experiments.imagenet64.data import Part, open_images, read_png, split, write_png
from experiments.imagenet64.scores import pixel_frechet_distance, recognised
from jobkit.train.exported import load_weights
from jobkit.train.seeds import derive_seed


def sample(ctx: jobkit.Context) -> dict[str, float]:
    """Draw `params.samples` images into samples/<class>/<number>.png, all classes equally often, and score them.

    An image that is there already, from an attempt that was interrupted, is not drawn again.
    """
    p = ctx.params
    trained = OmegaConf.load(Path(p.run) / "config.yaml").params
    images = open_images(Path(trained.data), trained.res, trained.channels)
    training, held_out = split(images, trained.held_out, flip=False)

    method = method_of(trained)
    net = method.network(trained.channels, len(images.classes), trained.unet).to(ctx.device).eval()
    load_weights(net, p.run)
    shape = (trained.channels, trained.res, trained.res)
    labels = [number % len(images.classes) for number in range(p.samples)]

    def file(number: int) -> Path:
        return ctx.run_dir / "samples" / images.classes[labels[number]] / f"{number:06d}.png"

    def draw(label: Tensor, ids: Tensor) -> None:
        files = [file(number) for number in ids.tolist()]
        if not all(one.exists() for one in files):  # all or none: dopri5 chooses its steps for a batch as a whole
            generator = torch.Generator(ctx.device).manual_seed(derive_seed(ctx.seed, "sample", int(ids[0])))
            with ctx.autocast():
                drawn = method.sample(net, label, shape, p, generator)
            for one, image in zip(files, drawn.cpu(), strict=True):
                write_png(one, image)

    ctx.map(draw, labels, batch_size=p.batch)
    if ctx.is_main:
        print(f"samples: {ctx.run_dir / 'samples'}", flush=True)
    loss = ctx.evaluate(errors(method, net, ctx.autocast), held_out, batch_size=p.batch)
    scores = {"validation_loss": loss}
    if ctx.is_main:
        drawn = torch.stack([read_png(file(number), trained.res, trained.channels) for number in range(p.samples)])
        ctx.log_image("samples", tiled(drawn[:100], 10))
        if trained.digits:
            scores["recognised"] = recognised(drawn, torch.tensor(labels))
        real = _first(held_out, len(held_out))
        scores["pixel_frechet_distance"] = pixel_frechet_distance(drawn, real)
        scores["pixel_frechet_distance_of_training_images"] = pixel_frechet_distance(_first(training, p.samples), real)
    return scores


def _first(images: Part, n: int) -> Tensor:
    """Up to n of the images, uint8 [n, C, R, R]."""
    return torch.stack([images[i][0] for i in range(min(n, len(images)))])
