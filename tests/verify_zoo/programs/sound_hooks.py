"""Forward and backward hooks that keep the activations of the last batch, to log how many units are dead.

task: sound_hooks:main
params: {epochs: 3}
steps: 24
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

activations = {}


class FeatureMonitor:
    """Watches the layers of a model; everything here is of the last batch alone, but for the counts."""

    def __init__(self, model, names):
        self.features, self.grad_scale, self.calls = {}, {}, {}
        self.mean_abs = torch.zeros(len(names))
        self.handles = []
        for i, name in enumerate(names):
            layer = model.get_submodule(name)
            self.handles.append(layer.register_forward_hook(self.make_hook(i, name)))
            self.handles.append(layer.register_full_backward_hook(self.make_grad_hook(name)))

    def make_hook(self, i, name):
        n_calls = 0

        def hook(module, args, output):
            nonlocal n_calls
            n_calls += 1
            self.features[name] = output.detach()
            self.mean_abs[i] = output.detach().abs().mean()
            self.calls[name] = n_calls
            activations[name] = output.detach().clone()

        return hook

    def make_grad_hook(self, name):
        def hook(module, grad_input, grad_output):
            self.grad_scale[name] = grad_output[0].norm()

        return hook

    def dead_fraction(self):
        return {name: (feature <= 0).all(0).float().mean() for name, feature in self.features.items()}


def main(ctx):
    torch.manual_seed(5)
    x = torch.randn(144, 10)
    loader = DataLoader(TensorDataset(x, (x[:, :3].sum(1) > 0).long()), batch_size=18, shuffle=True)
    model = nn.Sequential()
    for i, (n_in, n_out) in enumerate([(10, 32), (32, 16)]):
        model.add_module(f"fc{i}", nn.Linear(n_in, n_out))
        model.add_module(f"act{i}", nn.ReLU())
    model.add_module("head", nn.Linear(16, 2))
    monitor = FeatureMonitor(model, ["act0", "act1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    for epoch in ctx.epochs(ctx.params.epochs, model=model, optimizer=optimizer):
        for inputs, targets in ctx.batches(loader):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dead = monitor.dead_fraction()
            ctx.log({"loss": loss, **{f"dead/{name}": value for name, value in dead.items()}})
        with torch.no_grad():
            accuracy = (model(x[:50]).argmax(1) == (x[:50, :3].sum(1) > 0)).float().mean()
        print(f"epoch {epoch}: accuracy {accuracy:.3f}, calls {monitor.calls}, norms {monitor.grad_scale}")
    for handle in monitor.handles:
        handle.remove()
    return {"loss": loss.item(), "accuracy": accuracy.item()}
