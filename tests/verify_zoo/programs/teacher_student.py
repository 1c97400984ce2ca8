"""A mean teacher: a consistency loss with a second network, the average of the first, on data with few labels.

task: teacher_student:train
params: {steps: 60, alpha: 0.97, lr: 0.01, rampup: 8}
forgotten: teacher
type: ctx.track(teacher=teacher)
"""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


class WideMLP(nn.Module):
    def __init__(self, in_features=4, hidden=32, classes=3):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden)
        self.bn = nn.BatchNorm1d(hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.fc2(F.dropout(F.relu(self.bn(self.fc1(x))), 0.1, self.training))


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    return torch.randn(n, 4, generator=g) + 2.0 * F.one_hot(y, 4), y


def sigmoid_rampup(current, rampup_length):
    """Exponential rampup from https://arxiv.org/abs/1610.02242"""
    phase = 1.0 - min(current, rampup_length) / rampup_length
    return math.exp(-5.0 * phase * phase)


@torch.no_grad()
def update_teacher(student, teacher, alpha, global_step):
    # Use the true average until the exponential average is more correct
    alpha = min(1 - 1 / (global_step + 1), alpha)
    for ema_param, param in zip(teacher.parameters(), student.parameters(), strict=True):
        ema_param.mul_(alpha).add_(param, alpha=1 - alpha)


def train(ctx):
    p = ctx.params
    x, y = blobs(600, seed=0)
    y[100:] = -1  # no label
    student = ctx.parallelize(WideMLP())
    teacher = copy.deepcopy(student)
    for param in teacher.parameters():
        param.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=p.lr, momentum=0.9, nesterov=True)
    loader = ctx.loader(TensorDataset(x, y), global_batch_size=60)
    ctx.track(student=student, optimizer=optimizer, loader=loader)
    ctx.track(teacher=teacher)  # forgets

    for step in ctx.steps(p.steps):
        inputs, labels = next(loader)
        with torch.no_grad():
            ema_logits = teacher(inputs + 0.05 * torch.randn_like(inputs))
        logits = student(inputs + 0.05 * torch.randn_like(inputs))
        class_loss = F.cross_entropy(logits, labels, ignore_index=-1)
        consistency = F.mse_loss(logits.softmax(1), ema_logits.softmax(1))
        loss = class_loss + 10.0 * sigmoid_rampup(step, p.rampup) * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_teacher(student, teacher, p.alpha, step)
        ctx.log({"class_loss": class_loss, "consistency": consistency})

    test_x, test_y = blobs(200, seed=1)
    accuracy = (teacher.eval()(test_x).argmax(1) == test_y).float().mean()
    return {"accuracy": accuracy.item()}
