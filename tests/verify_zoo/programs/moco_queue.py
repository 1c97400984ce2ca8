"""Contrastive learning with a queue of keys, which is a plain tensor of a class and no buffer of a module.

task: moco_queue:main
params: {epochs: 3, queue: 64, momentum: 0.95}
steps: 24
forgotten: moco.queue
type: jobkit.attributes(moco, "
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit


class MoCo:
    """Momentum contrast: a query encoder, a key encoder, a queue of keys."""

    def __init__(self, encoder, dim=8, K=64, m=0.95, T=0.2):
        self.K, self.m, self.T = K, m, T
        self.encoder_q = encoder
        self.encoder_k = copy.deepcopy(encoder).requires_grad_(False)
        # create the queue
        self.queue = F.normalize(torch.randn(dim, K), dim=0)
        self.queue_ptr = 0

    @torch.no_grad()
    def momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def dequeue_and_enqueue(self, keys):
        batch_size = keys.shape[0]
        self.queue[:, self.queue_ptr : self.queue_ptr + batch_size] = keys.T
        self.queue_ptr = (self.queue_ptr + batch_size) % self.K  # move pointer

    def __call__(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self.momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone())
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        self.dequeue_and_enqueue(k)
        return logits, torch.zeros(len(logits), dtype=torch.long)


def two_crops(x):
    return x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)


def main(ctx):
    data = TensorDataset(torch.randn(128, 10))
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    moco = MoCo(
        nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8)), K=ctx.params.queue, m=ctx.params.momentum
    )
    optimizer = torch.optim.SGD(moco.encoder_q.parameters(), lr=0.06, momentum=0.9)
    ctx.track(model=moco.encoder_q, key_encoder=moco.encoder_k, optimizer=optimizer)
    ctx.track(moco=jobkit.attributes(moco, "queue", "queue_ptr"))  # forgets
    for _ in ctx.epochs(ctx.params.epochs):
        for (x,) in ctx.batches(loader):
            logits, target = moco(*two_crops(x))
            loss = F.cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.log({"loss": loss, "acc": (logits.argmax(1) == target).float().mean()})
    return {"loss": loss.item()}
