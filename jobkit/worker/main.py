"""What Submitit pickles: the run's directory and nothing else. The rest is on disk, where a requeue finds it too."""

from __future__ import annotations

import gc
from dataclasses import dataclass


@dataclass(frozen=True)
class Worker:
    """Runs one rank of one attempt."""

    run: str
    """The run directory."""

    def __call__(self) -> None:
        # Imported in the job only: the submitting side pickles this class and must not pay for torch.
        from jobkit.log import configure
        from jobkit.run import compiler_cache
        from jobkit.run.rundir import RunDir

        configure("stdout")
        compiler_cache.use(RunDir(self.run))  # before torch, which reads the variables when it is imported
        if RunDir(self.run).config().command:
            from jobkit.worker.command import become_command

            become_command(self.run)
        else:
            gc.disable()  # what an import makes stays: to look through it while it grows takes 0.8 s of torch's 7
            from jobkit.worker.task import run_rank

            gc.freeze()  # nor does a collection during training look through them
            gc.enable()
            run_rank(self.run)
