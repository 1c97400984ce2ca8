"""Images drawn from a finished run of imagenet64, and how good they are.

python -m jobkit.submit experiments/imagenet64_sample.yaml --local params.run=runs/imagenet64-...

run/final/ --jobkit.open_run--> network --ctx.map over all ranks--> samples/batch_*.pt --> samples.npz, a grid, scores
"""

from __future__ import annotations

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

import jobkit
from experiments.imagenet64.data import write_png
from experiments.imagenet64.digits import recognised
from experiments.imagenet64.fid import Fid
from experiments.imagenet64.train import draw_of, errors_of, method_of, open_data, tiled


def sample(ctx: jobkit.Context) -> dict[str, float]:
    """Draw `params.samples` images of `params.labels` in turn, of all classes where it is empty, and score them."""
    p, run = ctx.params, jobkit.open_run(ctx.params.run)
    trained = OmegaConf.create(run.params)
    training, held_out = open_data(ctx, trained)
    fid = Fid(ctx, p.inception, training) if p.fid else None
    method = method_of(trained)
    net = method.network(trained.channels, trained.classes, trained.unet).to(ctx.device).eval()
    net.load_state_dict(run.weights())
    draw = draw_of(ctx, method, net, (trained.channels, trained.res, trained.res))

    def draw_and_look(label: Tensor, ids: Tensor) -> dict[str, Tensor]:
        images = draw(label, ids)
        return {"image": images, "features": fid.features(images) if fid else label}

    classes = list(p.labels) or list(range(trained.classes))
    if not set(classes) <= set(range(trained.classes)):
        raise jobkit.UsageError(f"params.labels: found {classes}, expected numbers from 0 to {trained.classes - 1}")
    labels = [classes[number % len(classes)] for number in range(p.samples)]
    ctx.map(draw_and_look, labels, batch_size=p.batch, to=ctx.run_dir / "samples")
    scores: dict[str, float] = {}
    if len(held_out):
        scores["validation/loss"] = ctx.evaluate(errors_of(ctx, method, net), held_out, batch_size=p.batch)
    if ctx.is_main:
        batches = [torch.load(file) for file in sorted(ctx.run_dir.glob("samples/*.pt"))]
        images, features = (torch.cat([batch[name] for batch in batches]) for name in ("image", "features"))
        np.savez(ctx.run_dir / "samples.npz", images.permute(0, 2, 3, 1).numpy(), np.array(labels))
        grid = tiled(images[:100], min(10, len(images)))
        ctx.log_image("samples", grid)
        write_png(ctx.run_dir / "samples.png", grid)
        if fid:
            scores["fid"] = fid.of(features)
        if trained.digits:
            scores["recognised"] = recognised(images, torch.tensor(labels))
    return scores
