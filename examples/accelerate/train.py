"""A small regression with a loop of one's own, under Hugging Face's accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit

ACCUMULATE = 2


def train(ctx: jobkit.Context) -> dict[str, float]:
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)  # the order is a function of the epoch
    cpu = ctx.device.type == "cpu"
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=ACCUMULATE, dataloader_config=order)
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, (x[:, :4] * x[:, 4:]).sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    if ctx.checkpoint is not None:
        accelerator.load_state(str(ctx.checkpoint))
    updates = len(loader) // ACCUMULATE
    step, total = ctx.step, ctx.params.epochs * updates
    for epoch in range(step // updates, ctx.params.epochs):
        loader.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(loader, step % updates * ACCUMULATE):
            if accelerator.sync_gradients:  # between two updates: within one, gradients would be lost
                ctx.boundary(step, accelerator.save_state, total=total)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ctx.log({"train/loss": loss})
                step += 1
    ctx.boundary(step, accelerator.save_state, total=total)
    accelerator.end_training()
    return {"loss": loss.item()}


if __name__ == "__main__":  # python train.py, torchrun train.py, or accelerate launch train.py
    ctx = jobkit.init(params={"epochs": 20})
    ctx.finish(train(ctx))
