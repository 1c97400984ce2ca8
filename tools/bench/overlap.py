"""How well DDP's all-reduces overlap with backward on a slow network: ctx.parallelize against plain DDP.

The gradients are imagenet64's full UNet's, at a 25th of their size, in the order in which it registers and in which it
computes them; computing and sending take time in proportion to bytes, one bucket after the other, and no CPU. So the
ratio is one of layouts. Blocks of all kinds alternate within one run:
    python tools/bench/overlap.py
`frozen`: the reverse order of registration, as jobkit had it once. `resumed`: the first step after a resume.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

YAML = """\
name: overlap
task: overlap:train
params: {{root: {root}, blocks: {blocks}, block_steps: 3, compute: {compute}, send: {send}}}
resources: {{tasks_per_node: 2}}
comm: {{bucket_cap_mb: 1}}
"""


def gradients_of_the_unet(root: Path) -> tuple[dict[str, int], list[str]]:
    """Elements of each parameter by name, as they are registered, and the names by when their gradients are ready."""
    import torch
    from omegaconf import OmegaConf

    from experiments.imagenet64.flow import FlowMatching

    config: Any = OmegaConf.load(root / "experiments" / "imagenet64.yaml")
    with torch.device("meta"):
        net = FlowMatching().network(3, 1000, config.params.unet)
        order: list[str] = []
        for name, parameter in net.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))  # type: ignore[misc]
        net(torch.empty(1, 3, 64, 64), torch.empty(1), torch.zeros(1, dtype=torch.int64)).sum().backward()
    return {name: parameter.numel() for name, parameter in net.named_parameters()}, order


def train(ctx: Any) -> dict[str, Any]:
    """The task: the milliseconds of a step of each kind by block, and how many buckets there are."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from jobkit.train.gradient_order import GradientOrder

    p = ctx.params
    sys.path.insert(0, p.root)
    elements, order = gradients_of_the_unet(Path(p.root))
    total = sum(elements.values())

    class Clock:
        """Takes a part of each step's time, and catches up with what a busy machine made it wait for."""

        def start(self) -> None:
            self.due = time.perf_counter()

        def take(self, seconds: float) -> None:
            self.due += seconds
            ahead = self.due - time.perf_counter()
            if ahead > 2e-3:
                time.sleep(ahead)

    computing = Clock()

    class Computed(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor, parameter: Tensor, seconds: float) -> Tensor:
            context.shape, context.seconds = parameter.shape, seconds
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Any:
            computing.take(context.seconds)
            return gradient, torch.zeros(context.shape), None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, size in elements.items():
                self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(max(1, size // 25))))

        def forward(self, x: Tensor) -> Tensor:
            for name in reversed(order):
                seconds = p.compute * elements[name] / total
                x = Computed.apply(x, getattr(self, name.replace(".", "_")), seconds)
            return x

    sending: queue.Queue[Any] = queue.Queue()

    def link() -> None:
        network = Clock()
        network.start()
        while True:
            buffer, future, given = sending.get()
            network.due = max(network.due, given)
            network.take(p.send * 25 * buffer.numel() / total)
            future.set_result(buffer)

    threading.Thread(target=link, daemon=True).start()

    def slow(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        sending.put((bucket.buffer(), future, time.perf_counter()))
        return future

    slow.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}

    names = [name.replace(".", "_") for name in order]
    models: dict[str, Any] = {
        "torch": DistributedDataParallel(Net(), bucket_cap_mb=1),
        "jobkit": ctx.parallelize(Net()),
        "resumed": ctx.parallelize(Net()),
        "frozen": ctx.parallelize(Net()),
    }
    GradientOrder(models["resumed"]).settle(names)
    GradientOrder(models["frozen"]).settle([name.replace(".", "_") for name in reversed(elements)])
    for model in models.values():
        model.register_comm_hook(None, slow)

    def step(model: Any) -> float:
        output = model(torch.ones(1, requires_grad=True)).sum()
        started = time.perf_counter()
        computing.start()
        output.backward()
        return time.perf_counter() - started

    first = {kind: step(model) for kind, model in models.items()}
    found: dict[str, list[float]] = {kind: [] for kind in models}
    for block in range(p.blocks):
        for kind in list(models)[block % 4 :] + list(models)[: block % 4]:
            ctx.barrier()
            found[kind].append(1e3 * sum(step(models[kind]) for _ in range(p.block_steps)) / p.block_steps)
    buckets = {kind: len(model.reducer._get_zeros_like_grad_buckets()) for kind, model in models.items()}
    return {"ms": found, "first_ms": {kind: 1e3 * value for kind, value in first.items()}, "buckets": buckets}


def second_bucket(elements: dict[str, int], layout: list[str], order: list[str], first: int, cap: int) -> float:
    """The part of all gradients (bytes) that is computed when the second bucket of a layout can be sent."""
    names, filled, limit = iter(layout), 0, first
    wanted: set[str] = set()
    for _ in range(2):
        filled = 0
        while filled < limit:
            name = next(names)
            wanted.add(name)
            filled += 4 * elements[name]
        limit = cap
    done = 0
    for name in order:
        done += elements[name]
        wanted.discard(name)
        if not wanted:
            return done / sum(elements.values())
    raise AssertionError("a gradient is never ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", type=float, default=0.4, help="seconds that backward computes")
    parser.add_argument("--send", type=float, default=0.4, help="seconds that all gradients take on the network")
    parser.add_argument("--blocks", type=int, default=8)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    elements, order = gradients_of_the_unet(ROOT)
    mb = 2**20
    ready = {
        "torch, jobkit": second_bucket(elements, order, order, mb, 25 * mb),
        "frozen": second_bucket(elements, [*reversed(elements)], order, 25 * mb, 25 * mb),
    }
    print(json.dumps({"second_bucket_leaves_at": {kind: round(value, 3) for kind, value in ready.items()}}))
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as folder:
        project = Path(folder)
        shutil.copy(__file__, project / "overlap.py")
        options = {"root": ROOT, "blocks": arguments.blocks, "compute": arguments.compute, "send": arguments.send}
        (project / "overlap.yaml").write_text(YAML.format(**options), encoding="utf-8")
        command = [sys.executable, "-m", "jobkit.submit", "overlap.yaml", "--local"]
        done = subprocess.run(command, cwd=project, capture_output=True, encoding="utf-8")
        if done.returncode:
            raise SystemExit(done.stderr)
        (status,) = project.glob("runs/*/status.json")
        result = json.loads(status.read_text(encoding="utf-8"))["result"]
    times = result["ms"]
    print(f"a backward pass of plain DDP: {statistics.median(times['torch']):.0f} ms; buckets: {result['buckets']}")
    over = {
        kind: round(statistics.median(a / b for a, b in zip(times[kind], times["torch"], strict=True)), 3)
        for kind in times
    }
    print(json.dumps({"backward_over_plain_ddp": over, "target": {"jobkit": 1.02, "resumed": 1.02}}))
    print(json.dumps({"first_backward_ms": {kind: round(value) for kind, value in result["first_ms"].items()}}))


if __name__ == "__main__":
    main()
