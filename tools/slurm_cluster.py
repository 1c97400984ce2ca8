#!/usr/bin/env python3
"""A real Slurm cluster on this machine, in one directory, for trying and testing jobkit; no root needed.

    eval "$(tools/slurm_cluster.py up)"      # sbatch, squeue, scancel ... now talk to it
    tools/slurm_cluster.py status
    tools/slurm_cluster.py down              # ends its jobs and daemons, empties the directory

Each node is a slurmd of its own on this host. Jobs go to partition `low`; a job in `high` takes nodes away from them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import os
import pwd
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
ACCOUNTING_PACKAGES = {"slurmdbd": "slurmdbd slurm-wlm-mysql-plugin", "mariadbd": "mariadb-server"}
MARKER = "# Written by slurm_cluster.py"
LONGEST_DIRECTORY = 64  # a job step's socket adds about 40 characters; the path of a socket has at most 107

SLURM_CONF = """\
{marker}; its `down` removes this file.
ClusterName=jobkit
MaxArraySize={max_array_size}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
# A requeued job waits until its old credential has expired.
AuthType=auth/munge
AuthInfo=socket={dir}/munge/socket,cred_expire={cred_expire}
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/run/slurmctld.pid
SlurmdPidFile={dir}/run/slurmd.%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/%n.log
MailProg=/bin/true

# No cgroups: they need root. The sizes of the nodes are made up and override what slurmd finds.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu,npu

# Quick answers: tests wait for each of these.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=10000,bf_interval=1
SlurmdTimeout={slurmd_timeout}
MessageTimeout={message_timeout}
KillWait={kill_wait}
OverTimeLimit=0
MinJobAge=300
ReturnToService=2
JobRequeue={requeue:d}
PreemptType=preempt/partition_prio
PreemptMode={preempt}
{extra}
{nodes}
PartitionName=low  Nodes=ALL Default=YES PriorityTier=1 PreemptMode={preempt} GraceTime={grace} MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""
NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} Sockets=1 CoresPerSocket={cpus}"
    " ThreadsPerCore=1 RealMemory=1000000 Gres=gpu:{gpus},npu:{npus} State=UNKNOWN"
)
ACCOUNTING_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={dir}/munge/socket
JobAcctGatherType=jobacct_gather/linux
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={dir}/munge/socket
DbdHost=localhost
DbdPort={port}
SlurmUser={user}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm
PidFile={dir}/run/slurmdbd.pid
LogFile={dir}/log/slurmdbd.log
"""


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message says why."""


class MissingPackages(ClusterError):
    """Programs are missing; the message names the packages to install."""


def option(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What may differ between two clusters; each field is an option of `up` too."""

    nodes: int = option(4, "number of nodes: node1, node2 ...")
    gpus: int = option(8, "make-believe GPUs per node")
    npus: int = option(8, "make-believe NPUs per node, which to Slurm are no GPUs")
    cpus: int = option(16, "make-believe CPUs per node")
    grace: int = option(20, "seconds from a preemption's signal to its kill")
    preempt: str = option("requeue", "what preemption does to the job", choices=["requeue", "cancel"])
    user_signal: bool = option(False, "preemption sends the signal of sbatch --signal instead of SIGTERM")
    requeue: bool = option(True, "jobs may be requeued (JobRequeue)")
    kill_wait: int = option(10, "seconds from SIGTERM to SIGKILL; Slurm's default is 30")
    # Slurm's own, for these two would make what is measured here better than anywhere else.
    cred_expire: int = option(120, "seconds that a requeued job waits before it queues again; below 5 Slurm takes 120")
    slurmd_timeout: int = option(300, "seconds of silence until a node is down")
    message_timeout: int = option(10, "seconds that daemons and commands wait for each other's answers")
    max_array_size: int = option(1001, "how many tasks a job array may have")
    prolog: str = option("", "program that slurmd runs before the first step of a job")
    accounting: bool = option(False, "make sacct work: slurmdbd and a private MariaDB; only as root")


@dataclass(frozen=True)
class Process:
    """A line of the process table; `started` tells it from a later process with the same id."""

    pid: int
    parent: int
    name: str
    started: int

    @classmethod
    def read(cls, pid: int) -> Process | None:
        """The living process `pid`; None when it is gone or only waits to be reaped."""
        try:
            head, _, tail = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        except OSError:
            return None
        fields = tail.split()
        return None if fields[0] in "ZX" else cls(pid, int(fields[1]), head.partition("(")[2], int(fields[19]))

    @property
    def alive(self) -> bool:
        now = Process.read(self.pid)
        return now is not None and now.started == self.started

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)

    def environment(self) -> set[str]:
        with contextlib.suppress(OSError):  # gone, or another user's
            return set(Path(f"/proc/{self.pid}/environ").read_text(encoding="utf-8", errors="replace").split("\0"))
        return set()

    def has_open(self, prefix: str) -> bool:
        with contextlib.suppress(OSError):
            return any(str(f.readlink()).startswith(prefix) for f in Path(f"/proc/{self.pid}/fd").iterdir())
        return False


def process_table() -> dict[int, Process]:
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {pid: process for pid in numbers if (process := Process.read(pid))}


PATIENCE_SECONDS = 240.0
"""How long anything may take that is sure to come: on a busy machine a daemon's answer takes minutes."""


def wait_until(done: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Poll until `done()` is true; ClusterError when it does not become so."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise ClusterError(f"still waiting after {seconds:.0f} s: {what}")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below the range that outgoing connections are given theirs from."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(range(10000, max(ephemeral, 20000)), 5000):
            with contextlib.suppress(OSError):
                held.enter_context(socket.socket()).bind(("", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise ClusterError(f"fewer than {count} free ports")


class Cluster:
    """A Slurm cluster in `directory`; as a context manager it is up inside and gone afterwards."""

    def __init__(self, directory: Path | str, **settings: Any) -> None:
        self.dir = Path(directory).resolve()
        self.conf = self.dir / "slurm.conf"
        self.settings = Settings(**settings)
        self.user = pwd.getpwuid(os.getuid()).pw_name
        # Inside a job of another cluster, that one's variables would become options of every command here.
        outer = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(outer)} | {"SLURM_CONF": str(self.conf)}
        self.env["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # the daemons are there
        self._children: list[subprocess.Popen[bytes]] = []  # to reap them

    def __enter__(self) -> Cluster:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # Up and down

    @property
    def is_up(self) -> bool:
        return "slurmctld" in self.daemons()

    def up(self) -> None:
        """Start everything and return when all nodes are idle; when that fails, nothing stays behind."""
        self._require_programs()
        with self._owned():
            if self.is_up:
                return
            for attempt in range(3):
                self._clear()  # of what a reboot left
                try:
                    self._write_files()
                    self._start_all()
                    return
                except BaseException as error:
                    logs = self._log_tails()
                    self._clear()
                    if not isinstance(error, (ClusterError, OSError)):
                        raise
                    # Between our look for free ports and a daemon's start, somebody else may have taken one.
                    if "Address already in use" not in logs or attempt == 2:
                        raise ClusterError(f"{logs}{error}") from error

    def down(self) -> None:
        """End all jobs and daemons and remove their files; harmless when nothing is up."""
        if self.dir.is_dir():
            with self._owned():
                self._clear()

    @contextlib.contextmanager
    def _owned(self) -> Iterator[None]:
        """Make sure that the directory is ours to fill and to empty, and keep another `up` or `down` out."""
        if len(str(self.dir)) > LONGEST_DIRECTORY:
            raise ClusterError(f"{self.dir}: longer than {LONGEST_DIRECTORY} characters, too long for Slurm's sockets")
        self.dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        if self.dir.stat().st_uid != os.getuid():
            raise ClusterError(f"{self.dir} belongs to another user")
        lock = os.open(self.dir, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            ours = self.conf.is_file() and self.conf.read_text(encoding="utf-8").startswith(MARKER)
            if not ours and any(self.dir.iterdir()):
                raise ClusterError(f"{self.dir} holds something else: give an empty or a new directory")
            yield
        finally:
            os.close(lock)

    def _clear(self) -> None:
        """Kill everything outright, for no state is kept; the file that makes the directory ours goes last."""
        for daemon in self.daemons().values():
            daemon.send(signal.SIGKILL)
        self._kill_all(self.job_processes)
        for child in self._children:
            child.wait()
        self._children.clear()
        for path in sorted(self.dir.iterdir(), key=lambda path: path == self.conf):
            path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)

    def _require_programs(self) -> None:
        needed = PACKAGES | (ACCOUNTING_PACKAGES if self.settings.accounting else {})
        if missing := [
            package for program, package in needed.items() if not shutil.which(program, path=self.env["PATH"])
        ]:
            raise MissingPackages(f"missing: apt-get install slurm-wlm-basic-plugins {' '.join(missing)}")
        if self.settings.accounting and os.getuid() != 0:
            raise ClusterError("accounting needs root: slurmdbd refuses the credentials of an ordinary user's munge")

    def _write_files(self) -> None:
        settings = self.settings
        controller_port, accounting_port, *node_ports = free_ports(settings.nodes + 2)
        names = [f"node{number}" for number in range(1, settings.nodes + 1)]
        nodes = [NODE.format(name=n, port=p, **vars(settings)) for n, p in zip(names, node_ports, strict=True)]
        common = {"dir": self.dir, "user": self.user, "port": accounting_port}
        extra = "SlurmctldParameters=preempt_send_user_signal\n" if settings.user_signal else ""
        if settings.prolog:
            extra += f"Prolog={settings.prolog}\n"
        if settings.accounting:
            extra += ACCOUNTING_CONF.format(**common)
        self.conf.write_text(
            SLURM_CONF.format(
                **common,
                **vars(settings) | {"nodes": "\n".join(nodes)},
                marker=MARKER,
                host=socket.gethostname().partition(".")[0],
                controller_port=controller_port,
                extra=extra,
            ),
            encoding="utf-8",
        )
        for name in ("gpu", "log", "munge", "pids", "run", "spool", "state"):
            (self.dir / name).mkdir(mode=0o711)
        (self.dir / "munge/key").touch(mode=0o600)
        (self.dir / "munge/key").write_bytes(os.urandom(128))
        for number in range(settings.gpus):
            (self.dir / f"gpu/{number}").symlink_to("/dev/null")  # slurmd wants devices; making one needs root
        gpus = f"Name=gpu File={self.dir}/gpu/[0-{settings.gpus - 1}]\n" if settings.gpus else ""
        npus = f"Name=npu Count={settings.npus}\n" if settings.npus else ""
        (self.dir / "gres.conf").write_text(gpus + npus, encoding="utf-8")
        (self.dir / "slurmdbd.conf").touch(mode=0o600)
        (self.dir / "slurmdbd.conf").write_text(SLURMDBD_CONF.format(**common), encoding="utf-8")

    # Daemons

    def daemons(self) -> dict[str, Process]:
        """The living ones by name; a node's slurmd has the node's name."""
        found = {}
        for file in sorted(self.dir.glob("pids/*")):
            pid, started = map(int, file.read_text(encoding="utf-8").split() or (0, 0))
            if (process := Process.read(pid)) and process.started == started:
                found[file.name] = process
        return found

    def _start(self, name: str, *command: str) -> None:
        if name in self.daemons():
            return
        with (self.dir / f"log/{name}.out").open("ab") as output:
            child = subprocess.Popen(
                command,
                cwd=self.dir,
                env=self.env | {"MYSQL_UNIX_PORT": f"{self.dir}/run/database"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for whoever uses the cluster
            )
        self._children.append(child)
        if process := Process.read(child.pid):
            (self.dir / "pids" / name).write_text(f"{process.pid} {process.started}", encoding="utf-8")

    def _start_all(self) -> None:
        munge = self.dir / "munge"
        files = [f"--{what}={munge}/{what.split('-')[0]}" for what in ("key-file", "log-file", "pid-file", "seed-file")]
        # --force: the directories above belong to whoever runs this; munged would like them to be root's and open.
        self._start("munged", "munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        self._await("munged", (munge / "socket").exists)
        if self.settings.accounting:
            self._start_accounting()
        self.start_controller()
        names = [f"node{number}" for number in range(1, self.settings.nodes + 1)]
        for name in names:
            self._start(name, "slurmd", "-D", "-N", name)
        for name in names:
            self._await(name, lambda name=name: self.node_state(name) == "idle")

    def _start_accounting(self) -> None:
        database = [f"--datadir={self.dir}/database", f"--user={self.user}"]
        self.command("mariadb-install-db", "--no-defaults", *database, "--auth-root-authentication-method=normal")
        local = [f"--socket={self.dir}/run/database", f"--pid-file={self.dir}/run/mariadb.pid", "--skip-networking"]
        self._start("mariadbd", "mariadbd", "--no-defaults", *database, *local)
        self._await("mariadbd", (self.dir / "run/database").exists)
        self._start("slurmdbd", "slurmdbd", "-D")
        self._await("slurmdbd", lambda: self._succeeds("sacctmgr", "-n", "show", "cluster"))
        self.command("sacctmgr", "-i", "add", "cluster", "jobkit")

    def _await(self, daemon: str, ready: Callable[[], bool]) -> None:
        def settled() -> bool:
            return ready() or daemon not in self.daemons()

        wait_until(settled, f"{daemon} to be ready")
        if daemon not in self.daemons():
            raise ClusterError(f"{daemon} has ended")

    def _log_tails(self) -> str:
        tails = (
            (f.name, f.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
            for f in sorted(self.dir.glob("log/*.out"))
        )
        return "".join(f"--- {name}\n" + "\n".join(lines) + "\n" for name, lines in tails if lines)

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D")
        self._await("slurmctld", lambda: self._succeeds("scontrol", "show", "config"))

    def stop_controller(self) -> None:
        """End slurmctld as its service would: it saves its state, jobs run on."""
        if daemon := self.daemons().get("slurmctld"):
            daemon.send(signal.SIGTERM)
            wait_until(lambda: not daemon.alive, "slurmctld to end")

    def kill_node(self, name: str) -> None:
        """Lose a node: its slurmd and all that ran on it are gone at once; the controller finds out by itself."""
        if daemon := self.daemons().get(name):
            daemon.send(signal.SIGKILL)
        for process in self.job_processes(name):
            process.send(signal.SIGSTOP)  # first: srun's helper would end the step when it sees srun die
        self._kill_all(lambda: self.job_processes(name))

    def restart_node(self, name: str) -> None:
        """Bring a lost node back; returns when jobs can start on it."""
        self._start(name, "slurmd", "-D", "-N", name)
        self._await(name, lambda: self.node_state(name) in ("idle", "mixed", "allocated"))

    # Processes of jobs

    def job_processes(self, node: str | None = None) -> list[Process]:
        """What runs for jobs, on one node or anywhere, and the clients that wait for them.

        Having our SLURM_CONF is not enough: a user's shell and all that it starts have it too.
        """
        conf = f"SLURM_CONF={self.conf}"
        place = f"SLURMD_NODENAME={node or ''}"
        files = f"{self.dir}/log/{node}.log" if node else f"{self.dir}/"
        table = process_table()
        found: dict[int, Process] = {}
        for process in table.values():
            environment = process.environment()
            if process.name.startswith("slurm"):  # slurmstepd overwrites its environment with its title
                has_begun = process.name == "slurmstepd" and conf in environment  # and has yet to open its log
                mine = process.has_open(files) or (has_begun and not node)
            else:
                on_node = place in environment if node else any(line.startswith(place) for line in environment)
                mine = conf in environment and (on_node or (not node and process.name in ("srun", "salloc")))
            if mine:
                found[process.pid] = process
        while children := {p.pid: p for p in table.values() if p.parent in found and p.pid not in found}:
            found |= children
        ancestor: Process | None = table.get(os.getpid())
        while ancestor:  # a test that itself runs in a job
            found.pop(ancestor.pid, None)
            ancestor = table.get(ancestor.parent)
        return list(found.values())

    def _kill_all(self, find: Callable[[], list[Process]]) -> None:
        def gone() -> bool:
            remaining = find()
            for process in remaining:
                process.send(signal.SIGKILL)
            return not remaining

        wait_until(gone, "killed processes to be gone")

    # For tests

    def command(self, *command: str, timeout: float = 120) -> str:
        """What a Slurm command prints, stripped; its error message is in the ClusterError when it fails."""
        done = subprocess.run(
            command,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            encoding="utf-8",
        )
        if done.returncode:
            raise ClusterError(f"{shlex.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def _succeeds(self, *command: str) -> bool:
        with contextlib.suppress(ClusterError):
            self.command(*command)
            return True
        return False

    def node_state(self, name: str) -> str:
        """idle, mixed, allocated, down ...; a star at the end says that it does not respond."""
        # Not sinfo: asked again and again, it did not show a node that came back as idle for minutes.
        fields = self.command("scontrol", "-o", "show", "node", name).split()
        return next(field.partition("=")[2].lower() for field in fields if field.startswith("State="))

    def job(self, job_id: str | int) -> dict[str, str]:
        """The fields of `scontrol show job`, such as JobState, Restarts, PreemptTime."""
        fields = self.command("scontrol", "-o", "show", "job", str(job_id)).split()
        return dict(f.split("=", 1) for f in fields if "=" in f)

    def preempt(self, job_id: str | int) -> str:
        """Take the nodes of a running job away, by a job of one second in partition `high`; its id."""
        nodes = self.job(job_id)
        script = ["--wrap=sleep 1", "--output=/dev/null", f"--chdir={self.dir}", "--job-name=preemptor"]
        place = ["--partition=high", f"--nodes={nodes['NumNodes']}", f"--nodelist={nodes['NodeList']}", "--exclusive"]
        return self.command("sbatch", "--parsable", *place, *script)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    default = Path(base) / f"jobkit-slurm-{pwd.getpwuid(os.getuid()).pw_name}"
    for verb, text in {
        "up": "start a cluster and print the line that selects it; a cluster that is up is left as it is",
        "down": "end the cluster with all its jobs and remove its files",
        "status": "show daemons, nodes and jobs; exit code 1 when the cluster is not up",
    }.items():
        one = verbs.add_parser(
            verb, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        one.add_argument("--dir", type=Path, default=default, help="where everything of the cluster is")
        for setting in dataclasses.fields(Settings) if verb == "up" else ():
            kind = {"action": argparse.BooleanOptionalAction} if setting.type == "bool" else {}
            kind = kind or {"type": int if setting.type == "int" else str}
            flag = "--" + setting.name.replace("_", "-")
            one.add_argument(flag, default=setting.default, **kind, **setting.metadata)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = vars(parse(arguments))
    verb = options.pop("verb")
    cluster = Cluster(options.pop("dir"), **options)
    select = f"export SLURM_CONF={shlex.quote(str(cluster.conf))}"
    try:
        if verb == "up":
            was_up = cluster.is_up
            cluster.up()
            print(f"{cluster.dir}: {'was already' if was_up else 'is'} up", file=sys.stderr)
            print(select)
        elif verb == "down":
            cluster.down()
        elif not cluster.is_up:
            print(f"{cluster.dir}: not up", file=sys.stderr)
            return 1
        else:
            for name, process in cluster.daemons().items():
                print(f"{name:12} process {process.pid}")
            print("", cluster.command("sinfo", "-N", "-l"), "", cluster.command("squeue"), "", select, sep="\n")
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, MissingPackages) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
