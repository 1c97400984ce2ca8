"""A script that is all globals: a step counter, norms of gradients, losses of the last steps, times.

command: [python, sound_globals.py, "${params.steps}"]
params: {steps: 26}
steps: 26
"""

import sys
import time
from collections import deque

import torch
import torch.nn as nn

import jobkit

MAX_STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 26
LR = 2e-3
LOG_EVERY = 6

STEP = 0
GRAD_NORMS = []
LAST_LOSSES = deque(maxlen=5)
SMOOTH_NORM = None
LOWEST = float("inf")
T0 = time.time()
TIMES = {"data": 0.0, "step": 0.0}

ctx = jobkit.init(params={"steps": MAX_STEPS, "lr": LR})
W_TRUE = torch.randn(12, 3)


class Net(nn.Module):
    n_forward = 0

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 32), nn.Linear(32, 3)

    def forward(self, x):
        Net.n_forward += 1
        return self.fc2(torch.relu(self.fc1(x)))


def get_batch(n=24):
    tic = time.time()
    x = torch.randn(n, 12)
    y = torch.tanh(x @ W_TRUE)
    TIMES["data"] += time.time() - tic
    return x, y


def report(loss):
    mean_norm = torch.stack(GRAD_NORMS).mean().item()
    mean_loss = sum(LAST_LOSSES) / len(LAST_LOSSES)
    print(f"[{STEP}] loss {loss.item():.4f} (last 5: {mean_loss:.4f}, lowest {LOWEST:.4f}) |g| {mean_norm:.3f}")
    GRAD_NORMS.clear()


def train_step():
    global STEP, SMOOTH_NORM, LOWEST
    tic = time.time()
    x, y = get_batch()
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    GRAD_NORMS.append(norm)
    SMOOTH_NORM = norm if SMOOTH_NORM is None else 0.9 * SMOOTH_NORM + 0.1 * norm
    LAST_LOSSES.append(loss.item())
    LOWEST = min(LOWEST, loss.item())
    TIMES["step"] += time.time() - tic
    STEP += 1
    return loss


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=LR)
ctx.track(net=net, opt=opt)
for _ in ctx.steps(MAX_STEPS):
    loss = train_step()
    ctx.log({"loss": loss})
    if STEP % LOG_EVERY == 0:
        report(loss)
print(f"{STEP} steps in {time.time() - T0:.1f} s, {Net.n_forward} forward passes, smoothed norm {SMOOTH_NORM:.3f}")
ctx.finish({"loss": loss.item()})
