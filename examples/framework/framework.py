"""A framework of one's own, which knows nothing of jobkit."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    """Trains a model on batches that `make_batch(step, rank)` makes; callbacks are told of each step."""

    def __init__(self, model, make_batch, steps, lr):
        dist.init_process_group("gloo")
        self.model, self.make_batch, self.steps = DistributedDataParallel(model), make_batch, steps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.callbacks = []
        self.step = 0

    def state_dict(self):
        return {"step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def tell(self, event, *details):
        for callback in self.callbacks:
            getattr(callback, event, lambda *_: None)(*details)

    def fit(self):
        self.tell("on_begin")
        while self.step < self.steps:
            x, y = self.make_batch(self.step, dist.get_rank())
            loss = nn.functional.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            self.tell("on_step_end", loss)
        self.tell("on_end")

    def save(self, file):
        if dist.get_rank() == 0:
            torch.save(self.model.module.state_dict(), file)
