"""The same training as plain.py's, under `ctx`; and what is compared with what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.ranks import make_context
from oracle import plain
from safetensors.torch import load_file
from torch import nn

from jobkit.config.schema import CheckpointConfig, CommConfig, Config, ParallelConfig
from jobkit.wire.group import RankGroup

OFF = CheckpointConfig(every="off", memory="off")


def config(*, comm: Any = None, checkpoint: CheckpointConfig = OFF, **options: Any) -> Config:
    """Return a config; `parallel` and `comm` are dicts, as in a YAML."""
    parallel = ParallelConfig(**options.pop("parallel", {}))
    return Config(
        name="test", task="m:f", parallel=parallel, comm=CommConfig(**(comm or {})), checkpoint=checkpoint, **options
    )


def train(
    ranks: RankGroup,
    folder: Path,
    *,
    steps: int = plain.STEPS,
    batches: Callable[[int], plain.Batch] = plain.batch_of,
    micro_batch_size: int | None = None,
    max_norm: float | None = None,
    own: bool = False,
    attempt: int = 1,
    die_at: int | None = None,
    **options: Any,
) -> plain.Seen:
    """Train as plain.train does. With `own` the script calls loss.backward() and optimizer.step() itself."""
    seen, ctx = plain.Seen(), make_context(folder, ranks, config(**options), attempt)
    model = ctx.parallelize(plain.net(ranks.rank))  # rank 0's weights count
    rule = ctx.optimizer(model, torch.optim.SGD, **plain.SGD)
    ctx.track(model=model, optimizer=rule)
    place = plain.ALONE if ctx._parallelizer.data_size == 1 else ranks
    part: nn.Module = model.own_stage if hasattr(model, "own_stage") else model

    def joined(mine: plain.Arrays) -> plain.Arrays:
        stages = ranks.gather(mine) if part is not model else [mine]
        return {name: array for stage in stages for name, array in stage.items()}

    first = ctx.step
    for step in ctx.steps(steps):
        if step == die_at:
            ctx._checkpointer.wait()
            return seen
        if step > first:  # at the boundary between two steps replicas are averaged
            seen.weights.append(joined(plain.arrays(part.named_parameters())))
        batch = batches(step)
        mine, size = plain.share(place, batch), len(batch[0])
        if own:
            loss = plain.mse(model(mine[0]), mine[1])
            loss.backward()
        else:
            loss = ctx.backward(model, mine, plain.mse, global_batch_size=size, micro_batch_size=micro_batch_size)
        seen.gradients.append(joined(plain.gradients(part)))
        if own:
            rule.step()
            rule.zero_grad()
        else:
            norm = ctx.update(rule, max_norm=max_norm)
            assert all(parameter.grad is None for parameter in model.parameters())
            seen.norms += [] if norm is None else [float(norm)]
            seen.losses.append(float(loss))
    seen.weights.append(joined(plain.arrays(part.named_parameters())))
    seen.kept = plain.kept(model, rule)
    ctx.finish()
    ranks.barrier()
    seen.final = plain.arrays(load_file(ctx.run_dir / "final" / "model.safetensors").items())
    return seen


def difference(one: Any, other: Any) -> float:
    return 0.0 if np.array_equal(one, other, equal_nan=True) else float(np.abs(one - other).max())


def differences(left: plain.Seen, right: plain.Seen) -> dict[str, float]:
    """Return the largest difference between two trainings: of gradients, of weights, and of the final weights."""
    largest = {}
    for name in ("gradients", "weights", "final"):
        one, other = getattr(left, name), getattr(right, name)
        pairs = [(one, other)] if name == "final" else list(zip(one, other, strict=True))
        assert all(set(one) == set(other) for one, other in pairs), [set(one) ^ set(other) for one, other in pairs]
        largest[name] = max(difference(one[key], other[key]) for one, other in pairs for key in one)
    return largest
