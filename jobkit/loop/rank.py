"""A rank: one process of an attempt, its place among the others, and the ways in which it speaks to the outside.

agent --environment, page--> Rank --beats--> page --> agent (watchdog)
                                  --Progress--> progress.json (rank 0)
                                  --RankReport--> ends/<attempt>/<rank>.json (worker/ending.py)
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jobkit.config.schema import Config
from jobkit.errors import LostLease
from jobkit.run import records
from jobkit.run.records import Progress
from jobkit.run.rundir import RunDir
from jobkit.wire.pages import Page, Phase


@dataclass(eq=False)
class Rank:
    """One rank of one attempt.

    def train(rank: Rank):                       # `task: mytask:train`
        for step in range(rank.params["steps"]):
            rank.beat(step)
            rank.report(step=step + 1)
            if rank.stop_asked: ...              # save, then raise Stopped
        return {"steps": rank.params["steps"]}
    """

    run: RunDir
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    """Index of its node, from 0."""
    page: Page
    _loop_began: float | None = None
    _process: int = field(default_factory=os.getpid)

    @classmethod
    def of_environment(cls, run: RunDir) -> Rank:
        """The rank that an agent has made of this process (worker/rendezvous.py has the variables)."""
        return cls(
            run=run,
            attempt=int(os.environ["JOBKIT_ATTEMPT"]),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            node=int(os.environ["GROUP_RANK"]),
            page=Page.of_environment(os.environ) or Page.create(),
        )

    @cached_property
    def config(self) -> Config:
        """The run's config. Raises InputError if a variable of the environment is not set on this node."""
        return self.run.config()

    @cached_property
    def params(self) -> dict[str, Any]:
        """The YAML's `params`, with the run directory in the place of `${run_dir}`."""
        from jobkit.config.load import with_run_dir

        params: dict[str, Any] = with_run_dir(self.config.params, self.run.path)
        return params

    @property
    def is_here(self) -> bool:
        """True in the rank's own process; False in one that it has forked, which has no say in how the rank ends."""
        return os.getpid() == self._process

    @property
    def stop_asked(self) -> bool:
        """True once this rank has to save and end."""
        return self.page.stop_asked

    def beat(self, step: int, phase: Phase = Phase.STEPPING) -> None:
        """Say that `step` steps are done: once a step, and within evaluations and saves."""
        self.page.beat(self.attempt, phase, step)

    def beat_again(self) -> None:
        """Say that the rank lives, and waits for something slow."""
        beat = self.page.read()
        self.beat(beat.step, beat.phase)

    def report(self, **fields: Any) -> None:
        """Write progress.json, on rank 0; `fields` are those of records.Progress."""
        if self.rank == 0:
            if fields.get("step") is not None:
                self._loop_began = self._loop_began or time.time()
            progress = Progress(attempt=self.attempt, time=time.time(), loop_began=self._loop_began, **fields)
            with suppress(OSError):  # a view: the training goes on while the disk is full
                records.write(self.run.progress_file, progress, durable=False)

    def check_lease(self) -> None:
        """Raise LostLease if another attempt owns the run: before each file that others take for the truth.

        A node that was cut off, or a process that was stopped, may come back then. Raises OSError where the disk does
        not say who owns it.
        """
        lease = self.run.lease()
        if lease is None or lease.attempt != self.attempt:
            raise LostLease(
                f"another attempt has taken {self.run.name} over; attempt {self.attempt} writes nothing more"
            )
