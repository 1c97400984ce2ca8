"""The run directory: the one owner of every file name in it, and of who may write."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from jobkit.run import records
from jobkit.run.config import Config, read_resolved, write_resolved
from jobkit.run.events import Event
from jobkit.run.files import is_there, read_fresh, write_json
from jobkit.run.fold import fold
from jobkit.run.identity import Owner, identity
from jobkit.run.journal import Journal
from jobkit.run.locks import held, is_held, lock_at
from jobkit.run.records import FailureReport, Lease, Progress, StopRequest
from jobkit.run.status import Status, complete

CONFIG, JOURNAL, STATUS = "config.yaml", "events.jsonl", "status.json"

NOT_FOR_SCRIPTS = ("checkpoints", "code", "cache", "logs", "start_from")
"""Folders in which a script's own outputs would be taken for jobkit's, or removed."""

SHARED_CODE = ".code"
"""Beside the runs: snapshots that several runs share."""

BESIDE = ".locks"
"""A folder beside the runs: what is in it precedes its run, and outlives its removal."""

VERSION = r"(?:-([2-9]|[1-9]\d{1,6}))?"
"""What --fresh adds to a run's name; a hash, which may be digits alone, has eight."""

NUMBERED = ".number"
"""End of the name of a file there that says that a run was submitted."""


def launch_file(runs_dir: Path, launch: str) -> Path:
    """Where rank 0 says on which address and port the others find it, before they know which run it is."""
    return runs_dir / BESIDE / f"rendezvous-{launch}.json"


class RunDir:
    """Paths and small files of one run; holds no state of its own, so any process may make one at any time."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.name = self.path.name
        """`<name>-<hash8>`, also the job's name."""
        self.config_file = self.path / CONFIG
        self.journal = Journal(self.path / JOURNAL)
        self.status_file = self.path / STATUS
        self.fold_file = self.path / "status.fold.json"
        """What follows from the beginning of a long journal; may be deleted."""
        self.progress_file = self.path / "progress.json"
        self.lease_file = self.path / "lease.json"
        self.evaluation_file = self.path / "evaluation.pt"
        """What an attempt that was stopped within an evaluation had found of it."""
        self.checkpoints = self.path / "checkpoints"
        self.start_from = self.path / "start_from"
        """The checkpoint of another run that it starts from: it depends on nothing that becomes of that one."""
        self.tensorboard = self.path / "tensorboard"
        self.final = self.path / "final"
        self.notify_file = self.path / "notify.json"
        """The command of `--notify`, for its owner alone."""
        self.notified_file = self.path / "notified.json"
        """What the user has been told of by `notify`."""
        self.notify_log = self.path / "logs" / "notify.log"
        """What the commands of `notify` have printed."""
        self.outputs = self.path / "outputs"
        """The script's own: jobkit makes it where `${run_dir}` is used, and leaves alone what is in it."""
        self.code = self.path / "code"
        """Snapshots of the user's code, one folder a version."""
        self.compiled = self.path / "cache"
        """What compilers made of the user's code, one archive a version."""
        self.submitit = self.path / "logs" / "submitit"
        """Submitit's own folder: pickles and batch scripts."""
        self.submitted_pickle = self.submitit / "submitted.pkl"
        """What Submitit pickles, before there is a job to name it after."""
        self.batch_script = self.submitit / "submission.sh"
        """The newest submission's, for sbatch; of a job array a link to the one that all its runs have."""
        self.task_file = self.submitit / "array_task"
        """Which task of that array this run is."""
        self.failed_starts = self.submitit / "failed_starts"
        """A line for each node in a row on which a batch script has not begun an attempt."""
        self.imported_file = self.submitit / "imported.json"
        """What ranks have imported, for their parents."""
        self.secret_file = self.submitit / "secret"
        """What the processes of a Slurm job know each other by; only its owner can read it."""
        self.supervisor_log = self.submitit / "supervisor.log"
        """What a local supervisor says: it has no terminal."""

    def compiled_archive(self, version: str) -> Path:
        return self.compiled / f"{version}.tar"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / str(attempt)

    def rank_log(self, attempt: int, rank: int, stream: str = "out") -> Path:
        return self.logs(attempt) / f"rank_{rank}.{stream}"

    def error_file(self, attempt: int, rank: int) -> Path:
        return self.logs(attempt) / f"error_{rank}.json"

    def job_log(self, job_id: str) -> Path:
        """What the batch script of a Slurm job printed as errors, `setup` lines included."""
        # Beside the script, which an array has in a folder of its own.
        folder = self.batch_script.resolve().parent if "_" in job_id else self.submitit
        return folder / f"{job_id}_0_log.err"

    @property
    def array_task(self) -> int | None:
        """Which task of a job array the newest submission made of it; None where it has a job of its own."""
        try:
            return int(read_fresh(self.task_file))
        except FileNotFoundError:
            return None

    def srun_log(self, attempt: int) -> Path:
        """What srun itself said, which is how one learns who died first."""
        return self.logs(attempt) / "srun.err"

    def rendezvous_file(self, attempt: int) -> Path:
        """Where rank 0 of an attempt says on which address and port the others find it."""
        return self.logs(attempt) / "rendezvous.json"

    def launch_file(self, launch: str) -> Path:
        """The same for ranks that somebody else started, who do not know the attempt yet."""
        return self.path / "logs" / f"rendezvous-{launch}.json"

    def disk_file(self, token: str) -> Path:
        """Made by a rank at its start, for others to see that they have the same disk."""
        return self.path / "logs" / f"seen-{token}"

    def stop_request_file(self, attempt: int) -> Path:
        return self.logs(attempt) / "notice.json"

    def submission_lock(self) -> AbstractContextManager[FileLock]:
        """Held while deciding about, and making, one submission; after a while it says who is waited for."""
        return held(self._lock("submit", self._first_version), f"at work on {self._first_version}")

    def is_being_submitted(self) -> bool | None:
        """Whether somebody is making a submission; None where nobody here can know. Nothing is written."""
        return is_held(self._lock_file("submit", self._first_version))

    @property
    def _first_version(self) -> str:
        # One lock for all versions of a run: to make the next one is to decide about this one.
        return re.sub(f"(-[0-9a-f]{{8}}){VERSION}$", r"\1", self.path.resolve().name)

    def alive_lock(self) -> FileLock:
        """Held by a local attempt's supervisor as long as it lives: the kernel releases it however that ends."""
        return self._lock("alive")

    def has_local_supervisor(self) -> bool | None:
        """Whether a local attempt's supervisor lives, here or on another machine that shares the file system.

        None where nobody here can know: the lock may not be read, or the file system has none. Nothing is written.
        """
        return is_held(self._lock_file("alive"))  # not its process id, which may be another process's by now

    def begin_lock(self) -> FileLock:
        """Held while one job decides whether it may begin the next attempt."""
        return self._lock("begin")

    def mirror_file(self, service: str) -> Path:
        """What was copied to another service of what was logged."""
        return self.path / f"mirror-{service}.json"

    def mirror_lock(self, service: str) -> FileLock:
        """Held by the one process that copies what was logged to a service."""
        return self._lock(f"mirror-{service}")

    def _lock(self, purpose: str, name: str | None = None) -> FileLock:
        return lock_at(self._lock_file(purpose, name), elsewhere="set --runs-dir or JOBKIT_RUNS")

    def _lock_file(self, purpose: str, name: str | None = None) -> Path:
        path = self.path.resolve()  # a link to the run leads to the same lock
        return path.parent / BESIDE / f"{name or path.name}.{purpose}"

    def keep_number(self) -> None:
        """Remember that there is a run of this name: `next_version` is not to give its number again."""
        self._number_file().touch()

    def forget_number(self) -> None:
        """The opposite, for a run of which nobody is told."""
        self._number_file().unlink(missing_ok=True)

    def _number_file(self) -> Path:
        locks = self.path.parent / BESIDE
        locks.mkdir(parents=True, exist_ok=True)
        return locks / f"{self.name}{NUMBERED}"

    def exists(self) -> bool:
        """Whether it has been made, by whichever host."""
        return is_there(self.config_file)

    def config(self) -> Config:
        """The run's config, for its owner with what is secret in it; for others that is masked."""
        return read_resolved(self.config_file)

    def write_config(self, config: Config) -> None:
        """Replace the config; values with secret names go into a file that only their owner can read."""
        write_resolved(self.config_file, config)

    def status(self) -> Status:
        """What the journal and the running attempt's report say; a scheduler is not asked."""
        return complete(fold(self.journal.path, self.fold_file), self.progress())

    def write_status(self) -> Status:
        """Bring status.json up to date with the journal, and return what it says."""
        status = complete(fold(self.journal.path, self.fold_file, keep=True), self.progress())
        write_json(self.status_file, status.as_dict(), durable=False)
        return status

    def record(self, event: Event, **fields: Any) -> None:
        """Append to the journal and let status.json follow, unless the disk has no room for what is only derived."""
        self.journal.append(event, **fields)  # first: it is the truth, which status.json is derived from
        with suppress(OSError):
            self.write_status()

    def progress(self) -> Progress | None:
        """The newest report of an attempt, which need not be the newest attempt."""
        return records.read(Progress, self.progress_file)

    def lease(self) -> Lease | None:
        """Who owns this directory; None where there is no lease yet, or it cannot be read."""
        return records.read(Lease, self.lease_file)

    def owner(self) -> int | None:
        """The attempt that holds the lease; None as for `lease`."""
        lease = self.lease()
        return None if lease is None else lease.attempt

    def stop_request(self, attempt: int) -> StopRequest | None:
        """Why jobkit itself has asked an attempt to stop; None when it has not."""
        return records.read(StopRequest, self.stop_request_file(attempt))

    def failure_reports(self, attempt: int) -> list[FailureReport]:
        """What the ranks of an attempt that failed wrote down, the earliest first by their nodes' clocks."""
        logs = self.logs(attempt)
        files = logs.glob("error_*.json") if is_there(logs) else ()
        found = [records.read(FailureReport, file) for file in files]
        return sorted((one for one in found if one is not None), key=lambda one: one.time)


def owner_of(run: RunDir) -> Owner:
    """Whose the checkpoints are that are written in a run directory."""
    return Owner(run.name, identity(run.config()))
