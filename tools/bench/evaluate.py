"""What a slow rank costs an evaluation, and what samples cost that take as long to decode as to compute.

One rank takes three times as long as the others. Batches are handed out to whoever is free, against a split made
beforehand; samples are decoded by the rank between its batches, against two workers that load ahead. The work is
sleeping, so that a machine with few cores shows the same as one with many; ideal is what the computing would take if it
could be divided to the last second:
    python tools/bench/evaluate.py --ranks 4
A validation that generates, as cogvideo's: clips of half a second each, drawn on 1, 2 and 4 equally fast ranks;
the outputs have to be the same bits on each number of ranks:
    python tools/bench/evaluate.py --clips 16
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measured
from measured import Row, tell

YAML = """\
name: evaluate
task: evaluate:{function}
params: {{milliseconds: {milliseconds}, batches: {batches}, slowdown: {slowdown}, repeats: {repeats}, clips: {clips}}}
resources: {{tasks_per_node: {ranks}}}
"""


def measure(ctx: Any) -> dict[str, Any]:
    """The task: returns how many times the ideal each evaluation took, on the rank that was done last."""
    import torch

    from jobkit.train.evaluate import evaluate

    p = ctx.params
    dataset = torch.utils.data.TensorDataset(torch.arange(4.0 * p.batches))
    seconds = p.milliseconds / 1e3 * (p.slowdown if ctx.rank == ctx.world_size - 1 else 1)

    def function(batch: Any, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        return batch[0]

    def images(batch: Any, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        return ids.float()[:, None].expand(-1, 64 * 64 * 3)

    class Decoded(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, index: int) -> Any:
            time.sleep(seconds / 4)
            return dataset[index]

    ways = {
        "dynamic": lambda: ctx.evaluate(function, dataset, batch_size=4),
        "static": lambda: evaluate(function, dataset, batch_size=4),
        "decoded_between": lambda: ctx.evaluate(function, Decoded(), batch_size=4),
        "outputs": lambda: float(ctx.map(images, 4 * p.batches, batch_size=4)[:, 0].double().mean()),
        "decoded_ahead": lambda: ctx.evaluate(function, Decoded(), batch_size=4, num_workers=2),
    }
    ideal = p.batches * p.milliseconds / 1e3 / (ctx.world_size - 1 + 1 / p.slowdown)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(p.repeats + 1):
        for way, run in ways.items():
            ctx.barrier()
            started = time.perf_counter()
            mean = run()
            ctx.barrier()
            assert mean == (4 * p.batches - 1) / 2
            if repeat:  # the first warms up
                found[way].append((time.perf_counter() - started) / ideal)
    return {**found, "ideal": ideal}


def draw(ctx: Any) -> dict[str, Any]:
    """The task: returns how many times the ideal it took to draw all clips, and the checksum of what was drawn."""
    import torch

    p = ctx.params

    def clip(batch: Any, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(p.milliseconds / 1e3)
        generator = torch.Generator().manual_seed(int(ids[0]))
        return torch.randn(1, 3, 9, 32, 48, generator=generator)

    ideal = -(-p.clips // ctx.world_size) * p.milliseconds / 1e3
    found, checksums = [], set()
    for repeat in range(p.repeats + 1):
        ctx.barrier()
        started = time.perf_counter()
        clips = ctx.map(clip, p.clips, batch_size=1)
        ctx.barrier()
        if repeat:  # the first warms up
            found.append((time.perf_counter() - started) / ideal)
        if ctx.is_main:
            checksums.add(hashlib.sha256(clips.contiguous().numpy().tobytes()).hexdigest())
    assert not ctx.is_main or len(checksums) == 1
    return {"ratios": found, "ideal": ideal, "checksum": next(iter(checksums), None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="a batch, on a rank that is not slow")
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--slowdown", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clips", type=int, default=0, help="measure a validation that draws so many instead")
    arguments = parser.parse_args()
    if arguments.clips:
        validation(arguments)
    else:
        evaluation(arguments)


def run(function: str, **values: Any) -> dict[str, Any]:
    """What a task of this file returns."""
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as folder:
        project = Path(folder)
        for file in (__file__, measured.__file__):
            shutil.copy(file, project)
        (project / "evaluate.yaml").write_text(YAML.format(function=function, **values), encoding="utf-8")
        command = [sys.executable, "-m", "jobkit.submit", "evaluate.yaml", "--local"]
        done = subprocess.run(command, cwd=project, capture_output=True, encoding="utf-8")
        if done.returncode:
            raise SystemExit(done.stderr)
        (status,) = project.glob("runs/*/status.json")
        result: dict[str, Any] = json.loads(status.read_text(encoding="utf-8"))["result"]
    return result


def validation(arguments: argparse.Namespace) -> None:
    """Draw the same clips on 1, 2 and 4 ranks."""
    checksums = set()
    for ranks in (1, 2, 4):
        result = run("draw", **{**vars(arguments), "ranks": ranks, "milliseconds": 500.0})
        checksums.add(result["checksum"])
        note = f"{arguments.clips} clips of 500 ms: ideally {result['ideal']:.2f} s; the same bits on 1, 2 and 4 ranks"
        tell(Row(f"validation that draws clips on {ranks} rank(s)", "ideal", result["ratios"], 1.1, note=note))
    assert len(checksums) == 1, checksums


def evaluation(arguments: argparse.Namespace) -> None:
    """Hand batches out to ranks of which one is slow, against a split made beforehand."""
    result = run("measure", **vars(arguments))
    what = f"evaluation on {arguments.ranks} ranks, one {arguments.slowdown:g} times slower"
    note = f"{arguments.batches} batches of {arguments.milliseconds:g} ms: ideally {result['ideal']:.2f} s"
    for way, words, bound in (
        ("dynamic", "", 1.1),
        ("static", ", divided beforehand", None),
        ("decoded_between", ", samples decoded between batches", None),
        ("decoded_ahead", ", samples decoded ahead by two workers", 1.5),
        ("outputs", ", with the outputs of all samples", 1.25),
    ):
        tell(Row(f"{what}{words}", "ideal", result[way], bound, note=note))


if __name__ == "__main__":
    main()
