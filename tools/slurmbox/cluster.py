"""The cluster: its directory, its daemons, and what tests do to it.

::

    Cluster.up -> munged, [mariadbd, slurmdbd], slurmctld, slurmd -N node1 ... nodeN
                  guard: waits for the process that uses the cluster, then takes the cluster down
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import config, processes
from .daemons import Daemons
from .processes import ClusterError, Process, free_ports, wait_until

PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
ACCOUNTING_PACKAGES = {"slurmdbd": "slurmdbd slurm-wlm-mysql-plugin", "mariadbd": "mariadb-server"}
LONGEST_DIRECTORY = 64  # the socket of a job step adds about 40 characters; the path of a socket has at most 107
FOLDERS = ("gpu", "log", "munge", "pids", "run", "spool", "state")
# Inside a job of another cluster, its variables would become options of every command here.
OUTER_VARIABLES = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_")


class MissingPackages(ClusterError):
    """Programs are missing; the message names the packages to install."""


class Cluster:
    """A Slurm cluster in `directory`; as a context manager it is up inside and removed afterwards.

    Example:
        with Cluster("/tmp/box", nodes=2) as cluster:
            job = cluster.command("sbatch", "--parsable", "--wrap=sleep 60")
            cluster.preempt(job)
    """

    def __init__(self, directory: Path | str, **settings: Any) -> None:
        self.dir = Path(directory).resolve()
        self.conf = self.dir / "slurm.conf"
        self.settings = config.Settings(**settings)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(OUTER_VARIABLES)}
        self.env["SLURM_CONF"] = str(self.conf)
        self.env["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # the daemons are in sbin
        self._daemons = Daemons(self.dir, self.env)

    def __enter__(self) -> Cluster:
        self.up(owner=os.getpid())
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # Up and down

    @property
    def is_up(self) -> bool:
        """True from the end of `up` to `down`, even while the controller is stopped."""
        return (self.dir / "ready").exists() and "munged" in self.daemons()

    def up(self, owner: int | None = None) -> None:
        """Start everything and return when all nodes are idle; a failure removes what was started.

        The cluster ends with the process `owner`, however that process ends.
        """
        self._require_programs()
        with self._locked():
            if self.is_up:
                return
            for attempt in range(3):
                self._clear()  # what a reboot or a killed `up` did not remove
                try:
                    self._write_files()
                    self._start_all(owner)
                    (self.dir / "ready").touch()
                    return
                except BaseException as error:
                    logs = self._daemons.log_tails()
                    self._clear()
                    # Another process may have taken a port between our check and a daemon's start.
                    if isinstance(error, ClusterError) and "Address already in use" in logs and attempt < 2:
                        continue
                    self.dir.rmdir()
                    if isinstance(error, (ClusterError, OSError)):
                        raise ClusterError(f"{logs}{error}") from error
                    raise

    def down(self) -> None:
        """End all jobs and daemons and remove the directory; harmless when nothing is up."""
        if self.dir.is_dir():
            with self._locked():
                self._clear()
                self.dir.rmdir()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Make the directory and keep every other `up` and `down` out; ClusterError if it is not ours."""
        if len(str(self.dir)) > LONGEST_DIRECTORY:
            raise ClusterError(f"{self.dir}: longer than {LONGEST_DIRECTORY} characters, too long for Slurm's sockets")
        lock = self._lock()
        try:
            if os.fstat(lock).st_uid != os.getuid():
                raise ClusterError(f"{self.dir} belongs to another user")
            ours = self.conf.is_file() and self.conf.read_text(encoding="utf-8").startswith(config.MARKER)
            if not ours and any(self.dir.iterdir()):
                raise ClusterError(f"{self.dir} holds other files: give an empty or a new directory")
            yield
        finally:
            os.close(lock)

    def _lock(self) -> int:
        """Return the open, locked directory; it is made again if a `down` removed it while we waited."""
        while True:
            self.dir.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                lock = os.open(self.dir, os.O_RDONLY)
                fcntl.flock(lock, fcntl.LOCK_EX)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), self.dir.stat()):
                        return lock
                os.close(lock)

    def _clear(self) -> None:
        """Kill everything, for no state is kept; the file that makes the directory ours goes last."""
        self._daemons.kill_all()
        processes.kill_until_none(self.job_processes)
        for path in sorted(self.dir.iterdir(), key=lambda path: path == self.conf):
            path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)

    def _require_programs(self) -> None:
        needed = PACKAGES | (ACCOUNTING_PACKAGES if self.settings.accounting else {})
        missing = [package for program, package in needed.items() if not shutil.which(program, path=self.env["PATH"])]
        if missing:
            raise MissingPackages(f"missing: apt-get install slurm-wlm-basic-plugins {' '.join(missing)}")
        if self.settings.accounting and os.getuid() != 0:
            raise ClusterError("accounting needs root: slurmdbd refuses the credentials of an ordinary user's munge")

    def _write_files(self) -> None:
        """Write all configuration files; other users can read slurm.conf and reach munged's socket."""
        texts = config.render(self.settings, self.dir, free_ports(self.settings.port_count))
        for name, text in texts.items():
            path = self.dir / name
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
        self.conf.chmod(0o644)  # whatever the umask is; slurmdbd.conf must stay private
        self.dir.chmod(0o711)
        for name in FOLDERS:
            (self.dir / name).mkdir()
            (self.dir / name).chmod(0o711)
        (self.dir / "munge/key").touch(mode=0o600)
        (self.dir / "munge/key").write_bytes(os.urandom(128))
        for number in range(self.settings.gpus):
            (self.dir / f"gpu/{number}").symlink_to("/dev/null")  # slurmd wants devices; mknod needs root

    # Daemons

    def daemons(self) -> dict[str, Process]:
        """Return the living daemons by name; a node's slurmd has the node's name."""
        return self._daemons.living()

    def _start_all(self, owner: int | None) -> None:
        if owner and (process := Process.read(owner)):
            guard = ["guard", f"--dir={self.dir}", str(process.pid), str(process.started)]
            self._daemons.start("guard", sys.executable, str(Path(__file__).parent), *guard)
        munge = self.dir / "munge"
        files = [f"--{what}={munge}/{what.split('-')[0]}" for what in ("key-file", "log-file", "pid-file", "seed-file")]
        # --force: munged would like the directories above to be root's.
        self._daemons.start("munged", "munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        self._daemons.wait_for("munged", (munge / "socket").exists)
        if self.settings.accounting:
            self._start_accounting()
        self.start_controller()
        self._start_nodes(self.settings.node_names)

    def _start_nodes(self, names: list[str]) -> None:
        start = time.strftime("%Y-%m-%dT%H:%M:%S")
        for name in names:
            self._daemons.start(name, "slurmd", "-D", "-N", name)

        def has_registered(name: str) -> bool:
            # The state alone is not enough: Slurm may not have noticed yet that the node's last slurmd died.
            with contextlib.suppress(ClusterError):  # a controller that is busy has not answered in MessageTimeout
                ready = self.node_state(name) in ("idle", "mixed", "allocated")
                return ready and self.node(name)["SlurmdStartTime"] >= start
            return False

        for name in names:
            self._daemons.wait_for(name, functools.partial(has_registered, name))

    def _start_accounting(self) -> None:
        database = [f"--datadir={self.dir}/database", f"--user={config.user_name()}"]
        self.command("mariadb-install-db", "--no-defaults", *database, "--auth-root-authentication-method=normal")
        local = [f"--socket={self.dir}/run/database", f"--pid-file={self.dir}/run/mariadb.pid", "--skip-networking"]
        self._daemons.start("mariadbd", "mariadbd", "--no-defaults", *database, *local)
        self._daemons.wait_for("mariadbd", (self.dir / "run/database").exists)
        self._daemons.start("slurmdbd", "slurmdbd", "-D")
        self._daemons.wait_for("slurmdbd", lambda: self._succeeds("sacctmgr", "-n", "show", "cluster"))
        self.command("sacctmgr", "-i", "add", "cluster", self.settings.name)
        self.command("sacctmgr", "-i", "add", "account", config.ACCOUNT)
        self.add_user(config.user_name())

    # What tests do to the controller

    def start_controller(self) -> None:
        """Start slurmctld and return when it answers; its nodes are `unknown` until they register."""
        self._daemons.start("slurmctld", "slurmctld", "-D")
        self._daemons.wait_for("slurmctld", lambda: self._succeeds("scontrol", "show", "config"))

    def stop_controller(self) -> None:
        """End slurmctld as its service does: it saves its state, jobs run on."""
        self._daemons.end("slurmctld", signal.SIGTERM, signal.SIGCONT)

    def kill_controller(self) -> None:
        """Kill slurmctld: it loses the jobs of the last seconds and may give their ids again."""
        self._daemons.end("slurmctld", signal.SIGKILL)

    def pause_controller(self) -> None:
        """Stop slurmctld from answering until `resume_controller`: commands wait for MessageTimeout and fail."""
        self._daemons.send("slurmctld", signal.SIGSTOP)

    def resume_controller(self) -> None:
        """Let a paused slurmctld answer again, also the requests that still wait."""
        self._daemons.send("slurmctld", signal.SIGCONT)

    # What tests do to nodes

    def kill_node(self, name: str) -> None:
        """Lose a node: its slurmd and all that ran on it die at once; the controller notices by itself."""
        self._daemons.send(name, signal.SIGKILL)
        processes.kill_at_once(lambda: self.job_processes(name))
        self._daemons.end(name)  # a slurmd that still ends would be taken for one that lives: `start` would start none

    def kill_node_processes(self, name: str) -> None:
        """Kill the processes of jobs on a node, as an epilog or an OOM of the cgroup does: Slurm's daemons live on."""

        def select() -> list[Process]:
            return [p for p in self.job_processes(name) if p.name not in processes.SLURM_DAEMONS]

        processes.kill_at_once(select)

    def restart_node(self, name: str) -> None:
        """Bring a lost node back; returns when jobs can start on it."""
        self._start_nodes([name])

    def job_processes(self, node: str | None = None) -> list[Process]:
        """Return what runs for jobs, on a node or on all, and the clients that wait for jobs."""
        return processes.job_processes(self.dir, node, self.daemons().values())

    # Commands

    def command(self, *command: str, timeout: float = 120, user: str | None = None) -> str:
        """Return what a command prints, stripped; if it fails, ClusterError with its error message."""
        account = self.as_user(user) if user else {"env": self.env}
        try:
            done = subprocess.run(  # the folder of a job may have a name that is no UTF-8
                command,
                **account,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                encoding="utf-8",
                errors="surrogateescape",
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{shlex.join(command)}: no end after {timeout:.0f} s") from error
        if done.returncode:
            raise ClusterError(f"{shlex.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
        return str(done.stdout).strip()

    def _succeeds(self, *command: str) -> bool:
        with contextlib.suppress(ClusterError):
            self.command(*command)
            return True
        return False

    def node_state(self, name: str) -> str:
        """Return idle, mixed, allocated, down ...; with `+not_responding` after SlurmdTimeout of silence."""
        return self.node(name)["State"].lower()

    def node(self, name: str) -> dict[str, str]:
        """Return the fields of `scontrol show node`."""
        # Not sinfo: asked again and again, it did not show a node that came back as idle for minutes.
        return self._show("node", name)

    def job(self, job_id: str | int) -> dict[str, str]:
        """Return the fields of `scontrol show job`, such as JobState, Restarts, PreemptTime."""
        return self._show("job", str(job_id))

    def _show(self, kind: str, name: str) -> dict[str, str]:
        fields = self.command("scontrol", "-o", "show", kind, name).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def preempt(self, job_id: str | int) -> str:
        """Take the nodes of a running job away by a job of 1 second in partition `high`; returns its id."""
        job = self.job(job_id)
        script = ["--wrap=sleep 1", "--output=/dev/null", "--chdir=/", "--job-name=preemptor"]
        place = ["--partition=high", f"--nodes={job['NumNodes']}", f"--nodelist={job['NodeList']}", "--exclusive"]
        return self.command("sbatch", "--parsable", *place, *script)

    def limit_start(self, job_id: str | int, restarts: int, minutes: int) -> None:
        """Give the start of a job after so many requeues another time limit, once the start before is over."""

        def is_next() -> bool:
            job = self.job(job_id)
            return job["Restarts"] == str(restarts) and job["JobState"] in ("PENDING", "RUNNING")

        wait_until(is_next, f"start {restarts} of job {job_id}")
        self.command("scontrol", "update", f"JobId={job_id}", f"TimeLimit={minutes}")

    # Users and limits

    def as_user(self, name: str) -> dict[str, Any]:
        """Return the arguments of `subprocess.run` that run a command as another user, at home; only for root."""
        account = pwd.getpwnam(name)
        return {
            "user": account.pw_uid,
            "group": account.pw_gid,
            "extra_groups": os.getgrouplist(name, account.pw_gid),
            "env": self.env | {"HOME": account.pw_dir, "USER": name, "LOGNAME": name},
            "cwd": account.pw_dir,
        }

    def add_user(self, name: str) -> None:
        """Let a user submit jobs; needed only with accounting, where Slurm refuses users without an account."""
        if self.settings.accounting:
            self.command("sacctmgr", "-i", "add", "user", name, f"account={config.ACCOUNT}")

    def set_limit(self, user: str | None = None, **limits: int) -> None:
        """Set limits of a user, as in `set_limit(MaxSubmitJobs=2)`; -1 removes one. Needs accounting."""
        if not self.settings.accounting:
            raise ClusterError("limits need the setting accounting=True")
        user = user or config.user_name()
        changes = [f"{name}={value}" for name, value in limits.items()]
        self.command("sacctmgr", "-i", "modify", "user", user, "set", *changes)

        def applied() -> bool:
            state = self.command("scontrol", "-o", "show", "assoc_mgr", "flags=assoc", f"users={user}")
            return all(f"{name}={'' if value < 0 else value}" in state for name, value in limits.items())

        wait_until(applied, f"slurmctld to apply {' '.join(changes)}")  # slurmdbd sends changes a little later
