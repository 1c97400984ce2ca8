"""A plain loop with an average of the weights that only an evaluation reads.

task: ema:train
params: {steps: 100}
forgotten: ema
type: ctx.track(ema=ema)
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset


def train(ctx):
    x = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0)) * 6 - 3
    model = ctx.parallelize(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = ctx.loader(TensorDataset(x, x.sin()), global_batch_size=32)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    ctx.track(ema=ema)  # forgets
    for _ in ctx.steps(ctx.params.steps):
        loss = ctx.backward(model, next(loader), nn.functional.mse_loss)
        ctx.update(optimizer)
        ema.update_parameters(model)
        ctx.log({"train/loss": loss})
    with torch.no_grad():
        print("error of the average", (ema(x) - x.sin()).square().mean().item())
    return {"loss": loss.item()}
