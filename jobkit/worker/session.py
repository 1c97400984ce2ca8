"""What a rank of an attempt has at hand: its place in the world, its run, and the services that the context uses."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from jobkit.checkpoint.store import Store as CheckpointStore
from jobkit.checkpoint.writer import Checkpointer
from jobkit.errors import EXIT_RESUMABLE
from jobkit.group import RankGroup
from jobkit.run import records
from jobkit.run.config import Config
from jobkit.run.disk import Outage
from jobkit.run.events import Event
from jobkit.run.records import Progress
from jobkit.run.rundir import RunDir
from jobkit.train.devices import check_precision, choose_device, group_backend, report
from jobkit.worker.cause import CauseFinder
from jobkit.worker.distributed import Control, shared_store
from jobkit.worker.heartbeat import Heartbeat
from jobkit.worker.launcher import Topology
from jobkit.worker.meeting import Meeting
from jobkit.worker.notices import NOTICES, Notices

if TYPE_CHECKING:
    from jobkit.worker.metrics import MetricLog, Position


@dataclass
class Session:
    """One rank's services; rank 0 alone writes to the journal, to TensorBoard and to the progress report."""

    run: RunDir
    config: Config
    attempt: int
    topology: Topology
    device: torch.device
    control: Control
    checkpointer: Checkpointer
    cause: CauseFinder
    store: Store = field(default_factory=HashStore)
    """Counters that all ranks share."""
    owns_group: bool = True
    """Whether the process group ends with the session; one that the script made is the script's."""
    notices: Notices = NOTICES
    metrics: MetricLog | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    pulse: Heartbeat = field(default_factory=Heartbeat)
    on_progress: Callable[[Progress], None] | None = None
    """Where a function runs without a follower outside, who draws its progress bar."""
    _unwritten: deque[dict[str, Any]] = field(default_factory=deque)
    _status_is_old: bool = False
    _recording: threading.Lock = field(default_factory=threading.Lock)
    _journal_outage: Outage = field(
        default_factory=lambda: Outage(
            "the journal", "Training goes on, its events are kept in memory; the checkpoints that are there are safe."
        )
    )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.topology.rank == 0

    def record(self, event: Event, **fields: Any) -> None:
        """Journal an event of this attempt, once: on rank 0. What the disk does not take now is written later."""
        if self.is_main:
            entry = {"event": event, "time": round(time.time(), 3), "attempt": self.attempt, **fields}
            with self._recording:
                self._unwritten.append(entry)
            self._try_to_write_journal()

    def write_journal(self) -> None:
        """Write the events that are not in the journal yet, in their order; raises OSError when the disk is full."""
        with self._recording:
            if not (self._unwritten or self._status_is_old):
                return
            if not self.owns_run():
                raise OSError(errno.EIO, "cannot be read", str(self.run.lease_file))
            while self._unwritten:
                self.run.journal.append(**self._unwritten[0])
                self._unwritten.popleft()
                self._status_is_old = True
            self.run.write_status()
            self._status_is_old = False
            self._journal_outage.end()

    def _try_to_write_journal(self) -> None:
        try:
            self.write_journal()
        except OSError as error:
            self._journal_outage.begin(error)

    def owns_run(self) -> bool:
        """Whether this attempt may write: not where the lease cannot be read. A ghost, which has lost it, ends here."""
        owner = self.run.owner()
        if owner is not None and owner != self.attempt:
            print(
                f"jobkit: attempt {owner} has taken {self.run.name} over; attempt {self.attempt} leaves without a word",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_RESUMABLE)
        return owner is not None

    def start_metrics(self, position: Position, first_step: int) -> None:
        """Cut TensorBoard's files back to a checkpoint's position and continue them from there."""
        if self.is_main:
            # Imported on rank 0 alone: TensorBoard costs a second, times the ranks of a node.
            from jobkit.worker.metrics import MetricLog, rewind

            rewind(self.run.tensorboard, position)
            self.metrics = MetricLog(self.run.tensorboard, first_step, self._tick, self.owns_run)

    def mark_metrics(self) -> Future[Position]:
        """The position after everything logged so far, once it is on the disk."""
        if self.metrics is not None:
            return self.metrics.mark()
        nothing: Future[Position] = Future()
        nothing.set_result({})
        return nothing

    def _tick(self, latest: dict[str, float]) -> None:
        """A few times a second, in the metrics' thread."""
        if self.owns_run():
            self._try_to_write_journal()
            self._report(latest)

    def _report(self, latest: dict[str, float]) -> None:
        own = ("perf/", "final/", "train/lr")  # the user's values are what a progress bar has room for
        shown = {tag: value for tag, value in latest.items() if not tag.startswith(own)}
        values = dict(list(shown.items())[:4])
        known = {**self.progress, **self.pulse.report()}
        report = Progress(attempt=self.attempt, time=time.time(), values=values, **known)
        with suppress(OSError):  # only a view, and the journal's own trouble has been said
            records.write(self.run.progress_file, report, durable=False)
        if self.on_progress is not None:
            self.on_progress(report)
        self.cause.replace_dead_script()

    def close(self) -> None:
        """Finish what is being written, on all ranks together, and leave the process group."""
        self.checkpointer.close()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None
        if dist.is_initialized():
            self.control.barrier()  # rank 0 holds the store: it leaves with the others, not before
            if self.owns_group:
                dist.destroy_process_group()


def open_session(run: RunDir, config: Config, attempt: int, topology: Topology, device: torch.device) -> Session:
    """The session of a rank whose process group, if it needs one, stands."""
    control = Control(topology.world_size)
    store = CheckpointStore(run.checkpoints, attempt=str(attempt))
    if topology.rank == 0:
        store.clean()
    checkpointer = Checkpointer(
        store,
        RankGroup.of_world(),  # of its own: the writing thread's collectives must not meet the training's
        keep=config.checkpoint.keep,
        may_publish=lambda: run.owner() == attempt,
    )
    cause = CauseFinder(run, attempt, NOTICES)
    if topology.rank == 0:
        cause.look_around()
    shared = shared_store(topology.world_size)
    return Session(run, config, attempt, topology, device, control, checkpointer, cause, shared)


def join(meeting: Meeting, run: RunDir, config: Config, attempt: int) -> Session:
    """Choose this rank's device, form the process group and open the session, on all ranks of a meeting together.

    Raises DistributedError on all of them where one has no device.
    """
    topology = meeting.topology

    def choose() -> tuple[torch.device, str]:
        gpus = config.resources.gpus_per_task
        device = choose_device(config.device, gpus, topology.local_rank, topology.local_world_size)
        check_precision(device, config.precision)
        return device, group_backend(device, config.backend)

    device, backend = meeting.together(choose)
    meeting.form_group(backend)
    session = open_session(run, config, attempt, topology, device)
    session.owns_group = meeting.store is not None
    said = report(device, backend, topology.rank, topology.nodes, session.control.gather)
    if session.is_main or "JOBKIT_LOGS" in os.environ:  # elsewhere all ranks print into one terminal
        print(said, flush=True)
    return session
