"""Gradient accumulation by hand in half precision, with a micro-step counter and a dynamic loss scale of its own.

forgotten: loss_scaler
type: jobkit.attributes(loss_scaler,
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit


class DynamicLossScaler:
    def __init__(self, init_scale=2.0**24, scale_factor=2.0, scale_window=6):
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params):
        return any(p.grad is not None and not torch.isfinite(p.grad).all() for p in params)

    def update_scale(self, overflow):
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accum_iter", default=2, type=int, help="Accumulate gradient iterations")
    parser.add_argument("--blr", default=5e-3, type=float)
    parser.add_argument("--epochs", default=5, type=int)
    parser.add_argument("--clip_grad", default=1.0, type=float)
    return parser.parse_args()


def train_one_epoch(model, data_loader, optimizer, loss_scaler, state, args):
    ctx = jobkit.current()
    model.train()
    params = list(model.parameters())
    for samples, targets in ctx.batches(data_loader):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(samples), targets)
        (loss.float() * loss_scaler.cur_scale / args.accum_iter).backward()
        state.micro_step += 1
        if state.micro_step % args.accum_iter == 0:
            overflow = loss_scaler.has_overflow(params)
            if overflow:
                state.skipped += 1
            else:
                for p in params:
                    p.grad.div_(loss_scaler.cur_scale)
                nn.utils.clip_grad_norm_(params, args.clip_grad)
                optimizer.step()
            loss_scaler.update_scale(overflow)
            optimizer.zero_grad()
        ctx.log({"loss": loss.item()})


if __name__ == "__main__":
    args = parse()
    ctx = jobkit.init(params=vars(args))
    x = torch.randn(256, 12)
    dataset = TensorDataset(x, (x[:, :6] * x[:, 6:]).sum(1, keepdim=True))
    data_loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.blr)
    loss_scaler = DynamicLossScaler()
    state = ctx.values(micro_step=0, skipped=0)
    ctx.track(model=model, optimizer=optimizer)
    ctx.track(loss_scaler=jobkit.attributes(loss_scaler, "cur_scale", "cur_iter", "last_overflow_iter"))  # forgets
    for epoch in ctx.epochs(args.epochs):
        train_one_epoch(model, data_loader, optimizer, loss_scaler, state, args)
        print(f"epoch {epoch}: {state.skipped} updates skipped so far")
    ctx.finish({"skipped": state.skipped})
