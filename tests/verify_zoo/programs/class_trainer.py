"""A Trainer class that distills a network into itself, with a running centre of the targets, as DINO has.

task: class_trainer:main
params: {epochs: 5, lr: 0.003, batch_size: 32}
forgotten: trainer.center
type: ctx.track(trainer=jobkit.attributes(trainer, "center"))
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import jobkit


class Trainer:
    def __init__(self, model, optimizer, train_loader, out_dim, temp=0.1, teacher_temp=0.05, momentum=0.9):
        self.model = model
        self.optimizer = optimizer
        self.train_loader = train_loader
        self.temp = temp
        self.teacher_temp = teacher_temp
        self.momentum = momentum
        self.center = torch.zeros(1, out_dim)  # without it all outputs collapse to one

    def loss(self, student_out, teacher_out):
        targets = F.softmax((teacher_out - self.center) / self.teacher_temp, dim=-1).detach()
        self.update_center(teacher_out)
        return -(targets * F.log_softmax(student_out / self.temp, dim=-1)).sum(-1).mean()

    @torch.no_grad()
    def update_center(self, teacher_out):
        batch_center = teacher_out.mean(dim=0, keepdim=True)
        self.center = self.center * self.momentum + batch_center * (1 - self.momentum)

    def train_step(self, images):
        view1, view2 = (images + 0.1 * torch.randn_like(images) for _ in range(2))
        loss = self.loss(self.model(view1), self.model(view2))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 3.0)
        self.optimizer.step()
        return loss

    def train(self, ctx, epochs):
        for _ in ctx.epochs(epochs):
            self.model.train()
            for (images,) in ctx.batches(self.train_loader):
                loss = self.train_step(images)
                ctx.log({"loss": loss, "center_norm": self.center.norm()})
        return loss.item()


def main(ctx):
    p = ctx.params
    data = torch.randn(320, 16, generator=torch.Generator().manual_seed(0)) + torch.arange(4).repeat(80)[:, None]
    loader = DataLoader(torch.utils.data.TensorDataset(data), batch_size=p.batch_size, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=p.lr)
    trainer = Trainer(model, optimizer, loader, out_dim=8)
    ctx.track(model=model, optimizer=optimizer)
    ctx.track(trainer=jobkit.attributes(trainer, "center"))  # forgets
    return {"loss": trainer.train(ctx, p.epochs)}
