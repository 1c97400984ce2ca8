"""Hard examples are drawn more often: a weight for each sample follows its last loss. A loop as `while True`.

command: [python, sampler_weights.py, "--max_iters=${params.max_iters}"]
params: {max_iters: 24}
steps: 24
forgotten: sample_weights
type: ctx.values(sample_weights=sample_weights)
"""

import argparse

import torch
from torch import nn

import jobkit

parser = argparse.ArgumentParser()
parser.add_argument("--max_iters", type=int, default=24)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--beta", type=float, default=0.7, help="smoothing of the losses")
opt = parser.parse_args()

ctx = jobkit.init(params=vars(opt))
N = 200
data = torch.randn(N, 6)
target = data[:, :3].sum(1, keepdim=True).sin() + data[:, 3:4] * (torch.arange(N)[:, None] < 20)
sample_weights = torch.ones(N)  # everyone starts equal
ctx.values(sample_weights=sample_weights)  # forgets

net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 1))
optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3)
ctx.track(net=net, optimizer=optimizer)

it = ctx.step
while True:
    ctx.boundary(it, total=opt.max_iters)
    if it == opt.max_iters:
        break
    idx = torch.multinomial(sample_weights, opt.batch_size, replacement=False)
    per_sample = (net(data[idx]) - target[idx]).square().squeeze(1)
    # unbiased: rare draws count more
    p = sample_weights[idx] / sample_weights.sum()
    is_w = (1 / (N * p)).clamp(max=5)
    loss = (is_w * per_sample).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sample_weights[idx] = opt.beta * sample_weights[idx] + (1 - opt.beta) * (per_sample.detach() + 0.05)
    if it % 5 == 0:
        ctx.log({"loss": loss, "hardest": sample_weights.max()})
    it += 1
print("hardest samples:", sample_weights.topk(5).indices.tolist())
ctx.finish({"loss": loss.item()})
