"""Slurm: the one way its commands are run, what they say of a job, and why a job is being stopped."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from jobkit.errors import SchedulerError, SchedulerTimeout
from jobkit.log import log

# States in which Slurm will do nothing more with a job by itself.
_ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT"
ENDED = frozenset(_ENDED.split())

EARLY_SIGNAL_SECONDS = 60
"""sbatch --signal: "may be sent up to 60 seconds earlier than specified"."""

MAX_MARGIN_SECONDS = 90.0
"""What a save gets before the limit, less an eighth that the supervisor decides in (supervisor/time_limit.py)."""

ANSWER_SECONDS = 30.0
"""How long a command may take: longer than MessageTimeout, 10 s by default, after which Slurm's own give up."""

SHORT_SECONDS = 5.0
"""How long a question may take whose answer is useful and not needed."""

_OPTIONS = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_", "SPRIO_")
"""Variables that begin so are options of Slurm's commands, which a shell may have for jobs of its own."""

EVEN_HIDDEN = ("--all",)
"""Without it squeue, sinfo and scontrol keep what is in a partition with Hidden=YES from its users, own jobs too."""

MAX_ARRAY_SIZE = 1001
"""Slurm's default of MaxArraySize."""

IDS_OF_A_COMMAND = 1000
"""How many ids of jobs are given to one command: a command line may have 128 KiB or more, and an id has up to 20."""

MAX_LIMIT_SECONDS = 300 * 86400.0
"""Slurm shows a job without a limit as one of 365 days."""


def stop_margin(limit: float) -> float:
    """Seconds before the end of a time limit of `limit` seconds to stop at: a fifth of it, at most 90."""
    return min(MAX_MARGIN_SECONDS, 0.2 * limit)


def available() -> bool:
    """Whether this machine can submit to a Slurm."""
    return shutil.which("sbatch") is not None


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what Slurm's commands take for options; SLURM_CONF, which names the Slurm, stays."""
    return {key: value for key, value in environment.items() if not key.startswith(_OPTIONS) or key == "SLURM_CONF"}


def command(
    *arguments: str,
    timeout: float = ANSWER_SECONDS,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> str:
    """The output of one Slurm command; raises SchedulerError with Slurm's message, in one line.

    No variable of this process, or of `environment`, changes what the command does, nor how it prints times: in UTC.
    It gets the files `pass_fds` of this process.
    """
    kept = without_options(os.environ if environment is None else environment)
    if arguments[0] != "sbatch":  # whose --begin is meant as it is typed, and which hands the variable to the job
        kept |= {"SLURM_TIME_FORMAT": "standard", "TZ": "UTC"}  # local times are ambiguous where clocks go back
    try:
        # In a session of its own: the terminal's Ctrl-C would end an sbatch whose job is in the queue already.
        done = subprocess.run(
            arguments,
            capture_output=True,
            timeout=timeout,
            check=False,
            env=kept,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except FileNotFoundError:
        raise SchedulerError(
            f"{arguments[0]} is not on PATH: is this a login node of a Slurm cluster? Without one, use --local"
        ) from None
    except subprocess.TimeoutExpired:
        raise SchedulerTimeout(
            f"{arguments[0]} gave no answer in {timeout:g} s; is slurmctld up? (`scontrol ping`){_no_slurm()}"
        ) from None
    if done.returncode:
        words = _as_text(done.stderr or done.stdout)
        unknown = done.returncode < 0 or any(one in words for one in _UNKNOWN_OUTCOME)
        raise (SchedulerTimeout if unknown else SchedulerError)(explain(arguments[0], words))
    return os.fsdecode(done.stdout)  # names of files are whole in it, whatever is in a site's banner


def _as_text(output: str | bytes) -> str:
    """An output to be shown: a banner may be in another encoding than UTF-8."""
    return os.fsencode(output).decode(errors="replace")


# A controller that is stopped or too busy says neither yes nor no, and may do it later.
_UNKNOWN_OUTCOME = (
    "Socket timed out on send/recv",
    "Unexpected message received",
    "Zero Bytes were transmitted or received",
    "Connection reset by peer",
)

_AWAY = "(the controller is down"


def _no_slurm() -> str:
    if (file := os.environ.get("SLURM_CONF")) is None:
        return " (without a cluster, use --local)"
    return f" (is the cluster of SLURM_CONF={file} gone? `unset SLURM_CONF`; without a cluster, use --local)"


def explain(program: str, stderr: str) -> str:
    """Slurm's complaint in one line, with what to do where that is known."""
    words = "; ".join(line.split("error: ", 1)[-1].strip() for line in stderr.splitlines() if line.strip())
    hint = ""
    if "invalid partition" in words.lower():
        hint = " (`sinfo` lists the partitions; set clusters.<name>.partition)"
    elif "invalid account" in words.lower():
        hint = " (`sacctmgr show assoc user=$USER` lists your accounts; set clusters.<name>.account)"
    elif "configuration source" in words.lower() or "resolve_ctls" in words.lower():
        return f"{program}: no Slurm is configured here{_no_slurm()}"
    elif any(one in words.lower() for one in ("contact slurm controller", "connection refused", "in standby mode")):
        elsewhere = " or SLURM_CONF points elsewhere" if "SLURM_CONF" in os.environ else ""
        hint = f" {_AWAY}{elsewhere}: `scontrol ping`; the same command works later)"
    return f"{program}: {words or 'failed without a message'}{hint}"


@dataclass(frozen=True)
class JobInfo:
    """What `scontrol show job` says of one job, as far as jobkit cares."""

    job_id: str
    state: str
    reason: str
    preempt_time: float | None
    """When Slurm chose this job to make room, or when the grace time after that was over."""
    start: float | None
    """When this start of it began, seconds since the epoch."""
    end: float | None
    """When its time is over."""
    elapsed: float
    """Seconds it has been running, those of a prolog included; within the job by the controller's clock."""
    restarts: int
    nodes: str
    partition: str = ""
    requeueable: bool = True
    """Whether it was submitted, or the cluster is set up, so that `scontrol requeue` takes it."""
    excluded: str = ""
    """ExcNodeList, as Slurm writes it."""
    script: str = ""
    """The batch script that it was submitted with."""

    @property
    def limit(self) -> float | None:
        """Seconds this start of it may run."""
        return None if self.start is None or self.end is None else self.end - self.start

    @property
    def remaining(self) -> float | None:
        """Seconds until its time is over."""
        if self.limit is None or self.limit > MAX_LIMIT_SECONDS:
            return None
        return self.limit - self.elapsed

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def runs(self, script: Path) -> bool:
        """Whether it is a job of this batch script: another cluster, or one that counts anew, has the same ids."""
        return not self.script or _are_same(Path(self.script), script)

    def was_moved_to(self, script: Path) -> bool:
        """Whether it may be a job of this batch script under an earlier path, of a folder that was renamed since."""
        before = Path(self.script)
        return before.parts[-3:] == script.parts[-3:] and before != script and not os.path.lexists(before)

    @property
    def held(self) -> bool:
        """Whether it waits until somebody releases it, as after a prolog that failed."""
        return not self.ended and "held" in self.reason.lower()

    @property
    def requeued_by_slurm(self) -> bool:
        """Whether its processes are ending and it is in the queue again already.

        Within the job Slurm's count of restarts tells it at once, elsewhere a second later that its end is not known.
        """
        own = os.environ.get("SLURM_RESTART_COUNT") or ("0" if current_job() == self.job_id else None)
        restarted = own is not None and self.restarts > int(own)
        return self.state == "COMPLETING" and (self.end is None or restarted)

    @property
    def script_died(self) -> bool:
        """Whether the batch script was killed: its ranks are being ended, and nobody is left to requeue the job."""
        return self.reason == "JobLaunchFailure" and self.state in ("COMPLETING", "FAILED")


def _are_same(one: Path, other: Path) -> bool:
    if one == other:
        return True
    with contextlib.suppress(OSError):  # one folder may have two names, as behind a link
        return one.samefile(other)
    return False


def show_job(job_id: str, timeout: float = ANSWER_SECONDS) -> JobInfo | None:
    """The job as slurmctld knows it, or None once it has forgotten it (MinJobAge after its end)."""
    try:
        text = command("scontrol", "--oneliner", "show", "job", job_id, timeout=timeout)
    except SchedulerError as error:
        if any(words in str(error) for words in ("Invalid job id", f"Job {job_id} not found")):  # a task of an array
            return None
        raise
    job = parse_job(text)
    if job.state != "RUNNING" or job_id != current_job():
        return job
    # A node's clock may be off, and a prolog may have run before anything of ours: only the controller knows since when
    # the time counts.
    return replace(job, elapsed=job.elapsed + clock_offset())


def clock_offset() -> float:
    """Seconds by which the controller's clock is ahead of this machine's; 0 where they agree, or where none is told."""
    # Asked again where this machine's clock was set in the meantime.
    return _clock_offset(round(time.time() - time.monotonic()))


@cache
def _clock_offset(set_to: int) -> float:
    before = time.time()
    try:
        answer = command("sdiag")
    except SchedulerTimeout:
        raise  # not kept: the next question may be answered
    except SchedulerError as error:
        if is_away(error):
            raise
        return 0.0
    told = re.search(r"output at .*\((\d+)\)", answer)
    if told is None:
        return 0.0
    now, after = float(told[1]), time.time()
    return 0.0 if before - 1 <= now <= after + 1 else now - (before + after) / 2


def parse_job(text: str) -> JobInfo:
    """A JobInfo of `scontrol --oneliner show job`'s words."""
    fields = dict(re.findall(r"(\S+?)=(\S*)", text))
    task = fields.get("ArrayTaskId", "")
    return JobInfo(
        job_id=task_id(fields["ArrayJobId"], task) if task.isdigit() else fields.get("JobId", ""),
        state=fields.get("JobState", "UNKNOWN"),
        reason=fields.get("Reason", ""),
        preempt_time=_time(fields.get("PreemptTime")),
        start=_time(fields.get("StartTime")),
        end=_time(fields.get("EndTime")),
        elapsed=_duration(fields.get("RunTime", "")),
        restarts=int(fields.get("Restarts", 0)),
        nodes=_value(fields.get("NodeList")),
        partition=fields.get("Partition", ""),
        requeueable=fields.get("Requeue", "1") != "0",
        excluded=_value(fields.get("ExcNodeList")),
        script=_value(script[1] if (script := re.search(r" Command=(.*?) WorkDir=", text)) else None),
    )


def _value(text: str | None) -> str:
    return "" if text in (None, "(null)") else str(text)


def _duration(text: str) -> float:
    """Seconds of `[days-]hours:minutes:seconds`; 0 where it is something else."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    return float(days * 86400 + hours * 3600 + minutes * 60 + seconds)


def _time(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text or "").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:  # None, Unknown, N/A
        return None


def stop_cause(job: JobInfo, margin: float = 0.0) -> str | None:
    """Why Slurm sends this running job signals: preempted, timeout, cancelled, killed; None where it gives no reason.

    `margin` is how many seconds before its time limit a job of ours stops.
    SIGTERM means both preemption and scancel, USR2 both preemption and the time limit: only the job's record tells.
    """
    # The order matters: a job that is being requeued or ended is COMPLETING, as one that is cancelled.
    if job.reason == "TimeLimit" or job.state == "TIMEOUT":
        return "timeout"
    if job.script_died:
        return "killed"
    if job.requeued_by_slurm or job.state == "PREEMPTED":
        return "preempted"
    if job.state == "NODE_FAIL" or job.reason == "NodeDown":
        return "node_failure"
    if job.state == "COMPLETING" and job.preempt_time and job.end is not None and job.end <= job.preempt_time + 1:
        return "preempted"  # PreemptMode=CANCEL, without grace or after it; a scancel in the grace time ends later
    if job.state in ("CANCELLED", "COMPLETING"):
        return "cancelled"  # before the next: a job may be cancelled while it is being preempted
    if job.state == "OUT_OF_MEMORY":
        return "out_of_memory"
    if job.preempt_time is not None:
        return "preempted"
    if job.remaining is not None and job.state == "RUNNING" and job.remaining <= margin:
        return "timeout"
    return None


def early_timeout_signal(job: JobInfo, margin: float) -> bool:
    """Whether a USR2 that came now may be --signal's, which Slurm sends up to a minute before it was asked to."""
    return job.remaining is not None and job.remaining <= margin + EARLY_SIGNAL_SECONDS + 5  # the signal's own way


def dead_node(nodes: str) -> str | None:
    """The first of some nodes, in Slurm's notation, that is down or does not respond; None where all do."""
    rows = command("sinfo", *EVEN_HIDDEN, "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T").splitlines()
    for line in rows:
        name, _, state = line.partition(" ")
        if state.endswith("*") or state.startswith(("down", "fail")):
            return name
    return None


def died_since(node: str, when: float) -> bool:
    """Whether a node is down, or its slurmd was restarted after `when`, in seconds since the epoch."""
    fields = dict(re.findall(r"(\S+?)=(\S*)", command("scontrol", "--oneliner", "show", "node", node)))
    # A node that has rebooted is up again when the job's next start asks: only its slurmd's age tells.
    started = _time(fields.get("SlurmdStartTime"))
    down = re.search(r"DOWN|NOT_RESPONDING|\*", fields.get("State", "")) is not None
    return down or started is None or started > when


def takes_no_jobs(node: str) -> bool:
    """Whether nothing takes connections where a node's slurmd should: known long before SlurmdTimeout has passed."""
    fields = dict(re.findall(r"(\S+?)=(\S*)", command("scontrol", "--oneliner", "show", "node", node)))
    if not fields.get("NodeAddr") or not fields.get("Port", "").isdigit():
        return False
    try:
        socket.create_connection((fields["NodeAddr"], int(fields["Port"])), timeout=5.0).close()
    except (ConnectionRefusedError, TimeoutError):
        return True
    except OSError as error:  # else nobody knows: its address is none here, or a firewall is between
        return error.errno == errno.EHOSTUNREACH
    return False


def expand(nodes: str) -> list[str]:
    """The names in a list of nodes in Slurm's notation, `node[1-3],node2`, each once."""
    return list(dict.fromkeys(command("scontrol", "show", "hostnames", nodes).split()))


def nodes_left(partition: str, without: Collection[str]) -> int:
    """How many usable nodes of a partition are not among some others."""
    # Drained and down nodes take no job; allocated and completing ones will.
    usable = "--states=idle,mix,alloc,comp"
    names = set(command("sinfo", "--noheader", "--Node", f"--partition={partition}", usable, "--format=%N").split())
    return len(names - set(without))


@dataclass(frozen=True)
class Node:
    """What Slurm has been told that a node has, in whatever state it is."""

    name: str
    cpus: int
    megabytes: int
    gpus: Mapping[str, int]
    """By type, in small letters; "" where it has none."""

    def gpus_of(self, kind: str) -> int:
        """How many of a type; of any for ""."""
        return self.gpus.get(kind, 0) if kind else sum(self.gpus.values())


def nodes(partition: str | None, timeout: float = SHORT_SECONDS) -> dict[str, list[Node]]:
    """The nodes of each partition in `a,b`; None is the default one. None are there for what Slurm does not know.

    Where a plugin of the site's may choose another partition than the default one, None is all of them.
    """
    names = set(partition.split(",")) if partition else None
    is_chosen = names is None and config(timeout).get("JobSubmitPlugins") not in (None, "", "(null)")
    found: dict[str, list[Node]] = {}
    rows = command("sinfo", *EVEN_HIDDEN, "--noheader", "--Node", "--format=%P|%N|%c|%m|%G", timeout=timeout)
    for name, *fields in (row.split("|") for row in rows.splitlines() if row.count("|") == 4):
        if name.rstrip("*") in names if names is not None else is_chosen or name.endswith("*"):
            found.setdefault(name.rstrip("*"), []).append(_node(*fields))
    return found


def _node(name: str, cpus: str, megabytes: str, gres: str) -> Node:
    gpus: dict[str, int] = {}
    for kind, count in re.findall(r"\bgpu:(?:([^:,()]+):)?(\d+)", gres):
        gpus[kind.lower()] = gpus.get(kind.lower(), 0) + int(count)
    return Node(name, int(cpus), int(megabytes), gpus)


def submit(
    script: str, *options: str, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> str:
    """Queue a batch script; returns the new job's id. Raises SchedulerTimeout where it may have been queued."""
    answer = command("sbatch", "--parsable", *options, script, environment=environment, pass_fds=pass_fds)
    job_id = job_id_of(answer)
    if job_id is None:
        words = "; ".join(line.strip() for line in _as_text(answer).splitlines() if line.strip())
        raise SchedulerTimeout(f"sbatch gave no job's id, and may have queued the job: {words or 'it printed nothing'}")
    return job_id


def job_id_of(answer: str) -> str | None:
    """The job's id in what sbatch, or a site's wrapper of it, printed around `id`, `id;cluster` or its sentence.

    None where there is none, or more than one.
    """
    lines = [line.strip() for line in answer.splitlines()]
    # A sentence is surer than a number, which may stand in a banner.
    for pattern in (r".*\bSubmitted batch job (\d+)\b.*", r"(\d+)(?:;[^;\s]*)?"):
        found = {match[1] for line in lines if (match := re.fullmatch(pattern, line))}
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def could_start(script: str, *options: str, environment: Mapping[str, str] | None = None) -> bool:
    """Whether Slurm would ever start a job of a batch script with some options. Raises SchedulerTimeout."""
    try:
        command("sbatch", "--test-only", *options, script, environment=environment)
    except SchedulerTimeout:
        raise
    except SchedulerError as error:
        log.info("%s", error)
        return False
    return True


def cluster(timeout: float = ANSWER_SECONDS) -> str:
    """`ClusterName@host:port` of the Slurm that commands here talk to: names alone are not unique."""
    fields = config(timeout)
    host = fields.get("SlurmctldHost[0]", "").partition("(")[0]
    return f"{fields.get('ClusterName', '')}@{host}:{fields.get('SlurmctldPort', '')}"


def name_of(cluster: str) -> str:
    """The ClusterName in what `cluster` returns."""
    return cluster.partition("@")[0]


def config(timeout: float = ANSWER_SECONDS) -> dict[str, str]:
    """How the Slurm that commands here talk to is set up, as `scontrol show config` says it; asked once."""
    return _config(os.environ.get("SLURM_CONF"), timeout)


@cache
def _config(conf: str | None, timeout: float) -> dict[str, str]:
    return dict(re.findall(r"^(\S+)\s+= (.*?)\s*$", command("scontrol", "show", "config", timeout=timeout), re.M))


def jobs_of(users: Collection[str], timeout: float = ANSWER_SECONDS) -> list[JobInfo]:
    """All jobs of some users that Slurm has not forgotten, in one question: less of each than show_job says."""
    options = [*EVEN_HIDDEN, "--array", "--noheader", "--states=all", f"--user={','.join(users)}"]
    options += ["--format=%i|%T|%r|%S|%e|%N|%o"]
    rows = command("squeue", *options, timeout=timeout).splitlines()
    return [_listed_job(*row.split("|", 6)) for row in rows if row.count("|") >= 6]


def _listed_job(job_id: str, state: str, reason: str, start: str, end: str, nodes: str, script: str) -> JobInfo:
    return JobInfo(
        job_id=job_id,
        state=state,
        reason=reason,
        preempt_time=None,
        start=_time(start),
        end=_time(end),
        elapsed=0.0,
        restarts=0,
        nodes=nodes,
        script=_value(script),
    )


def jobs_with(script: Path, task: int | None = None) -> list[str]:
    """Ids of this user's queued and running jobs that were submitted with a batch script; its name may be another's.

    Of a job array those of one of its tasks.
    """
    alive = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"  # not one that is completing
    rows = command("squeue", *EVEN_HIDDEN, "--array", "--noheader", "--me", alive, "--format=%i|%o").splitlines()
    found = ((job_id, Path(path)) for job_id, _, path in (row.partition("|") for row in rows))
    found = ((job_id, path) for job_id, path in found if task is None or job_id.endswith(f"_{task}"))
    return [job_id for job_id, path in found if path.name == script.name and _are_same(path, script)]


def release(job_id: str) -> None:
    """Let a held job start. Raises SchedulerError, as for a hold that is an administrator's."""
    command("scontrol", "release", job_id)


def cancel(job_id: str) -> None:
    """End a job for good; one that is gone already is fine."""
    _scancel(job_id)


def cancel_queued(job_ids: Sequence[str]) -> None:
    """End those of some jobs that have not started, by few commands; one that has started meanwhile runs on.

    A task of an array that starts in this moment ends, too: with `--state=PENDING` scancel ends all that wait.
    """
    tasks = [job_id for job_id in job_ids if "_" in job_id]
    jobs = [job_id for job_id in job_ids if "_" not in job_id]
    for ids, options in ((jobs, ["--state=PENDING"]), (tasks, [])):
        for first in range(0, len(ids), IDS_OF_A_COMMAND):
            _scancel(*options, *ids[first : first + IDS_OF_A_COMMAND])


def _scancel(*arguments: str) -> None:
    try:
        command("scancel", *arguments)
    except SchedulerError as error:  # it may have ended since it was listed
        if not any(words in str(error) for words in ("Invalid job id", "already completing or completed")):
            raise


class Refused(SchedulerError):
    """Slurm will not do that with this job, now or later."""


def requeue(job_id: str) -> bool:
    """Put a job back into the queue, as the same job; False where its owner has cancelled it. Raises Refused."""
    for _ in range(3):  # its state may change between the look and the command
        job = show_job(job_id)
        if job is not None and (job.state == "PENDING" or job.requeued_by_slurm):
            return True
        if job is not None and stop_cause(job) == "cancelled":
            return False  # Slurm would take it back: a requeue undoes a scancel
        # One that is cancelled in this very moment is left alone, and Slurm reports no error: so look again.
        only = ["Incomplete"] if job is not None and job.state == "RUNNING" else []
        try:
            command("scontrol", "requeue", *only, job_id)
        except SchedulerError as error:
            if "pending execution" in str(error):
                return True  # it is there already
            if is_away(error):
                raise
            raise Refused(str(error)) from None
        if not only:
            return True
    raise Refused(f"scontrol requeue: job {job_id} runs on")


def is_away(error: SchedulerError) -> bool:
    """Whether the controller did not answer, so that the same command may work later."""
    return isinstance(error, SchedulerTimeout) or _AWAY in str(error)


def comment(job_id: str, text: str) -> None:
    """Say something about a job where `scontrol show job` prints it."""
    command("scontrol", "update", f"JobId={job_id}", f"Comment={text}")


def exclude(job_id: str, nodes: str) -> None:
    """Replace the list of nodes that a job in the queue may not get."""
    command("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={nodes}")


def steps(job_id: str) -> list[str]:
    """Ids of the steps of a job that srun started and that are not over."""
    listed = command("squeue", *EVEN_HIDDEN, "--noheader", "--steps", f"--jobs={job_id}", "--format=%i").split()
    # Not the batch script's, an interactive one's or `extern`: they have names where srun's have numbers.
    return [step for step in listed if step.rpartition(".")[2].isdigit()]


def signal_steps(job_id: str, name: str) -> None:
    """Send a signal to every process of a job's steps, on all nodes; the batch script does not get it."""
    for step in steps(job_id):
        _scancel(f"--signal={name}", step)


def current_job() -> str | None:
    """The id of the Slurm job this process is in, or None; of a task of an array as `task_id` has it."""
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return task_id(array, os.environ.get("SLURM_ARRAY_TASK_ID", ""))
    return os.environ.get("SLURM_JOB_ID")


def task_id(array: str, task: int | str) -> str:
    """The id of one task of a job array, as Slurm's commands take it: by its own number some of them mean all tasks."""
    return f"{array}_{task}"


def max_array_size() -> int:
    """How many tasks a job array may have. Raises SchedulerError."""
    found = re.search(r"^MaxArraySize\s+= (\d+)", command("scontrol", "show", "config"), re.M)
    return int(found[1]) if found else MAX_ARRAY_SIZE
