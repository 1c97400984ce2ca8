"""A loop as torchtitan's: fully_shard (FSDP2), and checkpoints by torch.distributed.checkpoint."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import jobkit


class States:
    """The model and the optimizer, as torch.distributed.checkpoint takes them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))

    def load_state_dict(self, state):
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)


def train(ctx):
    mesh, steps = init_device_mesh("cpu", (dist.get_world_size(),)), ctx.params.steps
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    states = {"app": States(model, optimizer)}
    if ctx.checkpoint is not None:
        dcp.load(states, checkpoint_id=ctx.checkpoint)
    for step in range(ctx.step, steps + 1):
        ctx.boundary(step, lambda folder: dcp.save(states, checkpoint_id=folder), total=steps)
        if step == steps:
            break
        x = torch.randn(16, 8)
        loss = nn.functional.mse_loss(model(x), (x[:, :4] * x[:, 4:]).sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ctx.log({"train/loss": loss})
    return {"loss": loss.item(), "norm": sum(float(p.full_tensor().norm()) for p in model.parameters())}


if __name__ == "__main__":
    ctx = jobkit.init(params={"steps": 200})
    ctx.finish(train(ctx))
