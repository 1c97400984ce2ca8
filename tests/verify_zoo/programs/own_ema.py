"""A script with an EMA class of its own: a dict of shadow weights by name, for the evaluations.

forgotten: ema.shadow
type: jobkit.attributes(ema, "shadow")
"""

import argparse

import torch
from torch import nn

import jobkit


class EMA:
    """Exponential moving average of the parameters. Call update() after each optimizer step."""

    def __init__(self, model, decay):
        self.model = model
        self.decay = decay
        self.shadow = {}
        self.backup = {}

    def register(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()

    def update(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = ((1.0 - self.decay) * param.data + self.decay * self.shadow[name]).clone()

    def apply_shadow(self):
        for name, param in self.model.named_parameters():
            self.backup[name] = param.data
            param.data = self.shadow[name]

    def restore(self):
        for name, param in self.model.named_parameters():
            param.data = self.backup[name]
        self.backup = {}


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ema_decay", type=float, default=0.95)
    opt = parser.parse_args()
    ctx = jobkit.init(params=vars(opt))

    x = torch.rand(400, 2) * 2 - 1
    y = (x[:, :1] * 3).sin() * x[:, 1:]
    model = nn.Sequential(nn.Linear(2, 24), nn.SiLU(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    ema = EMA(model, opt.ema_decay)
    ema.register()
    ctx.track(model=model, optimizer=optimizer)
    ctx.track(ema=jobkit.attributes(ema, "shadow"))  # forgets

    def test():
        ema.apply_shadow()
        mse = evaluate(model, x, y)
        ema.restore()
        print(f"[{ctx.step}] ema mse {mse:.4f}")

    for _ in ctx.steps(opt.steps, every={test: 15}):
        model.train()
        index = torch.randint(len(x), (32,))
        loss = nn.functional.mse_loss(model(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update()
        ctx.log({"loss": loss})

    ctx.finish()


if __name__ == "__main__":
    main()
