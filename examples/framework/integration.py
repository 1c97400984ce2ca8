"""Brings the framework's training under jobkit: a callback, as any framework has them."""

import torch

import jobkit


class JobkitCallback:
    def __init__(self, trainer, params):
        self.trainer, self.ctx = trainer, jobkit.init(params=params, seed=None)
        if self.ctx.checkpoint is not None:
            trainer.load_state_dict(torch.load(self.ctx.checkpoint / "trainer.pt"))

    def on_begin(self):
        self.ctx.boundary(self.trainer.step, self.save, total=self.trainer.steps)

    def on_step_end(self, loss):
        self.ctx.log({"train/loss": loss})
        self.ctx.boundary(self.trainer.step, self.save, total=self.trainer.steps)

    def on_end(self):
        self.ctx.finish()

    def save(self, folder):
        if self.ctx.is_main:
            torch.save(self.trainer.state_dict(), folder / "trainer.pt")
