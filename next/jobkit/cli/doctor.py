"""jobkit doctor: would a run work here? A line a check: ok, a warning (a run works, with a limit), or a problem.

jobkit doctor                  this machine, and the cluster that sbatch here submits to
jobkit doctor --cluster h100   with the partition of that entry in the user's own config file
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, InputError, JobkitError, SchedulerError, nearest
from jobkit.run.files import json_text
from jobkit.run.runs import runs_dir_of
from jobkit.usage import show_examples

LITTLE_BYTES = 10 << 30
"""A disk with less may not take a big model's checkpoint."""

SHORT_SECONDS = 60
"""A shorter grace may not be enough for a big model's checkpoint."""

COMMENT = "jobkit:doctor:1:000000"


@dataclass(frozen=True)
class Check:
    """One answer, and for a warning or a problem the advice."""

    state: Literal["ok", "warning", "problem"]
    words: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--local", action="store_true", help="this machine alone")
    parser.add_argument("--cluster", metavar="NAME", help="slurm, or a name under `clusters:` in your own config file")
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="default: $JOBKIT_RUNS or ./runs")
    parser.add_argument("--json", action="store_true", help="for programs: {ok, checks}")
    show_examples(parser, {"--cluster h100": "the partition of that entry, and a held job that is removed again"})


def run(arguments: argparse.Namespace) -> int:
    """Print the checks; exit code 1 where something is a problem."""
    from jobkit.slurm import commands

    parts: list[Callable[[], Iterator[Check]]] = [_python, lambda: _runs_dir(runs_dir_of(arguments.runs_dir)), _machine]
    if not arguments.local and (arguments.cluster or commands.is_available()):
        options = _options_of(arguments.cluster or "slurm")
        parts.append(lambda: _slurm(options))
    checks = []
    for check in (check for part in parts for check in part()):
        checks.append(check)
        if not arguments.json:
            print(f"{check.state:8}{check.words}{f': {check.advice}' if check.advice else ''}", flush=True)
    is_ok = all(check.state != "problem" for check in checks)
    if arguments.json:
        print(json_text({"ok": is_ok, "checks": [asdict(check) for check in checks]}))
    return EXIT_FINISHED if is_ok else EXIT_FAILED


# This machine


def _python() -> Iterator[Check]:
    from jobkit.submission.checks import is_installed

    if not is_installed():
        yield Check("problem", f"{sys.executable}: jobkit is not installed there", "pip install it: jobs start from it")
    if find_spec("torch") is None:
        yield Check("warning", f"{sys.executable}: no torch", "a `task:` needs it, a `command:` may bring its own")
    else:
        yield Check("ok", f"{sys.executable}: Python {sys.version.split()[0]}, with torch")


def _runs_dir(runs_dir: Path) -> Iterator[Check]:
    """Whether runs can be written, and locked, where they shall live."""
    from jobkit.run import disk
    from jobkit.run.locks import Lock

    move = "choose another folder with --runs-dir or JOBKIT_RUNS"
    file = runs_dir / ".locks" / "doctor"
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        error = disk.write_probe(runs_dir)
        if error is not None:
            raise error
        with Lock(file):
            excludes = Lock(file).is_held()
        file.unlink()
        free = shutil.disk_usage(runs_dir).free
    except (OSError, JobkitError) as error:
        yield Check("problem", f"runs directory {runs_dir}: {error}", move)
        return
    words = f"runs directory {runs_dir}: writable, {free / 2**30:.1f} GiB free"
    if not excludes:
        yield Check("problem", f"{words}; its locks exclude nobody: a run could be started twice", move)
    elif free < LITTLE_BYTES:
        yield Check("warning", words, f"make room, or {move}")
    else:
        yield Check("ok", f"{words}, locks work")


def _machine() -> Iterator[Check]:
    from jobkit.addresses import own_addresses
    from jobkit.run.machine import visible_devices
    from jobkit.supervisor.devices import waiting

    kind, devices = visible_devices("auto")
    words = f"{len(devices or ())} {kind} device(s) and {len(os.sched_getaffinity(0))} core(s) here"
    yield Check("ok", f"{words}; {len(waiting())} run(s) of yours wait for devices")
    addresses = own_addresses(2)
    if addresses == ["127.0.0.1"]:
        yield Check("warning", "no address but 127.0.0.1", "nodes of a job could not reach each other")
    else:
        yield Check("ok", f"addresses, the first for other nodes: {', '.join(addresses)}")


# The cluster


def _options_of(name: str) -> dict[str, str]:
    """sbatch's options of an entry in the user's own config file, as far as they matter here."""
    from jobkit.run.load import read_user_file

    clusters = {"slurm": {}, **read_user_file().value.get("clusters", {})}
    if name not in clusters:
        hint = nearest(name, clusters)
        raise InputError(key="--cluster", found=name, allowed=f"one of {', '.join(clusters)}", hint=hint)
    return {key: str(clusters[name][key]) for key in ("partition", "account", "qos") if clusters[name].get(key)}


def _slurm(options: dict[str, str]) -> Iterator[Check]:
    from jobkit.slurm import commands, nodes

    try:
        config = commands.config()
        requeue = config.get("JobRequeue", "?")
        words = f"Slurm {config.get('SLURM_VERSION')}, cluster {config.get('ClusterName')}, JobRequeue={requeue}"
        yield Check("ok", words if requeue == "1" else f"{words}: jobkit's jobs ask to be requeued")
        partitions = nodes.partitions(options.get("partition"))
        if not partitions:
            yield Check(
                "problem", f"no partition for {options or 'a job without one'}", "set clusters.<name>.partition"
            )
        for part in partitions:
            words = f"partition {part.name} is {part.state}, {part.total_nodes} node(s)"
            yield Check("ok", words) if part.state == "UP" else Check("problem", words, "its jobs wait until it is up")
            yield _preemption(config, part.name)
        yield from _held_job([f"--{key}={value}" for key, value in options.items()])
    except SchedulerError as error:
        yield Check("problem", str(error), "use --local for this machine alone")


def _preemption(config: dict[str, str], partition: str) -> Check:
    """What Slurm does to a job of the partition that must make room."""
    from jobkit.slurm.commands import EVEN_HIDDEN, fields, run

    record = fields(run("scontrol", "--oneliner", EVEN_HIDDEN, "show", "partition", partition))
    mode, grace = record.get("PreemptMode", "OFF"), int(record.get("GraceTime", 0))
    seconds = grace + int(config.get("KillWait", "30 sec").split()[0])
    words = f"partition {partition}: PreemptMode={mode}, GraceTime={grace}, KillWait={config.get('KillWait')}"
    if mode == "OFF" or config.get("PreemptType", "").endswith("none"):
        return Check("ok", f"{words}: jobs are not preempted")
    if "SUSPEND" in mode:
        return Check("warning", words, "a suspended job may be taken for hung, and keeps its GPUs: set `watchdog: off`")
    if seconds < SHORT_SECONDS:
        return Check("warning", words, "short for a big model's checkpoint: set `checkpoint: {every: 5min}` or so")
    return Check("ok", f"{words}: a preempted run has {seconds} s to save, and continues by itself")


def _held_job(options: list[str]) -> Iterator[Check]:
    """Submit a job that is held, look at it as Slurm has it, and remove it."""
    from jobkit.slurm import commands, jobs

    usual = ["--parsable", "--hold", "--requeue", "--time=1", "--job-name=jobkit-doctor", "--output=/dev/null"]
    answer = commands.run("sbatch", *usual, f"--comment={COMMENT}", *options, "--wrap=true")
    job_id = commands.parse_job_id(answer)
    if job_id is None:
        yield Check(
            "problem", f"sbatch printed no job id: {answer.strip()!r}", "jobkit needs sbatch's --parsable output"
        )
        return
    try:
        job = jobs.show(job_id)
    finally:
        jobs.cancel(job_id)
    if job is None or COMMENT not in job.comment.split():
        words = f"job {job_id} was submitted with --comment, and Slurm has {job.comment if job else 'no such job'!r}"
        yield Check("problem", words, "jobkit knows its jobs by the comment: a job_submit plugin must not change it")
    else:
        yield Check("ok", "a held job was submitted and removed: Slurm keeps its comment")
    if job is not None and not job.requeueable:
        yield Check("warning", "Slurm takes no requeue of it", "jobkit submits a successor in its place")
