"""A temporal graph network: a memory of each node, updated by the interactions in the order of time.

task: graph_memory:run
params: {n_epoch: 4, bs: 40, memory_dim: 16}
forgotten: tgn.memory
type: jobkit.attributes(tgn.memory, "memory", "last_update")
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit


class Memory:
    def __init__(self, n_nodes, memory_dimension):
        self.n_nodes = n_nodes
        self.memory_dimension = memory_dimension
        self.__init_memory__()

    def __init_memory__(self):
        """Zero memory. Called at the start of each epoch."""
        self.memory = torch.zeros(self.n_nodes, self.memory_dimension)
        self.last_update = torch.zeros(self.n_nodes)

    def get_memory(self, node_idxs):
        return self.memory[node_idxs]

    def set_memory(self, node_idxs, values, timestamps):
        self.memory[node_idxs] = values.detach()
        self.last_update[node_idxs] = timestamps


class TGN(nn.Module):
    def __init__(self, n_nodes, memory_dim):
        super().__init__()
        self.memory = Memory(n_nodes, memory_dim)
        self.time_encoder = nn.Linear(1, memory_dim)
        self.memory_updater = nn.GRUCell(2 * memory_dim, memory_dim)
        self.affinity_score = nn.Sequential(nn.Linear(2 * memory_dim, memory_dim), nn.ReLU(), nn.Linear(memory_dim, 1))

    def compute_embedding(self, nodes, times):
        delta = (times - self.memory.last_update[nodes])[:, None]
        return self.memory.get_memory(nodes) + self.time_encoder(delta).cos()

    def forward(self, sources, destinations, times):
        src, dst = self.compute_embedding(sources, times), self.compute_embedding(destinations, times)
        score = self.affinity_score(torch.cat([src, dst], 1)).squeeze(1)
        updated = self.memory_updater(torch.cat([src, dst], 1), self.memory.get_memory(sources))
        return score, updated


def get_data(n_nodes=30, n_interactions=240):
    g = torch.Generator().manual_seed(2)
    sources = torch.randint(n_nodes, (n_interactions,), generator=g)
    destinations = (sources * 7 + torch.randint(3, (n_interactions,), generator=g)) % n_nodes
    return TensorDataset(sources, destinations, torch.arange(n_interactions) / 10)


def run(ctx):
    p = ctx.params
    n_nodes = 30
    train_loader = DataLoader(get_data(n_nodes), batch_size=p.bs)  # in the order of time
    tgn = TGN(n_nodes, p.memory_dim)
    optimizer = torch.optim.Adam(tgn.parameters(), lr=1e-2)
    ctx.track(tgn=tgn, optimizer=optimizer)
    ctx.track(memory=jobkit.attributes(tgn.memory, "memory", "last_update"))  # forgets

    for _epoch in ctx.epochs(p.n_epoch):
        tgn.memory.__init_memory__()
        for sources, destinations, times in ctx.batches(train_loader):
            negatives = torch.randint(n_nodes, destinations.shape)
            pos, updated = tgn(sources, destinations, times)
            neg, _ = tgn(sources, negatives, times)
            loss = nn.functional.softplus(-pos).mean() + nn.functional.softplus(neg).mean()
            loss = loss + 0.1 * (updated - tgn.compute_embedding(destinations, times)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tgn.memory.set_memory(sources, updated, times)
            ctx.log({"loss": loss})
    return {"loss": loss.item()}
