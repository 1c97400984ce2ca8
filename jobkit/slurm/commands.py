"""The one way to run a Slurm command: a clean environment, one line of Slurm's own words for an error, a limit of time.

    run("scontrol", "show", "config") -> its output,  or SchedulerError: Slurm refused
                                                      or SchedulerMissing: there is no such command here
                                                      or SchedulerTimeout: nobody knows if Slurm carried it out

jobs.py and nodes.py ask by it, the submission submits by it. Nothing here retries: the caller has the clock.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache

from jobkit.errors import SchedulerError, SchedulerMissing, SchedulerTimeout

ANSWER_SECONDS = 30.0
"""The time that a command may take. Slurm's own commands give up after MessageTimeout, 10 s by default."""

EVEN_HIDDEN = "--all"
"""Without this option squeue, sinfo and scontrol hide jobs in a partition with Hidden=YES, from their owner too."""

_OPTIONS = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_", "SPRIO_")
"""Slurm's commands take variables that begin so for options. The submitting shell may have them for another job."""

_MAYBE_DONE = (
    "Socket timed out on send/recv",
    "Unexpected message received",
    "Zero Bytes were transmitted or received",
    "Connection reset by peer",
)
"""A controller that is stopped or too busy says neither yes nor no, and may carry the request out later."""

_AWAY = ("contact slurm controller", "connection refused", "in standby mode")

NAMES_OF_EXAMPLES = ("cluster", "linux")
"""ClusterName in Slurm's own examples of a slurm.conf: two clusters may have it."""

_HINTS = {
    "invalid partition": "`sinfo` lists the partitions; set clusters.<name>.partition",
    "invalid account": "`sacctmgr show assoc user=$USER` lists your accounts; set clusters.<name>.account",
    "sleeping and retrying": "the cluster has as many jobs as it takes: MaxJobCount in `scontrol show config`",
    "configuration source": "is a Slurm configured here? Without a cluster, use --local",
    "configuration file": "is a Slurm configured here? Without a cluster, use --local",
    "node configuration is not": "too few nodes have that much and are not excluded: `sinfo -N -o '%N %c %m %G'`",
    **dict.fromkeys(_AWAY, "the controller is down: `scontrol ping`; the same command works later"),
}
"""Words of Slurm's complaint -> the user's next step."""


def is_available(*programs: str) -> bool:
    """True if this machine can submit to a Slurm, or has those commands of it."""
    return all(map(shutil.which, programs or ["sbatch"]))


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the options of Slurm's commands. SLURM_CONF stays: it names the cluster."""
    return {key: value for key, value in environment.items() if not key.startswith(_OPTIONS) or key == "SLURM_CONF"}


def run(
    *command: str,
    timeout: float = ANSWER_SECONDS,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> str:
    """The output of one Slurm command. All times in it are UTC.

    `environment` replaces this process's, as for a successor job. The command inherits the open files `pass_fds`.
    Raises SchedulerTimeout if the request may have been carried out, else SchedulerError with Slurm's words.
    """
    variables = without_options(os.environ if environment is None else environment)
    if command[0] != "sbatch":  # sbatch hands its environment to the job, and reads --begin in the user's time zone
        variables |= {"SLURM_TIME_FORMAT": "standard", "TZ": "UTC", "LC_ALL": "C"}
    try:
        # A session of its own: the terminal's Ctrl-C would end an sbatch whose job is in the queue already.
        done = subprocess.run(
            command, capture_output=True, timeout=timeout, env=variables, start_new_session=True, pass_fds=pass_fds
        )
    except FileNotFoundError:
        raise SchedulerMissing(
            f"{command[0]} is not on PATH: is this a login node of a Slurm cluster? Without one, use --local"
        ) from None
    except subprocess.TimeoutExpired as error:
        # sbatch that is refused by MaxJobCount says so at once, and tries again for two minutes.
        words = (error.stderr or b"no answer; is slurmctld up? (`scontrol ping`)").decode(errors="replace")
        raise SchedulerTimeout(f"{explain(command[0], words)}; ended after {timeout:g} s") from None
    if done.returncode < 0:  # as at the end of a job, which takes the commands of its processes along
        name = signal.Signals(-done.returncode).name
        raise SchedulerTimeout(f"{command[0]}: killed by {name}; its request may have been carried out")
    if done.returncode:
        words = (done.stderr or done.stdout).decode(errors="replace")
        maybe_done = any(part in words for part in _MAYBE_DONE)
        raise (SchedulerTimeout if maybe_done else SchedulerError)(explain(command[0], words))
    return done.stdout.decode(errors="replace")  # a site's banner may be in another encoding than UTF-8


def explain(program: str, complaint: str) -> str:
    """Slurm's complaint in one line, with the user's next step if there is a usual one."""
    words = "; ".join(line.split("error: ", 1)[-1].strip() for line in complaint.splitlines() if line.strip())
    hint = next((f" ({hint})" for part, hint in _HINTS.items() if part in words.lower()), "")
    return f"{program}: {words or 'failed without a message'}{hint}"


def is_away(error: SchedulerError) -> bool:
    """True if the controller did not answer, so that the same command may work later."""
    return isinstance(error, SchedulerTimeout) or any(part in str(error).lower() for part in _AWAY)


def fields(record: str) -> dict[str, str]:
    """The fields of one line of `scontrol --oneliner show`; a field that Slurm calls (null) or N/A is empty.

    A value may hold spaces, as in `WorkDir=/my data Comment=a b`: it ends where the next `Name=` begins.
    """
    pairs = (part.partition("=") for part in re.split(r"\s+(?=[A-Z][A-Za-z:/]*=)", record.strip()))
    return {key: "" if value in ("(null)", "N/A") else value for key, _, value in pairs}


def config() -> dict[str, str]:
    """The settings of the cluster, as `scontrol show config` prints them: `config()["KillWait"]` is `30 sec`."""
    return _config(os.environ.get("SLURM_CONF"))


@cache
def _config(conf: str | None) -> dict[str, str]:
    return dict(re.findall(r"^(\S+)\s+= (.*?)\s*$", run("scontrol", "show", "config"), re.M))


def cluster_name() -> str:
    """`ClusterName@host:port` of the Slurm that commands here talk to: two clusters may have the same ClusterName."""
    host = config().get("SlurmctldHost[0]", "").partition("(")[0]
    return f"{config().get('ClusterName', '')}@{host}:{config().get('SlurmctldPort', '')}"


def is_here(cluster: str) -> bool:
    """Return whether the Slurm here is the one that `cluster_name` named once: a job that it does not have is gone.

    A slurmctld that has moved to another host keeps its ClusterName and its port; a name that nobody chose needs the
    host too, as a backup's or the first one's.
    """
    name, _, address = cluster.partition("@")
    host, _, port = address.rpartition(":")
    if (name, port) != (config().get("ClusterName", ""), config().get("SlurmctldPort", "")):
        return False
    hosts = [value.partition("(")[0] for key, value in config().items() if key.startswith("SlurmctldHost[")]
    return name not in NAMES_OF_EXAMPLES or host in hosts


def submit(
    script: str, *options: str, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> str:
    """Queue a batch script; returns the id of the new job. Raises SchedulerTimeout if it may be in the queue."""
    answer = run("sbatch", "--parsable", *options, script, environment=environment, pass_fds=pass_fds)
    ids = set(re.findall(r"^\s*(\d+)(?:;\S*)?\s*$", answer, re.M))  # a site may print a banner around it
    if len(ids) != 1:
        raise SchedulerTimeout(f"sbatch printed no job id, and may have queued the job: {' '.join(answer.split())!r}")
    return str(ids.pop())
