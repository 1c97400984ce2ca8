"""Evaluations of a run: who computes which batch, how far it is, and what is kept of one that is broken off."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jobkit.log import log
from jobkit.run.events import Event
from jobkit.run.files import foreign_owner, read_fresh, replacing
from jobkit.train.batches import DynamicBatches, HandOut, LockstepBatches
from jobkit.train.ddp_buffers import independent_forwards
from jobkit.train.evaluate import computed
from jobkit.train.kept_attributes import checksum
from jobkit.train.outputs import Outputs
from jobkit.train.parallel import Parallel
from jobkit.worker.called import called
from jobkit.worker.lease import holds_lease
from jobkit.worker.rank import Rank
from jobkit.worker.rendezvous import shared_store
from jobkit.worker.reporter import RunReporter
from jobkit.worker.stop import Stopped, StopSignals

BEFORE_LOOP, IN_STEP, AFTER_LOOP = PLACES = ("before the loop", "in the step", "after the loop")
"""Where a step's evaluations are made, in the order in which a run comes there; the last is after the last step, before
which the newest checkpoint was written."""


class Evaluator:
    """One rank's evaluations; what is known when one of them is stopped is kept for the next attempt.

    That takes it up where it comes by the same evaluation of the same step, with the same code, and has trained nothing
    since the checkpoint that was written at the stop. After the last step it takes up what the repeated step has given
    the same weights for, to the last bit. `restored` is the step of the checkpoint this one began with.
    """

    def __init__(
        self, rank: Rank, reporter: RunReporter, parallel: Parallel, signals: StopSignals, restored: int | None
    ) -> None:
        self._rank, self._reporter, self._parallel, self._signals = rank, reporter, parallel, signals
        self._restored = restored
        self._store = shared_store(rank.topology.world_size)
        self._kept: list[Outputs] = []
        """What an earlier attempt has found of this step's evaluations: rank 0 has it, all know of which batches."""
        self._step: int | None = None
        self._place = ""
        self._of_step: list[Outputs] = []
        """The evaluations of this step so far, at this place, in their order; as `_kept`."""
        self._handouts = 0

    def run(
        self,
        function: Callable[[Any, Tensor], Any],
        dataset: Any,
        *,
        batch_size: int,
        step: int,
        equal: Iterable[nn.Module],
        may_stop: Callable[[], bool],
        stop_if_told: Callable[[], None],
        place: str = BEFORE_LOOP,
        to_all: bool = True,
        **options: Any,
    ) -> Any:
        """The outputs of all samples, on every rank or on rank 0; see Context.map.

        `may_stop`: whether nothing of the step would be repeated. `stop_if_told` is called on all ranks after a signal;
        it raises Stopped, or it was a false alarm. `place`, of PLACES, tells evaluations of one step
        apart. `equal` are modules whose buffers are the same on all ranks;
        `options` are those of jobkit.train.evaluate.computed.
        """
        equal = list(equal)
        of = called(function, dataset) if _can_be_kept() else ""
        if of and place == AFTER_LOOP:  # a repeated step may lead to other weights, as on a GPU: it is another's then
            of += f", of {self._weights(equal)}"
        outputs = self._begin(step, place, Outputs(len(dataset), batch_size), of)
        group, stoppable = self._rank.group, True
        try:
            while missing := outputs.missing():
                batches = self._hand_out(missing)
                # In lockstep all ranks make equally many forward passes, and may exchange what they like in them.
                alone = isinstance(batches, DynamicBatches) and group.world_size > 1
                with independent_forwards(equal) if alone else nullcontext():
                    self._compute(outputs, batches, function, dataset, may_stop if stoppable else _never, options)
                outputs.agree(group)
                if outputs.missing():  # some rank was told to stop
                    told, touched = group.maximum(self._signals.pending, not may_stop())
                    if told and not touched:
                        stop_if_told()
                    else:
                        stoppable = False  # going on to the end repeats least
            # What is done of a step is not repeated where a stop breaks off a later evaluation of the same step.
            result = outputs.gathered(group, to_all=to_all, keep=may_stop(), on_piece=self._reporter.heartbeat.beat)
        except Stopped as stopped:
            self._keep(outputs, stopped.checkpoint)
            raise
        finally:
            self._reporter.update(evaluation=None)
        if (kept := self._kept_at(place)) and len(self._of_step) >= len(kept):
            self._drop_kept()
        return result

    def _weights(self, modules: Sequence[nn.Module]) -> list[str]:
        """What tells some modules' parameters and buffers from others that differ in a bit. Collective."""
        tensors = [one for module in modules for one in (*module.parameters(), *module.buffers())]
        parts = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
        return sorted({f"{found:08x}" for found in self._rank.group.gather(checksum(parts))})

    @property
    def has_run(self) -> bool:
        """Whether anything has been evaluated."""
        return self._handouts > 0

    def end_step(self) -> None:
        """Let go of what the step's evaluations have found: nothing of them will be repeated."""
        self._of_step = []

    def _hand_out(self, missing: list[int]) -> HandOut:
        parallel, ranks = self._parallel, self._rank.topology.world_size
        self._handouts += 1
        # Replicas that drift apart give each batch another value: who computes it must not depend on the clock.
        if parallel.forward_is_collective or parallel.drifts:
            return LockstepBatches(missing, parallel.data_rank, parallel.layout.data, self._rank.group.anywhere)
        if self._rank.is_main:  # nobody asks for it any more: all ranks have gathered since
            self._store.delete_key(f"jobkit/evaluation/{self._handouts - 1}")
        return DynamicBatches(missing, self._store, f"jobkit/evaluation/{self._handouts}", ranks)

    def _compute(
        self,
        outputs: Outputs,
        batches: HandOut,
        function: Callable[[Any, Tensor], Any],
        dataset: Any,
        may_stop: Callable[[], bool],
        options: dict[str, Any],
    ) -> None:
        """The batches handed to this rank; after each it sends a heartbeat and looks for a signal.

        An error of one rank is raised on all, unless they are waiting for each other in a forward pass.
        """
        rank, before = self._rank, outputs.done

        def compute() -> None:
            options_of_rank = {"device": rank.device, "seed": rank.config.seed or 0, **options}
            with closing(computed(function, dataset, outputs, batches, **options_of_rank)) as results:
                self._reporter.update(evaluation={"done": before, "total": outputs.length})
                for number, output in results:
                    outputs.add(number, output)
                    self._reporter.heartbeat.beat()
                    done = min(outputs.length, before + batches.taken * outputs.batch_size)
                    self._reporter.update(evaluation={"done": done, "total": outputs.length})
                    if self._signals.pending and may_stop():
                        batches.stop()

        def or_stop() -> None:
            try:
                compute()
            except Exception:
                batches.stop()
                raise

        compute() if isinstance(batches, LockstepBatches) else rank.group.all_or_none(or_stop)

    # Across attempts

    def _begin(self, step: int, place: str, outputs: Outputs, of: str) -> Outputs:
        """The next evaluation of a step, with what an earlier attempt has found of it."""
        outputs.of = f"{place}: {of}"
        if step != self._step:
            first, self._step, self._of_step = self._step is None, step, []
            self._kept = self._load() if first or step == (self._restored or 0) + 1 else []
        if place != self._place:
            self._place, self._of_step = place, []
        if len(self._of_step) < len(here := self._kept_at(place)):
            kept = here[len(self._of_step)]
            same = (kept.length, kept.batch_size, kept.of) == (outputs.length, outputs.batch_size, outputs.of)
            if self._rank.group.broadcast(same):  # rank 0 has the outputs; what a function holds may differ by rank
                outputs = kept
                self._reporter.record(Event.EVALUATION_RESUMED, step=step, done=kept.done, total=kept.length)
            else:
                self._drop_kept()  # nor do those after it stand where they stood
        self._of_step.append(outputs)
        return outputs

    def _kept_at(self, place: str) -> list[Outputs]:
        return [one for one in self._kept if one.of.startswith(f"{place}: ")]

    def _keep(self, now: Outputs, checkpoint: int | None) -> None:
        """Keep what is known for an attempt that begins with the checkpoint of this step, None for none at all.

        The checkpoint is safe by now: whatever goes wrong here costs a repetition.
        """
        run, kept = self._rank.run, False
        repeated = 1 if self._place == AFTER_LOOP and checkpoint is not None else 0  # steps
        if self._step == (checkpoint or 0) + repeated and _can_be_kept():
            try:
                now.collect(self._rank.group, self._reporter.heartbeat.beat)
                if self._rank.is_main and holds_lease(run, self._rank.attempt):
                    write_outputs(run.evaluation_file, self._key(self._step, checkpoint), self._of_step)
                    kept = True
            except Exception as error:
                log.info("%s; what is done of the evaluation will be repeated", error)
        if self._rank.is_main:
            counts = {"done": now.done, "total": now.length, "known": sum(one.done for one in self._of_step)}
            where = {"step": self._step, "place": PLACES.index(self._place)}
            self._reporter.record(Event.EVALUATION_INTERRUPTED, **where, **counts, kept=kept)

    def _load(self) -> list[Outputs]:
        """What was kept for an attempt like this one; what was kept for another is no longer needed."""
        found, ahead = None, (self._step or 0) - (self._restored or 0)
        if self._rank.is_main and ahead in (0, 1):
            found = self._read(self._step)
        if found is None and not (self._rank.is_main and ahead == 0 and self._read((self._step or 0) + 1)):
            self._drop_kept()  # nor is it of what follows the last step, which is the next
        headers = self._rank.group.broadcast([one.header() for one in found or []])
        return found or [Outputs.of_header(header) for header in headers]

    def _read(self, step: int | None) -> list[Outputs] | None:
        """What was kept of a step for an attempt that begins where this one has begun."""
        run = self._rank.run
        return read_outputs(run.evaluation_file, self._key(step, self._restored), run.path)

    def _key(self, step: int | None, checkpoint: int | None) -> dict[str, Any]:
        return {"step": step, "checkpoint": checkpoint, "code": Path(os.environ.get("JOBKIT_CODE", "")).name}

    def _drop_kept(self) -> None:
        self._kept = []
        if self._rank.is_main:
            with suppress(OSError):
                self._rank.run.evaluation_file.unlink(missing_ok=True)


def _can_be_kept() -> bool:
    """Whether there is a snapshot of the code: without one a script may have changed by the next attempt."""
    return "JOBKIT_CODE" in os.environ


def write_outputs(file: Path, key: dict[str, Any], evaluations: list[Outputs]) -> None:
    """Write some evaluations and what they belong to, with a checksum in front; whole or not at all."""
    described = [(one.header(), [piece.numel() for piece in one.pieces]) for one in evaluations]
    header = pickle.dumps((key, described))
    pieces: list[Any] = [piece.numpy().data for one in evaluations for piece in one.pieces]
    checksum = hashlib.sha256()
    with replacing(file) as whole:
        whole.seek(checksum.digest_size)
        for part in (len(header).to_bytes(8, "little"), header, *pieces):
            whole.write(part)
            checksum.update(part)
        whole.seek(0)
        whole.write(checksum.digest())


def read_outputs(file: Path, key: dict[str, Any], folder: Path) -> list[Outputs] | None:
    """The evaluations in a file; None where there is none, it is damaged, or it belongs to something else.

    One that is not the owner's of `folder` is not read, since objects in it are unpickled.
    """
    try:
        content = bytearray(read_fresh(file))
        if foreign_owner(file, folder) is not None:
            return None
    except OSError:
        return None
    start = hashlib.sha256().digest_size
    if len(content) < start + 8 or hashlib.sha256(memoryview(content)[start:]).digest() != content[:start]:
        return None
    end = start + 8 + int.from_bytes(content[start : start + 8], "little")
    found, described = pickle.loads(memoryview(content)[start + 8 : end])
    if found != key:
        return None
    evaluations = []
    for header, sizes in described:
        evaluations.append(Outputs.of_header(header))
        for size in sizes:
            evaluations[-1].pieces.append(torch.frombuffer(content, dtype=torch.uint8, count=size, offset=end))
            end += size
    return evaluations


def _never() -> bool:
    return False
