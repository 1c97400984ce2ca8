"""A script of DeepSpeed's engine, with ZeRO's stage 1."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def make_batch(step, rank):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x + 0.1 * torch.randn(16, 8), (x[:, :4] * x[:, 4:]).sum(1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--local_rank", type=int, default=-1)  # the deepspeed launcher adds it
    args = parser.parse_args()

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

    for step in range(args.steps):
        x, y = make_batch(step, dist.get_rank())
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    if dist.get_rank() == 0:
        torch.save(engine.module.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
