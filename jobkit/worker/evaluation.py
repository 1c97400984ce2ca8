"""Evaluations of a run: who computes which batch, how far it is, and what is kept of one that is broken off."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from jobkit.log import log
from jobkit.run.events import Event
from jobkit.run.files import read_fresh, write_atomic
from jobkit.train.batches import DynamicBatches, LockstepBatches
from jobkit.train.evaluate import Collate, Metrics, PerSample, compute, independent_forwards
from jobkit.train.parallel import Parallel
from jobkit.train.scores import SampleScores
from jobkit.worker.lease import holds_lease
from jobkit.worker.rank import Rank
from jobkit.worker.rendezvous import shared_store
from jobkit.worker.reporter import RunReporter
from jobkit.worker.stop import Stopped, StopSignals


class Evaluator:
    """One rank's evaluations; what is known when one of them is stopped is kept for the next attempt.

    That takes it up where it comes by the same evaluation of the same step, with the same code, and has trained nothing
    since the checkpoint that was written at the stop. `restored` is the step of the checkpoint this one began with.
    """

    def __init__(
        self, rank: Rank, reporter: RunReporter, parallel: Parallel, signals: StopSignals, restored: int | None
    ) -> None:
        self._rank, self._reporter, self._parallel, self._signals = rank, reporter, parallel, signals
        self._restored = restored
        self._store = shared_store(rank.topology.world_size)
        self._kept: list[SampleScores] = []
        """What an earlier attempt has found of this step's evaluations, on every rank."""
        self._step: int | None = None
        self._of_step: list[SampleScores] = []
        """The evaluations of this step so far, in their order; all ranks know the same."""
        self._handouts = 0

    def run(
        self,
        function: PerSample | Metrics,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        step: int,
        models: Iterable[Any],
        may_stop: Callable[[], bool],
        stop_if_told: Callable[[], None],
        collate_fn: Collate = default_collate,
    ) -> SampleScores:
        """The values of all samples, on every rank; see Context.evaluate.

        `may_stop`: whether nothing of the step would be repeated. `stop_if_told` is called on all ranks after a signal;
        it raises Stopped, or it was a false alarm.
        """
        scores = self._begin(step, SampleScores(len(dataset), batch_size))  # type: ignore[arg-type]
        rank, stoppable = self._rank, True
        options = {"device": rank.device, "seed": rank.config.seed, "collate_fn": collate_fn}
        try:
            with independent_forwards(models):
                while missing := scores.missing():
                    part = SampleScores(scores.length, scores.batch_size)
                    batches = self._watched(self._hand_out(missing), scores, may_stop if stoppable else lambda: False)
                    compute(part, function, dataset, batches, **options)  # type: ignore[arg-type]
                    scores.update(part.gathered(rank.group.group))
                    if scores.missing():  # some rank was told to stop
                        told, touched = rank.group.maximum(self._signals.pending, not may_stop())
                        if told and not touched:
                            stop_if_told()
                        else:
                            stoppable = False  # going on to the end repeats least
        except Stopped as stopped:
            self._keep(stopped.checkpoint)
            raise
        finally:
            self._reporter.update(evaluation=None)
        if self._kept and len(self._of_step) >= len(self._kept):
            self._drop_kept()
        return scores

    def _hand_out(self, missing: list[int]) -> DynamicBatches | LockstepBatches:
        parallel = self._parallel
        self._handouts += 1
        # Replicas that drift apart give each batch another value: who computes it must not depend on the clock.
        if parallel.forward_is_collective or parallel.drifts:
            return LockstepBatches(missing, parallel.data_rank, parallel.layout.data, self._rank.group.anywhere)
        if self._rank.is_main:  # nobody asks for it any more: all ranks have gathered since
            self._store.delete_key(f"jobkit/evaluation/{self._handouts - 1}")
        return DynamicBatches(missing, self._store, f"jobkit/evaluation/{self._handouts}")

    def _watched(
        self, batches: DynamicBatches | LockstepBatches, scores: SampleScores, may_stop: Callable[[], bool]
    ) -> Iterator[int]:
        """The batches handed to this rank; between two of them it sends a heartbeat and looks for a signal."""
        done = before = scores.done
        for number in batches:
            self._reporter.update(evaluation={"done": done, "total": scores.length})
            yield number
            self._reporter.heartbeat.beat()
            done = min(scores.length, before + batches.taken * scores.batch_size)
            if self._signals.pending and may_stop():
                batches.stop()

    # Across attempts

    def _begin(self, step: int, scores: SampleScores) -> SampleScores:
        """The next evaluation of a step, with what an earlier attempt has found of it."""
        if step != self._step:
            first, self._step, self._of_step = self._step is None, step, []
            self._kept = self._load() if first else []
        if len(self._of_step) < len(self._kept):
            kept = self._kept[len(self._of_step)]
            if (kept.length, kept.batch_size) == (scores.length, scores.batch_size):
                scores.update(kept)
                self._reporter.record(Event.EVALUATION_RESUMED, step=step, done=kept.done, total=kept.length)
        self._of_step.append(scores)
        return scores

    def _keep(self, checkpoint: int | None) -> None:
        """Keep what is known for an attempt that begins with the checkpoint of this step, None for none at all."""
        if not self._rank.is_main:
            return
        run, kept = self._rank.run, False
        # A script of which nobody has taken a snapshot may have changed by the next attempt: then nothing is kept.
        if self._step == (checkpoint or 0) and "JOBKIT_CODE" in os.environ and holds_lease(run, self._rank.attempt):
            try:
                write_scores(run.evaluation_file, self._key(checkpoint), self._of_step)
                kept = True
            except OSError as error:
                log.info("%s; what is done of the evaluation will be repeated", error)
        now = self._of_step[-1]
        self._reporter.record(Event.EVALUATION_INTERRUPTED, step=self._step, done=now.done, total=now.length, kept=kept)

    def _load(self) -> list[SampleScores]:
        """What was kept for an attempt like this one; what was kept for another is no longer needed."""
        found = None
        if self._rank.is_main and self._step == (self._restored or 0):
            found = read_scores(self._rank.run.evaluation_file, self._key(self._restored))
        if found is None:
            self._drop_kept()
        return self._rank.group.broadcast(found or [])  # type: ignore[no-any-return]

    def _key(self, checkpoint: int | None) -> dict[str, Any]:
        return {"step": self._step, "checkpoint": checkpoint, "code": Path(os.environ.get("JOBKIT_CODE", "")).name}

    def _drop_kept(self) -> None:
        self._kept = []
        if self._rank.is_main:
            with suppress(OSError):
                self._rank.run.evaluation_file.unlink(missing_ok=True)


def write_scores(file: Path, key: dict[str, Any], evaluations: list[SampleScores]) -> None:
    """Write some evaluations and what they belong to, with a checksum in front; whole or not at all."""
    buffer = io.BytesIO()
    torch.save({"key": key, "evaluations": [vars(scores) for scores in evaluations]}, buffer)
    data = buffer.getvalue()
    write_atomic(file, hashlib.sha256(data).digest() + data)


def read_scores(file: Path, key: dict[str, Any]) -> list[SampleScores] | None:
    """The evaluations in a file; None where there is none, it is damaged, or it belongs to something else."""
    try:
        content = read_fresh(file)
    except OSError:
        return None
    digest, data = content[:32], content[32:]
    if hashlib.sha256(data).digest() != digest:
        return None
    found = torch.load(io.BytesIO(data), weights_only=True)
    if found["key"] != key:
        return None
    evaluations = []
    for fields in found["evaluations"]:
        scores = SampleScores(fields["length"], fields["batch_size"])
        scores.known, scores.values = fields["known"], fields["values"]
        evaluations.append(scores)
    return evaluations
