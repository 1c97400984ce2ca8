"""ctx.evaluate, ctx.evaluate_samples and ctx.map: a function of every sample, over all ranks.

    dataset --HandOut over all ranks--> function(batch, ids) --gather--> values in the order of the samples

An evaluation that is interrupted is done again as a whole by the next attempt; of a map into a folder the files stay
that are complete. loop/evaluate.py has the pure parts.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from jobkit.errors import UsageError
from jobkit.loop.evaluate import Batches, HandOut, PerSample, Rounds, as_values, computed, in_order, mean
from jobkit.loop.loop import Loop
from jobkit.loop.rank import Rank
from jobkit.loop.reporter import Reporter
from jobkit.loop.tracked import Tracked
from jobkit.parallel.parallelizer import Parallelizer, independent_forwards
from jobkit.run.files import write_atomic, write_json


class Evaluator:
    """The evaluations of one rank."""

    def __init__(
        self, rank: Rank, parallelizer: Parallelizer, tracked: Tracked, reporter: Reporter, loop: Loop
    ) -> None:
        self._rank, self._parallelizer, self._reporter, self._loop = rank, parallelizer, reporter, loop
        self._tracked = tracked
        self._count = 0

    def evaluate(self, function: PerSample, dataset: Any, **options: Any) -> float | dict[str, float]:
        """Return the mean over all samples, on every rank; a dict of means where `function` returns a dict."""
        values = self.evaluate_samples(function, dataset, **options)
        if isinstance(values, dict):
            return {name: mean(part) for name, part in values.items()}
        return mean(values)

    def evaluate_samples(self, function: PerSample, dataset: Any, **options: Any) -> Tensor | dict[str, Tensor]:
        """Return the value of each sample, float64 [n], on every rank; a dict of such where `function` returns one."""

        def values(batch: Any, ids: Tensor) -> dict[str, Tensor]:
            return as_values(function(batch, ids), len(ids))

        parts = self._run(values, dataset, to_all=True, **options)
        names = parts[0].keys()
        joined = {name: torch.cat([part[name] for part in parts]) for name in names}
        return joined[""] if list(names) == [""] else joined

    def map(self, function: PerSample, dataset: Any, *, to: str | Path = "main", **options: Any) -> Any:
        """Return `function`'s outputs of all samples, joined along the first dimension.

        `to` is `main` (None on other ranks), `all`, or a folder that all ranks see: each rank writes its batches there,
        as `batch_<number>.pt`, each whole or not at all.
        """
        if to not in ("main", "all"):
            return self._to_folder(function, dataset, Path(to), options)
        parts = self._run(lambda batch, ids: tree_map(_on_cpu, function(batch, ids)), dataset, to == "all", **options)
        return _joined(parts) if parts else None

    def _to_folder(self, function: PerSample, dataset: Any, folder: Path, options: dict[str, Any]) -> None:
        size = options.get("batch_size", 1)
        run = self._rank.run
        place = {
            "run": run.name,
            "code": run.code.resolve().name,  # another code may write other files
            "step": self._loop.boundary.step,
            "batches": [len(dataset), size],
        }

        def file_of(number: int) -> Path:
            return folder / f"batch_{number:08d}.pt"

        def begin() -> set[int]:
            """Return the batches that an attempt before has left here; remove the files of other maps."""
            folder.mkdir(parents=True, exist_ok=True)
            marker = folder / ".jobkit.json"
            before = json.loads(marker.read_text()) if marker.exists() else {}
            if before.pop("attempt", self._rank.attempt) == self._rank.attempt or before != place:
                for old in folder.glob("batch_*.pt"):
                    old.unlink()
            write_json(marker, {**place, "attempt": self._rank.attempt})
            return {number for number in range(-(-len(dataset) // size)) if file_of(number).exists()}

        def write(batch: Any, ids: Tensor) -> None:
            output = io.BytesIO()
            torch.save(tree_map(_on_cpu, function(batch, ids)), output)
            write_atomic(file_of(int(ids[0]) // size), output.getvalue())

        self._run(write, dataset, to_all=False, done=self._parallelizer.ranks.on_main(begin), **options)

    def _run(
        self,
        function: Callable[[Any, Tensor], Any],
        dataset: Any,
        to_all: bool,
        *,
        batch_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        done: Collection[int] = (),
        **options: Any,
    ) -> list[Any]:
        """Return the results of all batches but the `done` ones, in order; on other ranks than 0 where they are
        `to_all`."""
        if not hasattr(dataset, "__len__") or len(dataset) == 0:
            raise UsageError(f"ctx.evaluate: a {type(dataset).__name__} without samples, expected a dataset with some")
        batches = Batches(dataset, batch_size, self._rank.config.random_seed or 0, collate_fn)
        parallelizer, ranks = self._parallelizer, self._parallelizer.ranks
        numbers = [number for number in range(len(batches)) if number not in done]
        total = min(len(dataset), len(numbers) * batch_size)
        self._count += 1
        together = parallelizer.forward_is_collective and ranks.world_size > 1
        hand_out: HandOut | Rounds = Rounds(numbers, parallelizer.data_rank, parallelizer.data_size)
        if not together:
            store = dist.distributed_c10d._get_default_store() if ranks.world_size > 1 else None
            hand_out = HandOut(numbers, store, f"jobkit/evaluation/{self._count}")
        results: dict[int, Any] = {}

        def compute() -> None:
            for number, result in computed(function, batches, hand_out, parallelizer.device, **options):
                results[number] = result
                self._rank.beat(self._loop.boundary.step, self._rank.page.read().phase)
                self._reporter.update(evaluation={"done": min(total, hand_out.taken * batch_size), "total": total})
                if self._loop.may_be_interrupted:
                    stops = self._loop.wants_stop()
                    if ranks.anywhere(stops) if together else stops:
                        hand_out.stop()
                        return

        def or_stop() -> None:
            try:
                compute()
            except BaseException:
                hand_out.stop()
                raise

        # A tracked module that ctx.parallelize did not make may be an average of the weights, with averaged buffers.
        # Stages of a pipeline have buffers of their own.
        alike = parallelizer.data_group if parallelizer.stage_group is not None else None
        modules = [*parallelizer.modules, *self._tracked.shared_modules]
        with self._loop.evaluation(), independent_forwards(modules, alike):
            if together:  # the other ranks wait in a forward: an error of this one ends the attempt
                compute()
            else:
                ranks.all_or_none(or_stop)
        self._reporter.update(evaluation=None)
        if self._loop.may_be_interrupted:
            self._loop.stop_if_told()
        parts: Sequence[dict[int, Any]] = ranks.gather(results) if to_all else ranks.gather_on_main(results)
        return in_order(parts)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _joined(parts: list[Any]) -> Any:
    """Join outputs of batches along their first dimension, in dicts and tuples too; other outputs are a list."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        columns = [_joined(list(column)) for column in zip(*parts, strict=True)]
        return type(first)(columns) if type(first) in (list, tuple) else columns
    return parts
