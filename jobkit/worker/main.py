"""The object that Submitit pickles for each submission: the run's directory. Everything else is on the disk.

submission: Worker("runs/toy-11f5f19c") --pickle--> submitit/submitted.pkl --each rank--> Worker()()
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Worker:
    """Runs one rank of one attempt.

    SlurmExecutor(plan).submit(Worker(str(run.path)))
    """

    run: str
    """The run directory, as the submission saw it; JOBKIT_RUN is its place now, if somebody has moved it since."""

    def __call__(self) -> NoReturn:
        # Imported in the rank: the submission pickles this class and must be quick.
        from jobkit.config.machine import raise_open_files
        from jobkit.log import configure, log
        from jobkit.run.rundir import RunDir
        from jobkit.worker.task import run_rank

        configure("stdout")
        if warning := raise_open_files():
            log.warning("%s", warning)
        # Not returned: Submitit would pickle a result for each rank, and fail a rank that finished on a full disk.
        sys.exit(run_rank(RunDir(os.environ.get("JOBKIT_RUN", self.run))))
