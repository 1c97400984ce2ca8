#!/usr/bin/env python3
"""What the full recipes' models do on one GPU: `tools/test cuda` runs this after the tests of tests/cuda.

For the UNet of imagenet64 (channels-last) and minimind's transformer, both in bf16: samples a second of a run's loop
against the same loop by hand, as it is, compiled, and with deterministic kernels; model FLOP/s; memory by micro-batch;
and how long the loop waits for a checkpoint against the same copy by hand. A table, and all of it as JSON:
    python tools/bench/cuda.py --json FILE
    python tools/bench/cuda.py --device cpu --small --no-compile   # small models: shows that it runs, no more
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("imagenet64", "minimind")
KINDS = ("as it is", "deterministic", "compiled")

YAML = """\
name: {model}
task: cuda_bench:train
params: {{model: {model}, small: {small}, compile: {compile}, micro_batches: {micro_batches}, blocks: {blocks}}}
precision: bf16
device: {device}
checkpoint: {{every: 1000000}}
watchdog: off
resources: {{tasks_per_node: 1, gpus_per_task: {gpus}}}
"""


# In the run


def train(ctx: Any) -> dict[str, Any]:
    """The task: everything that is measured of one model."""
    import torch

    p = ctx.params
    micro_batches = list(p.micro_batches)
    main = micro_batches[min(1, len(micro_batches) - 1)]
    torch.manual_seed(0)
    net, batch_of, loss_of = parts(p.model, p.small, ctx.device)
    model = ctx.parallelize(net)
    optimizer = ctx.optimizer(model, torch.optim.AdamW, lr=1e-5, fused=True)
    ctx.track(model=model, optimizer=optimizer)
    steps = ctx.steps(10**9)
    next(steps)
    found: dict[str, Any] = {"parameters": sum(one.numel() for one in net.parameters()), "micro_batch": main}

    def hand(forward: Any, batch: Any) -> None:
        inputs, target = batch
        optimizer.zero_grad(set_to_none=True)  # after one that found no memory
        with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
            loss = loss_of(forward(*inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def ours(forward: Any, batch: Any) -> None:
        inputs, target = batch
        size = len(inputs[0])
        loss = ctx.backward(forward, inputs, loss_of, target, micro_batch_size=size, global_batch_size=size)
        ctx.update(optimizer)
        ctx.log({"train/loss": loss})
        next(steps)

    batch = batch_of(main)
    found["gflop_a_sample"] = flops(lambda: hand(model, batch)) / main / 1e9
    found["as it is"] = compared(ours, hand, model, batch, main, p.blocks, ctx.device)
    with deterministic():
        found["deterministic"] = tried(lambda: compared(ours, hand, model, batch, main, p.blocks, ctx.device))
    found["memory"] = {
        str(size): tried(lambda: peak_of(lambda: hand(model, batch_of(size)), ctx.device))  # noqa: B023 - called here
        for size in micro_batches
    }
    found["checkpoint"] = checkpoint(model, optimizer, ctx.device)
    if p.compile:
        began = time.perf_counter()
        compiled = torch.compile(model)
        found["compiled"] = tried(lambda: compared(ours, hand, compiled, batch, main, p.blocks, ctx.device))
        found["compiling_seconds"] = time.perf_counter() - began
    for kind in KINDS:
        if "by hand" in found.get(kind, {}):
            found[kind]["tflops"] = found["gflop_a_sample"] * found[kind]["by hand"] / 1e3
    return found


def parts(name: str, small: bool, device: Any) -> tuple[Any, Callable[[int], Any], Callable[..., Any]]:
    """A recipe's model, what makes a batch (inputs, target) of so many samples, and its loss."""
    import torch
    from torch.nn import functional as F

    if name == "imagenet64":
        from experiments.imagenet64.unet import UNet

        shape = {"width": 32, "multipliers": [1], "blocks": 1, "attention": [], "head": 32}
        if not small:
            shape = {"width": 192, "multipliers": [1, 2, 3, 4], "blocks": 3, "attention": [2, 4, 8], "head": 64}
        net = UNet(3, 1000, dropout=0.1, **shape).to(memory_format=torch.channels_last)  # type: ignore[arg-type]
        size = 8 if small else 64

        def images(count: int) -> Any:
            x = torch.randn(count, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
            inputs = (x, torch.rand(count, device=device), torch.randint(1000, (count,), device=device))
            return inputs, torch.randn_like(x)

        return net, images, lambda output, target: F.mse_loss(output.float(), target)

    from experiments.minimind.model import MiniMind
    from experiments.minimind.train import cross_entropy

    sizes = {"vocabulary": 6400, "dim": 768, "layers": 8, "heads": 8, "kv_heads": 4, "hidden": 2432}
    if small:
        sizes = {"vocabulary": 257, "dim": 96, "layers": 1, "heads": 4, "kv_heads": 2, "hidden": 256}
    length = 32 if small else 512

    def tokens(count: int) -> Any:
        drawn = torch.randint(sizes["vocabulary"], (count, length + 1), device=device)
        return (drawn[:, :-1],), drawn[:, 1:].contiguous()

    return MiniMind(**sizes, theta=1e6, tie=True), tokens, cross_entropy


def compared(
    ours: Callable[..., None], hand: Callable[..., None], forward: Any, batch: Any, size: int, blocks: int, device: Any
) -> dict[str, Any]:
    """Samples a second of both loops in alternating blocks, and the median ratio of their times."""
    for loop in (ours, hand, ours, hand):
        loop(forward, batch)
    synchronise(device)
    began = time.perf_counter()
    hand(forward, batch)
    synchronise(device)
    steps = max(2, min(50, round(0.5 / (time.perf_counter() - began))))
    seconds: dict[str, list[float]] = {"ours": [], "hand": []}
    for block in range(blocks):
        for name, loop in (("ours", ours), ("hand", hand))[:: 1 if block % 2 else -1]:
            began = time.perf_counter()
            for _ in range(steps):
                loop(forward, batch)
            synchronise(device)
            seconds[name].append((time.perf_counter() - began) / steps)
    ratios = [one / other for one, other in zip(seconds["ours"], seconds["hand"], strict=True)]
    return {
        "by jobkit": size / statistics.median(seconds["ours"]),
        "by hand": size / statistics.median(seconds["hand"]),
        "time ratio": statistics.median(ratios),
        "ratios": [min(ratios), max(ratios)],
    }


def flops(step: Callable[[], None]) -> int:
    """Floating-point operations of a step's matrix products and convolutions, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def peak_of(step: Callable[[], None], device: Any) -> dict[str, float]:
    """GiB at the peak of a step, of tensors and with what the allocator holds; on the CPU of the process so far."""
    import resource

    import torch

    if device.type == "cpu":
        step()
        return {"allocated": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "reserved": 0.0}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronise(device)
    found = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return dict(zip(("allocated", "reserved"), (one / 2**30 for one in found), strict=True))


def checkpoint(model: Any, optimizer: Any, device: Any) -> dict[str, float]:
    """Seconds that the loop waits for a checkpoint of this state, and for the same copy into pinned memory by hand."""
    import torch

    from jobkit.checkpoint.state import named_tensors
    from jobkit.checkpoint.store import Store
    from jobkit.checkpoint.writer import Checkpointer

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    tensors = list(named_tensors(state).values())
    pin = device.type != "cpu"
    copies = [torch.empty(one.shape, dtype=one.dtype, pin_memory=pin) for one in tensors]
    folder = Path(tempfile.mkdtemp(prefix="jobkit-bench-"))
    found: dict[str, list[float]] = {"stall": [], "copy": []}
    try:
        checkpointer = Checkpointer(Store(folder), keep=1)
        for step in range(1, 5):
            synchronise(device)
            saved = checkpointer.save(step, state).wait()
            found["stall"].append(saved.stall)
            began = time.perf_counter()
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=pin)
            synchronise(device)
            found["copy"].append(time.perf_counter() - began)
        checkpointer.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    later = {name: statistics.median(seconds[1:]) for name, seconds in found.items()}  # the first one takes the memory
    size = sum(one.nbytes for one in tensors) / 2**30
    return {**later, "first stall": found["stall"][0], "GiB": size, "durable": saved.seconds}


class deterministic:
    """While inside, kernels that give the same bits each time; where there is none, torch warns."""

    def __enter__(self) -> None:
        import torch

        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True

    def __exit__(self, *_: object) -> None:
        import torch

        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is measured, or the first line of why it cannot be: the rest is to be measured all the same."""
    import torch

    try:
        return measure()
    except torch.OutOfMemoryError:
        error = "out of memory"
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}".splitlines()[0]
    for module in (torch.cuda,) if torch.cuda.is_available() else ():
        module.empty_cache()
    return {"error": error}


def synchronise(device: Any) -> None:
    import torch

    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


# Around it


def machine(device: str) -> dict[str, str]:
    """What the numbers are of."""
    import torch

    found = {"torch": torch.__version__, "python": platform.python_version(), "device": "CPU"}
    if device == "cuda":
        import pynvml

        pynvml.nvmlInit()
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        }
    return found


def measured(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The result of a run of one model; {"error": ...} where it failed."""
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as folder:
        project = Path(folder)
        shutil.copy(__file__, project / "cuda_bench.py")  # `cuda` is a package of NVIDIA's
        shutil.copytree(ROOT / "experiments", project / "experiments", ignore=shutil.ignore_patterns("__pycache__"))
        values = {
            "model": model,
            "device": arguments.device,
            "small": str(arguments.small).lower(),
            "compile": str(arguments.compile).lower(),
            "micro_batches": [2, 4] if arguments.small else [16, 32, 64, 128],
            "blocks": 2 if arguments.small else 8,
            "gpus": 0 if arguments.device == "cpu" else 1,
        }
        (project / "bench.yaml").write_text(YAML.format(**values), encoding="utf-8")
        command = [sys.executable, "-m", "jobkit.submit", "bench.yaml", "--local"]
        done = subprocess.run(command, cwd=project, capture_output=True, encoding="utf-8")
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            return {"error": f"the run ended with {done.returncode}"}
        (status,) = project.glob("runs/*/status.json")
        result: dict[str, Any] = json.loads(status.read_text(encoding="utf-8"))["result"]
        return result


def rows(model: str, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The table's lines of one model."""
    if "error" in found:
        yield model, found["error"]
        return
    yield f"{model}: parameters, GFLOP a sample", f"{found['parameters'] / 1e6:.1f} M, {found['gflop_a_sample']:.3g}"
    for kind in (kind for kind in KINDS if kind in found):
        one = found[kind]
        said = one.get("error") or (
            f"{one['by jobkit']:.4g}, {one['by hand']:.4g}, {one['time ratio']:.3f} "
            f"({one['ratios'][0]:.3f}-{one['ratios'][1]:.3f}), {one['tflops']:.3g}"
        )
        yield f"{model}, {kind}, micro-batch {found['micro_batch']}: samples/s, by hand, time ratio, TFLOP/s", said
    if "compiling_seconds" in found:
        yield f"{model}: compiling and measuring, s", f"{found['compiling_seconds']:.0f}"
    for size, one in found["memory"].items():
        said = one.get("error") or f"{one['allocated']:.2f}, {one['reserved']:.2f}"
        yield f"{model}, micro-batch {size}: GiB of tensors, held", said
    one = found["checkpoint"]
    times = ", ".join(f"{one[name]:.3f}" for name in ("stall", "copy", "first stall", "durable"))
    yield (
        f"{model}, a checkpoint of {one['GiB']:.2f} GiB: the loop waits, a plain copy, the first wait, durable, s",
        times,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="small models: shows that this program runs")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="minutes on a CPU")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "cuda.json", help="default: %(default)s")
    arguments = parser.parse_args()
    sys.path.remove(str(Path(__file__).resolve().parent))  # this file would hide NVIDIA's package `cuda`
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU (torch.cuda.is_available() is false); see tools/test cuda", file=sys.stderr)
        raise SystemExit(2)
    found: dict[str, Any] = {"machine": machine(arguments.device), "small": arguments.small, "models": {}}
    print("; ".join(f"{name} {value}" for name, value in found["machine"].items()))
    print("\n| what | measured |\n|---|---|")
    for model in arguments.models:
        found["models"][model] = measured(model, arguments)
        for what, value in rows(model, found["models"][model]):
            print(f"| {what} | {value} |", flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {arguments.json}")
    failed = [model for model, one in found["models"].items() if "error" in one]
    raise SystemExit(f"no numbers for {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
