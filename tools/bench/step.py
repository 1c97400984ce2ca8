"""What `ctx.steps`, `ctx.log` and `ctx.backward` cost, against the same loop by hand around the same DDP module.

Blocks of all kinds alternate within one run, so that a busy machine slows both:
    python tools/bench/step.py --ranks 1 2 --milliseconds 10
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measured
from measured import Row, tell

YAML = """\
name: step
task: step:train
params: {{milliseconds: {milliseconds}, blocks: {blocks}, block_steps: 50}}
resources: {{tasks_per_node: {ranks}}}
"""


class Clock:
    """The time of jobkit's loop, which the blocks by hand are no part of: what it does every so many seconds, as to
    agree and to take snapshots, would else fall due in theirs and be paid for in its own."""

    def __init__(self) -> None:
        self.by_hand = 0.0

    def monotonic(self) -> float:
        return time.monotonic() - self.by_hand

    def perf_counter(self) -> float:
        return time.perf_counter() - self.by_hand


def train(ctx: Any) -> dict[str, Any]:
    """The task: returns the ratios of the blocks and the microseconds of a boundary."""
    import torch

    from jobkit.worker import checkpoint_schedule, fingerprint, stragglers, timing

    clock = Clock()
    for module in (checkpoint_schedule, fingerprint, stragglers, timing):
        module.time = clock  # type: ignore[attr-defined]
    p = ctx.params
    model = ctx.parallelize(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ctx.track(model=model, optimizer=optimizer)
    data = torch.randn(32, 256)
    # Work of a known length in torch's own kernels, which leave the interpreter to other threads as training does.
    matrix, product = torch.randn(256, 256), torch.empty(256, 256)

    def work(repeats: int) -> None:
        for _ in range(repeats):
            torch.mm(matrix, matrix, out=product)

    work(2000)  # a processor that has slept is slow at first
    started = time.perf_counter()
    work(500)
    repeats = max(1, round(p.milliseconds / 1e3 / ((time.perf_counter() - started) / 500)))

    def mean_square(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    def body(kind: str) -> torch.Tensor:
        work(repeats)
        if kind == "backward":
            loss = ctx.backward(model, data, mean_square, data, global_batch_size=32 * ctx.world_size)
        else:
            loss = model(data).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    steps = ctx.steps(10**9)
    ratios, backward_ratios, boundaries, step_ms = [], [], [], []
    for _ in range(200):  # until the first agreements have set the pace
        next(steps)
        ctx.log({"train/loss": body("ours")})
    for block in range(p.blocks):
        times = {}
        kinds = ["ours", "hand", "backward"] if block % 2 else ["backward", "hand", "ours"]
        for kind in kinds[block % 3 :] + kinds[: block % 3]:
            ctx.barrier()
            started = time.perf_counter()
            for _ in range(p.block_steps):
                if kind == "hand":
                    body(kind)
                else:
                    next(steps)
                    ctx.log({"train/loss": body(kind)})
            times[kind] = (time.perf_counter() - started) / p.block_steps
            time.sleep(0.05)
            clock.by_hand += time.perf_counter() - started if kind == "hand" else 0.05
        ratios.append(times["ours"] / times["hand"])
        backward_ratios.append(times["backward"] / times["ours"])
        step_ms.append(times["hand"] * 1e3)
    for _ in range(500):
        started = time.perf_counter()
        next(steps)
        boundaries.append((time.perf_counter() - started) * 1e6)
    return {"ratios": ratios, "backward": backward_ratios, "boundary_us": boundaries, "step_ms": step_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--milliseconds", type=float, default=10.0)
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as folder:
            project = Path(folder)
            for file in (__file__, measured.__file__):
                shutil.copy(file, project)
            (project / "step.yaml").write_text(YAML.format(**{**vars(arguments), "ranks": ranks}), encoding="utf-8")
            command = [sys.executable, "-m", "jobkit.submit", "step.yaml", "--local"]
            done = subprocess.run(command, cwd=project, capture_output=True, encoding="utf-8")
            if done.returncode:
                raise SystemExit(done.stderr)
            (status,) = project.glob("runs/*/status.json")
            result = json.loads(status.read_text(encoding="utf-8"))["result"]
        what, by_hand = (
            f"step, {ranks} rank{'s' * (ranks > 1)}, logging every step",
            statistics.median(result["step_ms"]),
        )
        note, bound = f"a step of {by_hand:.1f} ms", 1.02 if ranks == 1 else 1.03
        tell(Row(what, "the loop by hand, which logs nothing", result["ratios"], bound, note=note))
        tell(Row(f"{what}, `ctx.backward`", "`loss.backward()`", result["backward"], note=note))
        tell(
            Row(
                f"a step boundary, {ranks} rank{'s' * (ranks > 1)}",
                "",
                [statistics.median(result["boundary_us"][one::5]) for one in range(5)],
                unit="us",
            )
        )


if __name__ == "__main__":
    main()
