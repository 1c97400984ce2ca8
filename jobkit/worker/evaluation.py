"""Evaluations of a run: who computes which batch, how far it is, and what becomes of one that is broken off."""

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

from jobkit.run.events import Event
from jobkit.run.files import write_atomic
from jobkit.train.batches import DynamicBatches, LockstepBatches
from jobkit.train.evaluate import Collate, Metrics, PerSample, compute, independent_forwards
from jobkit.train.parallel import Parallel
from jobkit.train.scores import SampleScores
from jobkit.worker.session import Session


class Evaluations:
    """One rank's evaluations; what is known when one of them is stopped is kept for the next attempt.

    That takes it up where it comes by the same evaluation of the same step, with the same code, and has trained nothing
    since the checkpoint that was written at the stop.

    Args:
        session: of this rank.
        parallel: says whether ranks may run a forward pass each for itself.
        checkpoint: step of the checkpoint that this attempt began with, or None.
    """

    def __init__(self, session: Session, parallel: Parallel, checkpoint: int | None) -> None:
        self._session, self._parallel = session, parallel
        self._checkpoint = checkpoint
        self._kept: list[SampleScores] = []
        """What an earlier attempt has found of this step's evaluations, on every rank."""
        self._step: int | None = None
        self._of_step: list[SampleScores] = []
        """The evaluations of this step so far, in their order; all ranks know the same."""
        self._under_way = False
        self._handouts = 0

    def run(
        self,
        function: PerSample | Metrics,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        step: int,
        seed: int,
        models: Iterable[Any],
        may_stop: Callable[[], bool],
        stop_if_told: Callable[[], None],
        collate_fn: Collate = default_collate,
    ) -> SampleScores:
        """The values of all samples, on every rank; see Context.evaluate.

        `may_stop`: whether nothing of the step would be repeated. `stop_if_told` is called on all ranks after a notice;
        it raises, or it was a false alarm.
        """
        scores = self._begin(step, SampleScores(len(dataset), batch_size))  # type: ignore[arg-type]
        session, stoppable = self._session, True
        self._under_way = True
        try:
            with independent_forwards(models):
                while missing := scores.missing():
                    part = SampleScores(scores.length, scores.batch_size)
                    batches = self._watched(self._handout(missing), scores, may_stop if stoppable else lambda: False)
                    compute(part, function, dataset, batches, device=session.device, seed=seed, collate_fn=collate_fn)
                    scores.update(part.gathered(session.control.group))
                    if scores.missing():  # some rank has a notice
                        told, touched = session.control.maximum(session.notices.pending, not may_stop())
                        if told and not touched:
                            stop_if_told()
                        else:
                            stoppable = False  # going on to the end repeats least
        finally:
            self._under_way = False
            session.progress["evaluation"] = None
        if self._kept and len(self._of_step) >= len(self._kept):
            self._drop_kept()
        return scores

    def _handout(self, missing: list[int]) -> DynamicBatches | LockstepBatches:
        """A new hand-out of some batches; made on all ranks together."""
        session, parallel = self._session, self._parallel
        self._handouts += 1
        # Replicas that drift apart give each batch another value: who computes it must not depend on the clock.
        if parallel.forward_is_collective or parallel.drifts:
            return LockstepBatches(missing, parallel.data_rank, parallel.layout.data, session.control.anywhere)
        if session.is_main:
            session.store.delete_key(f"jobkit/evaluation/{self._handouts - 1}")
        return DynamicBatches(missing, session.store, f"jobkit/evaluation/{self._handouts}")

    def _watched(
        self, handout: DynamicBatches | LockstepBatches, scores: SampleScores, may_stop: Callable[[], bool]
    ) -> Iterator[int]:
        """The batches handed to this rank; between two of them it gives a sign of life and looks for a notice."""
        session, before = self._session, scores.done
        session.progress["evaluation"] = {"done": before, "total": scores.length}
        for number in handout:
            yield number
            session.pulse.beat()
            done = min(scores.length, before + handout.taken * scores.batch_size)
            session.progress["evaluation"] = {"done": done, "total": scores.length}
            if session.notices.pending and may_stop():
                handout.stop()

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
                self._session.record(Event.EVALUATION_RESUMED, step=step, done=kept.done, total=kept.length)
        self._of_step.append(scores)
        return scores

    def keep(self, checkpoint: int | None) -> None:
        """The attempt is being stopped within an evaluation, or not: then there is nothing to keep.

        `checkpoint` is the step that the next attempt begins with, None where there is no checkpoint.
        """
        session = self._session
        if not self._under_way or not session.is_main:
            return
        kept = False
        if self._step == (checkpoint or 0) and code_version() is not None and session.owns_run():
            try:
                write_scores(session.run.evaluation_file, self._key(checkpoint), self._of_step)
                kept = True
            except OSError as error:
                print(f"jobkit: {error}; what is done of the evaluation will be repeated", flush=True)
        now = self._of_step[-1]
        session.record(Event.EVALUATION_INTERRUPTED, step=self._step, done=now.done, total=now.length, kept=kept)

    def _load(self) -> list[SampleScores]:
        """What was kept for an attempt like this one; what was kept for another is no longer needed."""
        session, found = self._session, None
        if session.is_main and self._step == (self._checkpoint or 0):
            found = read_scores(session.run.evaluation_file, self._key(self._checkpoint))
        if found is None:
            self._drop_kept()
        return session.control.from_main(found or [])  # type: ignore[return-value]

    def _key(self, checkpoint: int | None) -> dict[str, Any]:
        """What a kept evaluation belongs to."""
        return {"step": self._step, "checkpoint": checkpoint, "code": code_version()}

    def _drop_kept(self) -> None:
        self._kept = []
        if self._session.is_main:
            with suppress(OSError):
                self._session.run.evaluation_file.unlink(missing_ok=True)


def code_version() -> str | None:
    """The snapshot that this process runs; None for a script that nobody has taken one of."""
    folder = os.environ.get("JOBKIT_CODE")
    return Path(folder).name if folder else None


def write_scores(file: Path, key: dict[str, Any], evaluations: list[SampleScores]) -> None:
    """Write some evaluations and what they belong to, with a checksum in front; whole or not at all."""
    buffer = io.BytesIO()
    torch.save({"key": key, "evaluations": [vars(scores) for scores in evaluations]}, buffer)
    data = buffer.getvalue()
    write_atomic(file, hashlib.sha256(data).digest() + data)


def read_scores(file: Path, key: dict[str, Any]) -> list[SampleScores] | None:
    """The evaluations in a file; None where there is none, it is damaged, or it belongs to something else."""
    try:
        content = file.read_bytes()
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
