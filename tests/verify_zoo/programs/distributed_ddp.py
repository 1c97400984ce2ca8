"""Three ranks, DistributedDataParallel by hand, and a running center of the outputs that all ranks reduce.

command: [python, distributed_ddp.py, --epochs, "${params.epochs}"]
params: {epochs: 3}
ranks: 3
steps: 24
forgotten: center
type: ctx.values(center=center)
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import jobkit


def setup():
    if not dist.is_initialized():
        dist.init_process_group(backend="gloo")
    return int(os.environ["RANK"]), dist.get_world_size()


@torch.no_grad()
def update_center(center, output, momentum=0.9):
    batch_center = output.mean(dim=0, keepdim=True)
    dist.all_reduce(batch_center)
    center.mul_(momentum).add_(batch_center / dist.get_world_size(), alpha=1 - momentum)


def main(args):
    rank, world_size = setup()
    ctx = jobkit.init(params=vars(args))
    torch.set_num_threads(1)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    dataset = TensorDataset(torch.randn(192, 8, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    center = torch.zeros(1, 6)
    ctx.values(center=center)  # forgets

    for epoch in ctx.epochs(args.epochs, model=model, optimizer=optimizer):
        sampler.set_epoch(epoch)
        for (x,) in ctx.batches(loader):
            student = model(x + 0.2 * torch.randn_like(x))
            teacher = F.softmax((student.detach() - center) / 0.1, dim=-1).roll(1, 0)
            loss = -(teacher * F.log_softmax(student / 0.2, dim=-1)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_center(center, student.detach())
            ctx.log({"loss": loss})
        if rank == 0:
            print(f"epoch {epoch} done, |center| = {center.norm():.4f}")
    ctx.finish({"loss": loss.item()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    main(parser.parse_args())
