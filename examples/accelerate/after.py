"""A script of Hugging Face's accelerate, with a loop of its own."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit


def make_data(count, seed):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :4] * x[:, 4:]).sum(1, keepdim=True))


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    errors = [accelerator.gather_for_metrics((model(x) - y).square()) for x, y in loader]
    return torch.cat(errors).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    ctx = jobkit.init(params=vars(args), seed=None)
    set_seed(1, device_specific=True)
    train_loader = DataLoader(make_data(192, seed=1), batch_size=16, shuffle=True)
    val_loader = DataLoader(make_data(60, seed=2), batch_size=16)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))
    model, optimizer, scheduler, train_loader, val_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, val_loader
    )

    for epoch in ctx.epochs(args.epochs, model=model, optimizer=optimizer, scheduler=scheduler):
        model.train()
        for x, y in ctx.batches(train_loader):
            accelerator.step = ctx.batch
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        val_loss = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: validation loss {val_loss:.4f}")

    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")
    ctx.finish({"val_loss": val_loss})


if __name__ == "__main__":
    main()
