"""The one way Slurm's commands are run, their complaints, and how the cluster is set up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache

from jobkit.errors import SchedulerError, SchedulerTimeout

ANSWER_SECONDS = 30.0
"""How long a command may take: longer than MessageTimeout, 10 s by default, after which Slurm's own give up."""

SHORT_SECONDS = 5.0
"""How long a question may take whose answer is useful and not needed."""

_OPTIONS = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_", "SPRIO_")
"""Variables that begin so are options of Slurm's commands, which a shell may have for jobs of its own."""

EVEN_HIDDEN = ("--all",)
"""Without it squeue, sinfo and scontrol keep what is in a partition with Hidden=YES from its users, own jobs too."""


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
    except subprocess.TimeoutExpired as error:
        if said := as_text(error.stderr or b"").strip():  # an sbatch that is refused tries again for two minutes
            raise SchedulerTimeout(f"{explain(arguments[0], said)}; ended after {timeout:g} s") from None
        raise SchedulerTimeout(
            f"{arguments[0]} gave no answer in {timeout:g} s; is slurmctld up? (`scontrol ping`){_no_slurm()}"
        ) from None
    if done.returncode:
        words = as_text(done.stderr or done.stdout)
        unknown = done.returncode < 0 or any(one in words for one in _UNKNOWN_OUTCOME)
        raise (SchedulerTimeout if unknown else SchedulerError)(explain(arguments[0], words))
    return os.fsdecode(done.stdout)  # names of files are whole in it, whatever is in a site's banner


def as_text(output: str | bytes) -> str:
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
    elif "sleeping and retrying" in words.lower():
        hint = " (the cluster has as many jobs as it takes: MaxJobCount in `scontrol show config`)"
    elif "configuration source" in words.lower() or "resolve_ctls" in words.lower():
        return f"{program}: no Slurm is configured here{_no_slurm()}"
    elif any(one in words.lower() for one in ("contact slurm controller", "connection refused", "in standby mode")):
        elsewhere = " or SLURM_CONF points elsewhere" if "SLURM_CONF" in os.environ else ""
        hint = f" {_AWAY}{elsewhere}: `scontrol ping`; the same command works later)"
    return f"{program}: {words or 'failed without a message'}{hint}"


def is_away(error: SchedulerError) -> bool:
    """Whether the controller did not answer, so that the same command may work later."""
    return isinstance(error, SchedulerTimeout) or _AWAY in str(error)


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


MAX_ARRAY_SIZE = 1001
"""Slurm's default of MaxArraySize."""


def max_array_size() -> int:
    """How many tasks a job array may have. Raises SchedulerError."""
    found = re.search(r"^MaxArraySize\s+= (\d+)", command("scontrol", "show", "config"), re.M)
    return int(found[1]) if found else MAX_ARRAY_SIZE
