"""The run directory: the one owner of every file name in it.

runs/<name>-<hash8>/
  config.yaml  code -> ../.code/<digest>     written by the submission, before there is a job
  notify                                     the command of --notify; readable by its owner alone
  events.jsonl  status.json                  run/journal.py
  requests/  ends/  progress.json  lease.json  supervisor.json      run/records.py
  seeds.json                                 what the program has seeded itself, of the first attempt
  start.json  start/                         of --from: the other run's checkpoint, where its weights alone are taken
  checkpoints/step_00000500/   tensorboard/    written by ranks
  checkpoints/branches/<n>/                  set aside by `rewind`
  logs/<attempt>/rank_<n>.{out,err}          what ranks print; srun.err: what srun says
  submitit/                                  pickle, batch script, what the batch script prints
runs/.locks/<name>.{submit,begin}            locks outlive the run that they are about
runs/.code/<digest>/                         code snapshots, shared by runs
"""

from __future__ import annotations

import dataclasses
import errno
import json
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.errors import InputError
from jobkit.log import log
from jobkit.run import records
from jobkit.run.files import foreign_owner, is_there, read_fresh, user_name
from jobkit.run.locks import Lock
from jobkit.run.records import Contact, Drill, Interruption, Lease, Origin, Progress, RankReport, Request, RequestKind

if TYPE_CHECKING:
    from jobkit.config.load import Loaded
    from jobkit.config.schema import Config
    from jobkit.run.status import Status

CHECKPOINT = re.compile(r"step_(\d{8,})")

FRAMEWORK = "framework"
"""The folder within a checkpoint in which a framework keeps files of its own."""


class _Path:
    """An attribute of RunDir: a path in the run directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self.name


class RunDir:
    """Paths and records of one run. It holds no state, so that any process may make one at any time.

    run = RunDir("runs/toy-11f5f19c")
    run.progress()          # Progress(attempt=2, step=137, ...)
    run.durable_step()      # 120
    """

    config_file = _Path("config.yaml")
    journal_file = _Path("events.jsonl")
    status_file = _Path("status.json")
    lease_file = _Path("lease.json")
    contact_file = _Path("supervisor.json")
    progress_file = _Path("progress.json")
    code = _Path("code")
    """A link to the code snapshot of the newest submission."""
    notify_file = _Path("notify")
    notify_log = _Path("logs/notify.log")
    """The command of `--notify`, and its output; both are for their owner alone."""
    checkpoints = _Path("checkpoints")
    tensorboard = _Path("tensorboard")
    final = _Path("final")
    """The whole weights, the config and the result of a run that has finished."""
    seeds_file = _Path("seeds.json")
    """What the program seeded itself in the first attempt; without a file it seeded nothing."""
    start_file = _Path("start.json")
    start_folder = _Path("start")
    """The checkpoint of another run, where its weights alone are taken."""
    branches = _Path("checkpoints/branches")
    drill_file = _Path("drill.json")
    trace_folder = _Path("trace")
    """Of a run of `jobkit verify`: its orders, and the values that its ranks came by."""
    outputs = _Path("outputs")
    """The user's own files: jobkit makes the folder if `${run_dir}` is used, and touches nothing in it."""
    submitit = _Path("submitit")
    pickle_file = _Path("submitit/submitted.pkl")
    """The pickled Worker that each rank runs."""
    batch_script = _Path("submitit/job.sh")
    """The newest submission's script, on Slurm and on this machine; readable by its owner alone."""
    job_log = _Path("submitit/job.log")
    """What the batch script and the supervisor print, of all jobs of the run one after the other."""
    failed_starts = _Path("submitit/failed_starts")
    """A line for each supervisor in a row that began no attempt; `begin` removes the file."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.folder = str(self.path)
        """The path as a text."""
        self.name = self.path.name
        """`<name>-<hash8>`, also the job's name."""

    @classmethod
    def listed(cls, runs_dir: Path, name: str) -> RunDir:
        """Return RunDir(runs_dir / name) of an absolute path. Its Path is made on first use: a list has thousands."""
        run = cls.__new__(cls)
        run.folder, run.name = f"{runs_dir}/{name}", name
        return run

    @cached_property
    def path(self) -> Path:
        return Path(self.folder)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / str(attempt)

    def rank_log(self, attempt: int, rank: int, stream: str = "out") -> Path:
        return self.logs(attempt) / f"rank_{rank}.{stream}"

    def agent_log(self, attempt: int, node: str = "%N") -> Path:
        """The output of an agent that was started for this attempt; srun puts the node's name in the place of `%N`."""
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

    def refuse_absence(self) -> None:
        """Raise OSError for a run that has been made and is not there: an empty mount point says nothing about it."""
        if not self.exists():
            raise OSError(errno.ESTALE, "the run directory is not there", self.folder)

    def refuse_foreign(self) -> None:
        """Raise InputError if another user wrote files that would run as this user; a group may own the directory."""
        for path in (self.config_file, self.pickle_file, self.code):
            if is_there(path) and (owner := foreign_owner(path, self.path)) is not None:
                raise InputError(f"belongs to {owner}, not to the run's owner", hint="submit the run again").at(path)

    def config(self) -> Config:
        """Return the run's config, with the environment's values. Raises InputError where a variable is not set."""
        from jobkit.config.load import read_resolved  # omegaconf, which lists of runs do not need

        return read_resolved(self.config_file)

    def with_kept_seed(self, loaded: Loaded) -> Loaded:
        """Return the config with the seed in config.yaml, if that is there: a run keeps the seed it began with.

        Its name says `seed: 0` for auto as well, and auto was 0 in runs from before `params.seed` counted.
        """
        from jobkit.config.schema import AUTO, seed_of
        from jobkit.config.yamlfile import read_yaml

        if loaded.config.seed not in (AUTO, 0) or not seed_of(loaded.config.params) or not is_there(self.config_file):
            return loaded
        try:
            kept = read_yaml(self.config_file)[0].get("seed", AUTO)
        except InputError:  # damaged: it is about to be written anew
            return loaded
        if not isinstance(kept, int) or kept == loaded.config.random_seed:
            return loaded
        log.info("%s began with seed %s, and keeps it", self.name, kept)
        return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, seed=kept))

    def lease(self) -> Lease | None:
        """Return the lease; None before the first attempt. Raises OSError: a disk that is away takes no lease away."""
        try:
            return records.of(Lease, json.loads(read_fresh(self.lease_file)))
        except FileNotFoundError:
            self.refuse_absence()
            return None

    def contact(self) -> Contact | None:
        return records.read(Contact, self.contact_file)

    def progress(self) -> Progress | None:
        """Return the newest report of an attempt, which need not be the newest attempt."""
        return records.read(Progress, self.progress_file)

    def ends(self, attempt: int) -> list[RankReport]:
        """Return the RankReports of an attempt's ranks, in the order of the ranks."""
        folder = self.ends_folder(attempt)
        files = folder.glob("*.json") if is_there(folder) else ()
        ends = [records.read(RankReport, file) for file in files]
        return sorted((end for end in ends if end is not None), key=lambda end: end.rank)

    def start(self) -> Origin | None:
        """Return the Origin of a run with --from; None for a run that begins at step 0 with new weights."""
        return records.read(Origin, self.start_file)

    def drill(self) -> Drill | None:
        """Return the orders of `jobkit verify`; None for a run of a user's."""
        drill = records.read(Drill, self.drill_file)
        if drill is None:
            return None
        items = [records.of(Interruption, item) for item in drill.interruptions]  # type: ignore[arg-type]
        return dataclasses.replace(drill, interruptions=items)

    def request(self, kind: str) -> Request | None:
        return records.read(Request, self.request_file(kind))

    def ask(self, kind: RequestKind, status: Status, grace: float | None = None) -> None:
        """Leave a request for the supervisor, which looks once a second.

        It is about the newest attempt: the open one, or the one after which none shall begin (0: none has begun yet). A
        request about an earlier attempt, or another submission, is stale.
        """
        attempt = status.attempt.number if status.attempt is not None else 0
        submission = status.person_submission
        request = Request(kind=kind, submission=submission, attempt=attempt, grace=grace, user=user_name())
        file = self.request_file(kind)
        file.parent.mkdir(exist_ok=True)
        records.write(file, request, durable=False)

    def durable_step(self) -> int | None:
        """Return the step of the newest complete checkpoint."""
        return max(self.durable_steps(), default=None)

    def durable_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order: a folder has its name once it is complete."""
        if not is_there(self.checkpoints):
            return []
        names = (CHECKPOINT.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def unfinished_bytes(self) -> int:
        """Return the size of the checkpoint that is being written: a save that makes progress changes it."""
        with suppress(OSError):  # it may get its name in this moment
            return sum(file.stat().st_size for file in self.checkpoints.glob(".step_*/**/*"))
        return -1

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"
