"""The run directory: the one owner of every file name in it.

runs/<name>-<hash8>/
  config.yaml  code -> ../.code/<digest>     written by the submission, before there is a job
  events.jsonl  status.json                  run/journal.py
  requests/  ends/  progress.json  lease.json  supervisor.json      run/records.py
  checkpoints/step_00000500/  latest  best   tensorboard/  final/   written by ranks
  logs/<attempt>/rank_<n>.{out,err}          what ranks print; srun.err: what srun says
  submitit/                                  pickle, batch script, what the batch script prints
runs/.locks/<name>.{submit,begin}            locks outlive the run that they are about
runs/.code/<digest>/                         code snapshots, shared by runs
"""

from __future__ import annotations

import re
from pathlib import Path

from jobkit.errors import InputError
from jobkit.run import records
from jobkit.run.files import foreign_owner, is_there
from jobkit.run.locks import Lock
from jobkit.run.records import Contact, End, Lease, Progress, Request
from jobkit.run.schema import Config

CHECKPOINT = re.compile(r"step_(\d{8,})")


class RunDir:
    """Paths and records of one run. It holds no state, so that any process may make one at any time.

    run = RunDir("runs/toy-11f5f19c")
    run.progress()          # Progress(attempt=2, step=137, ...)
    run.durable_step()      # 120
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.name = self.path.name
        """`<name>-<hash8>`, also the job's name."""

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    # Files

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def journal_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def lease_file(self) -> Path:
        return self.path / "lease.json"

    @property
    def contact_file(self) -> Path:
        return self.path / "supervisor.json"

    @property
    def progress_file(self) -> Path:
        return self.path / "progress.json"

    @property
    def notify_file(self) -> Path:
        """The command of `--notify`, for its owner alone."""
        return self.path / "notify.json"

    @property
    def code(self) -> Path:
        """A link to the code snapshot of the newest submission."""
        return self.path / "code"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def outputs(self) -> Path:
        """The user's own: jobkit makes the folder where `${run_dir}` is used, and leaves alone what is in it."""
        return self.path / "outputs"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    @property
    def pickle_file(self) -> Path:
        """The pickled Worker that each rank runs."""
        return self.submitit / "submitted.pkl"

    @property
    def batch_script(self) -> Path:
        """The newest submission's script, on Slurm and on this machine; readable by its owner alone."""
        return self.submitit / "job.sh"

    @property
    def job_log(self) -> Path:
        """What the batch script and the supervisor print, of all jobs of the run one after the other."""
        return self.submitit / "job.log"

    @property
    def failed_starts(self) -> Path:
        """A line for each supervisor in a row that began no attempt; `begin` removes the file."""
        return self.submitit / "failed_starts"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / str(attempt)

    def rank_log(self, attempt: int, rank: int, stream: str = "out") -> Path:
        return self.logs(attempt) / f"rank_{rank}.{stream}"

    def agent_log(self, attempt: int, node: str = "%N") -> Path:
        """What an agent prints that was started for this attempt; srun puts the node's name in the place of `%N`."""
        return self.logs(attempt) / f"agent_{node}.log"

    def srun_log(self, attempt: int) -> Path:
        return self.logs(attempt) / "srun.err"

    def ends_folder(self, attempt: int) -> Path:
        return self.path / "ends" / str(attempt)

    def end_file(self, attempt: int, rank: int) -> Path:
        return self.ends_folder(attempt) / f"{rank}.json"

    def request_file(self, kind: str) -> Path:
        return self.path / "requests" / f"{kind}.json"

    # Locks

    def submit_lock(self) -> Lock:
        """Held while somebody decides about, and makes, a submission, and by the sbatch that this starts."""
        return Lock(self._lock_file("submit"))

    def begin_lock(self) -> Lock:
        """Held while one process begins or closes an attempt."""
        return Lock(self._lock_file("begin"))

    def alive_lock(self) -> Lock:
        """Held by the job script and the supervisor of a local job, as long as either lives."""
        return Lock(self._lock_file("alive"))

    def _lock_file(self, purpose: str) -> Path:
        path = self.path.resolve()  # a link to the run leads to the same lock
        return path.parent / ".locks" / f"{path.name}.{purpose}"

    # Records

    def exists(self) -> bool:
        """Return whether the run has been made, by whichever host."""
        return is_there(self.config_file)

    def refuse_foreign(self) -> None:
        """Raise InputError if another user wrote what executes as this one; a group may write in the directory."""
        for path in (self.config_file, self.pickle_file, self.code):
            if is_there(path) and (owner := foreign_owner(path, self.path)) is not None:
                raise InputError(f"belongs to {owner}, not to the run's owner", hint="submit the run again").at(path)

    def config(self) -> Config:
        """Return the run's config, with the environment's values. Raises InputError where a variable is not set."""
        from jobkit.run.load import read_resolved  # omegaconf, which lists of runs do not need

        return read_resolved(self.config_file)

    def lease(self) -> Lease | None:
        return records.read(Lease, self.lease_file)

    def contact(self) -> Contact | None:
        return records.read(Contact, self.contact_file)

    def progress(self) -> Progress | None:
        """Return the newest report of an attempt, which need not be the newest attempt."""
        return records.read(Progress, self.progress_file)

    def ends(self, attempt: int) -> list[End]:
        """Return what the ranks of an attempt have left, in the order of their ranks."""
        folder = self.ends_folder(attempt)
        files = folder.glob("*.json") if is_there(folder) else ()
        ends = [records.read(End, file) for file in files]
        return sorted((end for end in ends if end is not None), key=lambda end: end.rank)

    def request(self, kind: str) -> Request | None:
        return records.read(Request, self.request_file(kind))

    def durable_step(self) -> int | None:
        """Return the step of the newest complete checkpoint: its folder has its name once it is complete."""
        if not is_there(self.checkpoints):
            return None
        names = (CHECKPOINT.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return max((int(match[1]) for match in names if match), default=None)
