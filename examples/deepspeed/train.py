"""A loop of DeepSpeed's engine, with ZeRO's stage 1."""

import deepspeed
import torch
from torch import nn

import jobkit

CONFIG = {"train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}
CONFIG["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}


def train(ctx):
    steps = ctx.params.steps
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    if ctx.checkpoint is not None:
        engine.load_checkpoint(ctx.checkpoint)
    for step in range(ctx.step, steps + 1):
        ctx.boundary(step, engine.save_checkpoint, total=steps)
        if step == steps:
            break
        x = torch.randn(16, 8, device=engine.device)
        loss = nn.functional.mse_loss(engine(x), (x[:, :4] * x[:, 4:]).sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        ctx.log({"train/loss": loss})
    return {"loss": loss.item()}


if __name__ == "__main__":
    ctx = jobkit.init(params={"steps": 200})
    ctx.finish(train(ctx))
