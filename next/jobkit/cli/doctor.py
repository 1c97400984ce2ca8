"""jobkit doctor: would a run work here? Each check is a line: ok, a warning (with its limit), or a problem.

jobkit doctor                  this machine, and the cluster that sbatch here submits to
jobkit doctor --cluster h100   also the entry of that name in the user's own config file
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, InputError, JobkitError, SchedulerError, nearest
from jobkit.run.files import json_text
from jobkit.run.runs import runs_dir_of
from jobkit.usage import show_examples

State = Literal["ok", "warning", "problem"]

LITTLE_BYTES = 10 << 30
"""A disk with less may not take a big model's checkpoint."""

SHORT_SECONDS = 60
"""A grace that is shorter may be too short for a big model's checkpoint."""

COMMENT = "jobkit:doctor:1:000000"

_COLOURS = {"ok": "32", "warning": "33", "problem": "31"}


@dataclass(frozen=True)
class Check:
    """One answer, and for a warning or a problem what to do."""

    state: State
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

    checks: list[Check] = []
    parts: list[Callable[[], Iterator[Check]]] = [_python, lambda: _runs_dir(runs_dir_of(arguments.runs_dir)), _devices]
    if not arguments.local and (arguments.cluster or commands.is_available()):
        parts.append(lambda: _slurm(_options_of(arguments.cluster)))
    for part in parts:
        for check in part():
            checks.append(check)
            if not arguments.json:
                state = f"\x1b[{_COLOURS[check.state]}m{check.state:8}\x1b[0m" if sys.stdout.isatty() else check.state
                print(f"{state:8}{check.words}{f': {check.advice}' if check.advice else ''}", flush=True)
    is_ok = all(check.state != "problem" for check in checks)
    if arguments.json:
        print(json_text({"ok": is_ok, "checks": [asdict(check) for check in checks]}))
    return EXIT_FINISHED if is_ok else EXIT_FAILED


# This machine


def _python() -> Iterator[Check]:
    from jobkit.submission.checks import is_installed

    where = f"Python {sys.version.split()[0]} ({sys.executable})"
    if not is_installed():
        yield Check("problem", f"{where}: jobkit is not installed", "pip install it there: jobs start from it")
    try:
        yield Check("ok", f"{where}, torch {version('torch')}")
    except PackageNotFoundError:
        yield Check("warning", f"{where}: torch is not installed", "a task needs it, a command may bring its own")


def _runs_dir(runs_dir: Path) -> Iterator[Check]:
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
            works = Lock(file).is_held()
        file.unlink()
    except OSError as error:
        yield Check("problem", f"runs directory {runs_dir}: not writable ({error.strerror})", move)
        return
    except JobkitError as error:
        yield Check("problem", f"runs directory {runs_dir}: {error}")
        return
    free = shutil.disk_usage(runs_dir).free
    words = f"runs directory {runs_dir}: writable, {free / 2**30:.1f} GiB free"
    if not works:
        yield Check("problem", f"{words}; its locks do not exclude: a run could be started twice", move)
    elif free < LITTLE_BYTES:
        yield Check("warning", words, f"make room, or {move}")
    else:
        yield Check("ok", f"{words}, locks work")


def _devices() -> Iterator[Check]:
    from jobkit.addresses import own_addresses
    from jobkit.run.machine import cores, visible_devices

    kind, devices = visible_devices("auto")
    yield Check("ok", f"{len(devices or ())} {kind} device(s) and {len(cores())} core(s) here")
    addresses = own_addresses(2)
    if addresses == ["127.0.0.1"]:
        yield Check("warning", "this machine has no address but 127.0.0.1", "ranks of other nodes do not reach it")
    else:
        yield Check("ok", f"addresses: {', '.join(addresses)}")


# The cluster


def _options_of(cluster: str | None) -> dict[str, str]:
    """sbatch's options of an entry in the user's own config file, as far as they matter here."""
    from jobkit.run.load import read_user_file

    clusters = {"slurm": {}, **read_user_file().value.get("clusters", {})}
    name = cluster or "slurm"
    if name not in clusters:
        raise InputError(
            key="--cluster", found=name, allowed=f"one of {', '.join(clusters)}", hint=nearest(name, clusters)
        )
    return {key: str(clusters[name][key]) for key in ("partition", "account", "qos") if clusters[name].get(key)}


def _slurm(options: dict[str, str]) -> Iterator[Check]:
    from jobkit.slurm import commands, nodes

    begin = time.monotonic()
    try:
        config = commands.config()
        seconds = time.monotonic() - begin
        words = f"Slurm {config.get('SLURM_VERSION')}, cluster {config.get('ClusterName')}, answers in {seconds:.2f} s"
        yield Check("ok", words) if seconds < 5 else Check("warning", words, "submissions and lists are as slow")
        partitions = nodes.partitions(options.get("partition"))
        if not partitions:
            name = options.get("partition", "default")
            yield Check("problem", f"there is no partition {name}", "set clusters.<name>.partition; `sinfo` lists them")
        for part in partitions:
            is_up = part.state == "UP"
            words = f"partition {part.name} is {part.state}, {part.total_nodes} node(s)"
            yield Check("ok", words) if is_up else Check("problem", words, "its jobs wait until it is up")
            yield _preemption(config, part.name)
        requeue = config.get("JobRequeue", "?")
        yield Check("ok", f"JobRequeue={requeue}" + ("" if requeue == "1" else ": jobkit's jobs ask for it"))
        yield from _held_job(options)
    except SchedulerError as error:
        yield Check("problem", str(error), "use --local for this machine alone")


def _preemption(config: dict[str, str], partition: str) -> Check:
    """What Slurm does to a job that must make room."""
    from jobkit.slurm import commands

    record = commands.fields(
        commands.run("scontrol", "--oneliner", commands.EVEN_HIDDEN, "show", "partition", partition)
    )
    mode, grace = record.get("PreemptMode", "OFF"), int(record.get("GraceTime", 0))
    kill_wait = int(config.get("KillWait", "30 sec").split()[0])
    words = f"partition {partition}: PreemptMode={mode}, GraceTime={grace}, KillWait={kill_wait}"
    if mode == "OFF" or config.get("PreemptType", "").endswith("none"):
        return Check("ok", f"{words}: jobs are not preempted")
    if "SUSPEND" in mode:
        return Check("warning", words, "a suspended job may be taken for hung, and keeps its GPUs: set `watchdog: off`")
    if grace + kill_wait < SHORT_SECONDS:
        return Check("warning", words, "short for a big model's checkpoint: set `checkpoint: {every: 5min}` or so")
    return Check("ok", f"{words}: a preempted run has {grace + kill_wait} s to save, and continues by itself")


def _held_job(options: dict[str, str]) -> Iterator[Check]:
    """Submit a job that is held, look at it as Slurm has it, and remove it."""
    from jobkit.slurm import commands, jobs

    words = [f"--{key}={value}" for key, value in options.items()]
    job_id = commands.parse_job_id(
        commands.run(
            "sbatch",
            "--parsable",
            "--hold",
            "--requeue",
            "--time=1",
            "--job-name=jobkit-doctor",
            "--output=/dev/null",
            f"--comment={COMMENT}",
            *words,
            "--wrap=true",
        )
    )
    if job_id is None:
        yield Check("problem", "sbatch printed no job id", "is sbatch a wrapper? jobkit reads its --parsable output")
        return
    try:
        job = jobs.show(job_id)
    finally:
        jobs.cancel(job_id)
    if job is None or COMMENT not in job.comment.split():
        has = "no such job" if job is None else f"the comment {job.comment!r}"
        advice = "a job_submit plugin changes --comment, by which jobkit knows its jobs: ask the site to keep it"
        yield Check("problem", f"a held job was submitted, and Slurm has {has}", advice)
    else:
        yield Check("ok", "a held job was submitted and removed: Slurm keeps its comment")
    if job is not None and not job.requeueable:
        yield Check("warning", "Slurm takes no requeue of it", "jobkit submits a successor in its place")
