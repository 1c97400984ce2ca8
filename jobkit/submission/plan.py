"""LaunchPlan: everything that a submission will do, as a value. --dry-run prints it, submit carries it out."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit.errors import EXIT_RESUMABLE, InputError, InvalidValue, nearest
from jobkit.run import device_kinds, layout
from jobkit.run.config import Config, Resources
from jobkit.run.duration import format_seconds
from jobkit.run.rundir import RunDir
from jobkit.run.strict import build
from jobkit.slurm import stop_margin
from jobkit.submission import options

SCHEDULERS = ("slurm", "local")


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One submission of one run: where, with what, and the script."""

    run: Path
    config: Config
    cluster: str
    """The name after --cluster, or `local`."""
    scheduler: str
    """`slurm` or `local`."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Submitit's parameters for the batch script; empty for local."""

    @property
    def task_command(self) -> list[str]:
        """What every rank executes; Submitit's pickle in that folder names the run directory and little more."""
        # Signals are ignored from the first instruction on, and exec keeps it so until the worker can take notice of
        # them: one that comes during the imports would otherwise kill the task.
        guard = 'trap "" TERM USR2; exec "$@"'
        submitit = [sys.executable, "-u", "-m", "submitit.core._submit", str(RunDir(self.run).submitit)]
        return ["sh", "-c", guard, "jobkit", *submitit]

    def at(self, run: Path) -> LaunchPlan:
        """The same plan for another run directory: which one it is, is decided last, under the submission's lock."""
        named = {"job_name": run.name} if self.scheduler == "slurm" else {}
        return dataclasses.replace(self, run=run, parameters={**self.parameters, **named})

    def describe(self) -> str:
        """The plan in words, for --dry-run."""
        resources = self.config.resources
        ranks = f"{resources.nodes} node(s) x {resources.tasks_per_node} task(s) = {resources.world_size} rank(s)"
        devices = f"{resources.gpus_per_task} GPU(s)" if resources.gpus_per_task else "CPU"
        return (
            f"run directory: {self.run}\ncluster:       {self.cluster} ({self.scheduler})\n"
            f"ranks:         {ranks}, {devices} and {resources.cpus_per_task} core(s) each\n"
            f"time limit:    {self._time_limit}"
        )

    @property
    def _time_limit(self) -> str:
        resources = self.config.resources
        endless = self.scheduler == "local" and resources.time == "auto"
        return "none" if endless else f"{format_seconds(resources.seconds)} an attempt"


def make_plan(run: Path, config: Config, cluster: str) -> LaunchPlan:
    """The plan for a config on a cluster: `local`, `slurm`, or a name under `clusters:`.

    Raises InputError for a cluster that is not there, and InvalidValue for an option that is not one.
    """
    entry = _entry(config, cluster)
    scheduler = entry.get("scheduler", cluster if cluster in SCHEDULERS else "slurm")
    if scheduler not in SCHEDULERS:
        raise InvalidValue(f"clusters.{cluster}.scheduler", f"found {scheduler!r}, allowed: {', '.join(SCHEDULERS)}")
    overridden, parameters = options.split(cluster, entry)
    values = dataclasses.asdict(config.resources) | overridden
    resources = build(Resources, values, f"clusters.{cluster}.")
    config = dataclasses.replace(config, resources=resources)
    try:
        layout.check(config.parallel, config.comm, resources, config.precision)
    except ValueError as error:
        raise InvalidValue("comm" if str(error).startswith("comm.") else "parallel", str(error)) from None
    if resources.gpus_per_task == 0 and config.device not in (device_kinds.AUTO, device_kinds.CPU):
        raise InvalidValue("device", f"found {config.device!r}, but resources.gpus_per_task is 0: set it to 1")
    if scheduler == "local":
        _check_local_devices(config.device, resources)
        parameters = {}
    else:
        parameters = _sbatch_parameters(resources, parameters)
    return LaunchPlan(run=run, config=config, cluster=cluster, scheduler=scheduler, parameters=parameters).at(run)


def _entry(config: Config, cluster: str) -> Mapping[str, Any]:
    if cluster in config.clusters:
        return config.clusters[cluster]
    if cluster in SCHEDULERS:
        return {}
    known = [*config.clusters, *SCHEDULERS]
    raise InputError(
        f"--cluster {cluster}: no such cluster{nearest(cluster, known)} (known: {', '.join(dict.fromkeys(known))}; "
        f"add it under `clusters:` in the YAML or in your own config file)"
    )


def _sbatch_parameters(resources: Resources, parameters: Mapping[str, Any]) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "time": math.ceil(resources.seconds / 60),  # Slurm's own resolution
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks_per_node,
        "cpus_per_task": resources.cpus_per_task,
        "signal_delay_s": round(stop_margin(math.ceil(resources.seconds / 60) * 60)),
        "wckey": None,  # Submitit's default names itself; a cluster that checks keys would refuse it
    }
    if resources.gpus_per_task:
        ours["gpus_per_task"] = resources.gpus_per_task
    merged = {**ours, **parameters}
    merged["additional_parameters"] = {"requeue": True, **parameters.get("additional_parameters", {})}
    return merged


def _check_local_devices(device: str, resources: Resources) -> None:
    kind, found = device_kinds.of_this_machine(device, os.environ)
    wanted = resources.world_size * resources.gpus_per_task
    if found is None or wanted <= len(found):
        return  # where only the driver can tell, each rank looks for itself
    how = f"{kind.visible} allows" if kind.visible in os.environ else "this machine has"
    raise InputError(
        f"resources: {resources.world_size} rank(s) of {resources.gpus_per_task} GPU(s) need {wanted}, "
        f"{how} {len(found)}: "
        "set resources.tasks_per_node and resources.nodes to fit, or resources.gpus_per_task=0 for the CPU"
    )


def visible_gpus() -> int:
    """NVIDIA GPUs that a local task would see, told without a CUDA library."""
    return len(device_kinds.of_this_machine("cuda", os.environ)[1] or ())


STEP_NUMBERS = 4
"""How many attempts in a row have steps of different numbers."""

EXIT_DECIDED = 76
"""What the end of an attempt ends with when the run has failed: nothing is left to try."""

BLIND_RESTARTS = 50
"""After how many restarts of a job, of whatever cause, it no longer starts again without knowing why."""

FAILED_STARTS = 3
"""How many nodes in a row may be unable to begin an attempt."""

# Without Python, which may be what the node lacks: a broken mount, a module that is not there.
_ELSEWHERE = """\
jobkit_restart() {{  # put the job into the queue again; not where its owner has cancelled it
    case "$(scontrol -o show job "$SLURM_JOB_ID")" in
        *JobState=RUNNING*) scontrol requeue Incomplete "$SLURM_JOB_ID" ;;
        *JobState=COMPLETING*PreemptTime=2*) scontrol requeue "$SLURM_JOB_ID" ;;
        *) return 1 ;;
    esac
}}
jobkit_elsewhere() {{  # no attempt could begin here: start again on another node
    jobkit_code=$?
    trap '' TERM
    echo "jobkit: $SLURMD_NODENAME cannot begin an attempt (exit code $jobkit_code)" >&2
    if [ $jobkit_code -ne {resumable} ] && echo "$SLURMD_NODENAME" >>{file}; then
        [ "$(wc -l <{file})" -lt {tries} ] || exit 1
        jobkit_nodes=$(sinfo -h -N -t idle,mix,alloc,comp -p "$SLURM_JOB_PARTITION" -o %N | sort -u | wc -l)
    elif [ "${{SLURM_RESTART_COUNT:-0}}" -ge {restarts} ]; then
        exit 1  # it is not the node: the run directory is full or away
    fi
    jobkit_excluded=$(scontrol -o show job "$SLURM_JOB_ID" | sed -n 's/.* ExcNodeList=\\([^ (]*\\).*/\\1/p')
    jobkit_restart || exit 1
    [ "${{jobkit_nodes:-0}}" -lt $((SLURM_JOB_NUM_NODES + {tries})) ] ||
        scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=${{jobkit_excluded:+$jobkit_excluded,}}$SLURMD_NODENAME"
    exit 1
}}"""


def batch_lines(plan: LaunchPlan) -> tuple[list[str], str, list[str]]:
    """(setup, command, teardown) of the batch script around srun, in the shell's words."""
    batch = f"{shlex.quote(sys.executable)} -m jobkit.supervisor.batch"
    run = shlex.quote(str(plan.run))
    own = list(plan.parameters.get("setup") or [])
    python = shlex.quote(sys.executable)
    setup = [
        "trap : TERM",  # what follows srun must run, in the KillWait that Slurm leaves at a time limit
        "export JOBKIT_BEGAN=$(date +%s)",
        _ELSEWHERE.format(
            file=shlex.quote(str(RunDir(plan.run).failed_starts)),
            tries=FAILED_STARTS,
            restarts=BLIND_RESTARTS,
            resumable=EXIT_RESUMABLE,
        ),
        "trap jobkit_elsewhere EXIT",
        *(["set -e", *own, "set +e"] if own else []),  # a module that does not load must not train without it
        f'jobkit_exports="$({batch} begin {run})" || exit $?',
        "trap - EXIT",
        '[ -n "$jobkit_exports" ] || exit 0  # finished, cancelled, or not to be run',
        'eval "$jobkit_exports"',
        # A busy Slurm may repeat a kill of the last attempt's step a minute later; each start numbers its steps anew:
        # let this one's have another number.
        f"for ((i = ${{SLURM_RESTART_COUNT:-0}} % {STEP_NUMBERS}; i > 0; i--)); do",
        "    srun --overlap --nodes=1 --ntasks=1 true 2>/dev/null",
        "done",
        f'{python} -m jobkit.supervisor.beside_srun {run} "$JOBKIT_ATTEMPT" &',
        "jobkit_watch=$!; disown",
    ]
    arguments = [
        "--unbuffered",
        "--kill-on-bad-exit=1",  # without it the other ranks of a dead one hang until the time limit
        f"--cpus-per-task={plan.config.resources.cpus_per_task}",  # srun no longer inherits sbatch's (since 22.05)
        *(plan.parameters.get("srun_args") or []),
    ]
    srun = " ".join(["srun", *map(shlex.quote, arguments)])
    logs = '--output="$JOBKIT_LOGS/rank_%t.out" --error="$JOBKIT_LOGS/rank_%t.err"'
    # Submitit exports SUBMITIT_EXECUTOR=slurm; ours is the environment that leaves signals to jobkit's notices.
    said = '2>"$JOBKIT_LOGS/srun.err"'  # srun's own words tell who died first
    command = f"SUBMITIT_EXECUTOR=jobkit {srun} {logs} {shlex.join(plan.task_command)} {said}"
    teardown = [
        "jobkit_rc=$?",
        "trap '' TERM",
        "kill -KILL $jobkit_watch 2>/dev/null",
        *(plan.parameters.get("teardown") or []),
        "for jobkit_try in 1 2 3; do",
        f'    {batch} end {run} "$JOBKIT_ATTEMPT" "$jobkit_rc"',
        "    jobkit_end=$?",
        f"    case $jobkit_end in 0|{EXIT_RESUMABLE}) exit $jobkit_end ;; {EXIT_DECIDED}) exit 1 ;; esac",
        "    sleep 2",
        "done",
        f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {BLIND_RESTARTS} ] && jobkit_restart',
        "exit 1",
    ]
    return setup, command, teardown
