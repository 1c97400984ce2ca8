"""jobkit doctor: would a run work here? A line a check: ok, a warning (a run works, with a limit), or a problem.

jobkit doctor                  this machine, and the cluster that sbatch here submits to
jobkit doctor --cluster h100   with the partition of that entry in the user's own config file
jobkit doctor mine.yaml        with the clusters and the container of that YAML
jobkit doctor --nodes 4        and the network of so many nodes, by a run that takes a minute
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, InputError, JobkitError, SchedulerError, nearest
from jobkit.run.runs import runs_dir_of
from jobkit.usage import show_examples

if TYPE_CHECKING:
    from jobkit.config.schema import Config, ContainerConfig
    from jobkit.run.locks import Lock
    from jobkit.slurm.nodes import Partition
    from jobkit.submission.options import Options

SHORT_SECONDS = 60
"""A shorter grace may not be enough for a big model's checkpoint."""

DRIVER_SECONDS = 10.0
"""The driver of many devices takes seconds to start, if nobody uses them."""

COMMENT = "jobkit:doctor:1:000000"


@dataclass(frozen=True)
class Check:
    """One answer, and for a warning or a problem the advice."""

    state: Literal["ok", "warning", "problem"]
    words: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", nargs="?", type=Path, metavar="EXP.yaml", help="with its clusters and container")
    parser.add_argument("--cluster", metavar="NAME", help="slurm, or a name under `clusters:`")
    parser.add_argument("--local", action="store_true", help="check this machine alone, and no cluster")
    parser.add_argument("--nodes", type=int, metavar="N", help="time all-reduces over N nodes; a slow one is named")
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="default: $JOBKIT_RUNS or ./runs")
    examples = {
        "mine.yaml": "the clusters and the container of that YAML",
        "--cluster h100": "the partition of that entry, and a held job that is removed again",
        "--cluster h100 --nodes 4": "the network of four of its nodes as well",
    }
    show_examples(parser, examples)


def run(arguments: argparse.Namespace) -> int:
    """Print the checks; exit code 1 where something is a problem."""
    from jobkit.slurm import commands
    from jobkit.submission.plan import container_of

    runs_dir = runs_dir_of(arguments.runs_dir)
    parts = [_python(), _runs_dir(runs_dir), _machine()]
    cluster = None if arguments.local else arguments.cluster or ("slurm" if commands.is_available() else None)
    config = _config(arguments.experiment)
    options = _options(config, cluster or "local")
    container = container_of(config, options, cluster or "local")
    if container is not None:
        parts.append(_container(container, runs_dir))
    if cluster is not None:
        parts.append(_slurm(options))
    if arguments.nodes is not None:
        parts.append(_network(config, runs_dir, cluster, arguments.nodes))
    code = EXIT_FINISHED
    for check in itertools.chain.from_iterable(parts):
        print(f"{check.state:8}{check.words}{f': {check.advice}' if check.advice else ''}", flush=True)
        code = EXIT_FAILED if check.state == "problem" else code
    return code


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
    """Return whether the runs directory can be written and locked."""
    from jobkit.run.locks import Lock, file_system
    from jobkit.submission.checks import refuse_unwritable

    file = runs_dir / ".locks" / "doctor"
    try:
        refuse_unwritable(runs_dir)
        with Lock(file):
            excludes = _is_seen(Lock(file))
        file.unlink()
    except JobkitError as error:
        yield Check("problem", str(error))
        return
    kind, reach = file_system(Path("/proc/self/mountinfo").read_text(), runs_dir.resolve())
    words = f"runs directory {runs_dir} ({kind}): writable, {shutil.disk_usage(runs_dir).free / 2**30:.1f} GiB free"
    advice = "stop and continue a run of this machine where it was submitted; or mount it with locks for all hosts"
    if not excludes:
        yield Check("problem", f"{words}; its locks exclude nobody", "a run could be started twice: see --runs-dir")
    elif reach in ("all", "own"):
        yield Check("ok", f"{words}, locks work{' between hosts' if reach == 'all' else ''}")
    elif reach == "host":
        yield Check("warning", f"{words}; other hosts do not see its locks", advice)
    else:
        advice = f"BeeGFS: tuneUseGlobalFileLocks; if they do not, {advice}"
        yield Check("warning", f"{words}; nothing here says whether other hosts see its locks", advice)


def _is_seen(lock: Lock) -> bool:
    """Return whether another process sees that a lock is held."""
    if (child := os.fork()) == 0:
        held = False
        try:
            held = lock.is_held()
        finally:
            os._exit(held)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def _machine() -> Iterator[Check]:
    from jobkit.addresses import own_addresses
    from jobkit.agent.devices import HealthWatch
    from jobkit.config.machine import visible_devices

    kind, devices = visible_devices("auto")
    addresses = ", ".join(own_addresses(2))
    cores = len(os.sched_getaffinity(0))
    yield Check("ok", f"{len(devices or ())} {kind} device(s), {cores} core(s), {addresses} here")
    if kind == "cuda" and devices:
        watch = HealthWatch(devices)
        word = watch.ask(DRIVER_SECONDS)
        watch.close()
        if word is None:
            yield Check("problem", f"NVIDIA's driver gave no answer in {DRIVER_SECONDS:.0f} s", "`dmesg` may say why")
        elif word.health:
            advice = "see `nvidia-smi -q`; a reset ends a pending remap, not a failed one"
            yield Check("problem" if word.is_sick else "warning", word.health, advice)


def _container(container: ContainerConfig, runs_dir: Path) -> Iterator[Check]:
    """Start a Python in the container here: the nodes of a cluster have the same image."""
    from jobkit.supervisor.container import command
    from jobkit.supervisor.diagnosis import last_lines

    words = command(container, runs_dir, "check")
    if shutil.which(words[0]) is None or not container.prefix:
        yield Check("warning", "the container cannot be started here", "the first second of a job tells if it is fit")
        return
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    said = last_lines(done.stdout if done.returncode == 0 else done.stderr or done.stdout) or "no word"
    yield Check("problem" if done.returncode else "ok", f"container: {said}")


# The cluster


def _config(experiment: Path | None) -> Config:
    """The config of a YAML, or one with the clusters of the user's own file alone."""
    from jobkit.config.load import load, read_user_file
    from jobkit.config.schema import Config

    return Config(name="doctor", **read_user_file()[0]) if experiment is None else load(experiment).config


def _options(config: Config, name: str) -> Options:
    from jobkit.submission.options import split

    clusters = {"slurm": {}, "local": {}, **config.clusters}
    if name not in clusters:
        hint = nearest(name, clusters)
        raise InputError(key="--cluster", found=name, allowed=f"one of {', '.join(clusters)}", hint=hint)
    return split(name, clusters[name])


def _slurm(options: Options) -> Iterator[Check]:
    from jobkit.slurm import commands, nodes

    filters = {key: str(value) for key in ("partition", "account", "qos") if (value := options.of_sbatch(key))}
    try:
        config = commands.config()
        yield Check("ok", f"Slurm {config.get('SLURM_VERSION')}, cluster {config.get('ClusterName')}")
        partitions = nodes.partitions(filters.get("partition"))
        if not partitions:
            yield Check("problem", f"no partition for {filters or 'a job'}", "set clusters.<name>.partition")
        for part in partitions:
            yield _partition(part, int(config.get("KillWait", "30 sec").split()[0]))
        yield from _held_job([f"--{key}={value}" for key, value in filters.items()])
    except SchedulerError as error:
        yield Check("problem", str(error), "use --local for this machine alone")


def _partition(part: Partition, kill_wait: int) -> Check:
    """Return whether a partition takes jobs, and Slurm's action on a job that it preempts."""
    words = f"partition {part.name} is {part.state}, PreemptMode={part.preempt_mode}"
    seconds = part.grace_seconds + kill_wait
    if part.state != "UP":
        return Check("problem", words, "its jobs wait until it is up")
    if "SUSPEND" in part.preempt_mode:
        return Check("warning", words, "a suspended job may be taken for hung, and keeps its GPUs: set `watchdog: off`")
    if part.preempt_mode != "OFF" and seconds < SHORT_SECONDS:
        words = f"{words}: a preempted run has {seconds} s to save"
        return Check("warning", words, "short for a big model's checkpoint: set `checkpoint: {every: 5min}` or so")
    return Check("ok", words)


def _held_job(options: list[str]) -> Iterator[Check]:
    """Submit a job that is held, look at it as Slurm has it, and remove it."""
    from jobkit.slurm import commands, jobs

    usual = ["--hold", "--requeue", "--time=1", "--job-name=jobkit-doctor", "--output=/dev/null"]
    job_id = commands.submit("--wrap=true", *usual, f"--comment={COMMENT}", *options)
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


def _network(config: Config, runs_dir: Path, cluster: str | None, nodes: int) -> Iterator[Check]:
    """Submit the probe as a run, wait for it, and print the time of each size."""
    from jobkit.config.yamlfile import dump
    from jobkit.run.journal import read_status
    from jobkit.run.rundir import RunDir

    folder = runs_dir / ".doctor"
    folder.mkdir(parents=True, exist_ok=True)
    yaml = folder / "network.yaml"
    values = {
        "name": "network-probe",
        "task": "jobkit.worker.network_probe:probe",
        "resources": {"nodes": nodes, "tasks_per_node": "auto", "time": "00:15:00"},
        "clusters": config.clusters,
        "container": None if config.container is None else dataclasses.asdict(config.container),
    }
    yaml.write_text(dump(values), encoding="utf-8")
    target = ["--local"] if cluster is None else ["--cluster", cluster, "--follow"]
    command = [sys.executable, "-m", "jobkit.submit", yaml.name, "--fresh", "--runs-dir", str(runs_dir), *target]
    code = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL).returncode
    run = max(runs_dir.glob("network-probe-*"), key=lambda path: path.stat().st_mtime, default=None)
    result = None if run is None else read_status(RunDir(run)).result
    if code != 0 or result is None:
        yield Check("problem", f"the probe of the network has not finished: {run}", f"jobkit logs {run}")
        return
    for row in result["world"]:
        words = f"{row['bytes'] >> 10} KiB over {result['ranks']} ranks: {row['seconds'] * 1e3:.2f} ms"
        yield Check("ok", f"{words}, {row['bus'] / 1e9:.2f} GB/s a rank ({result['backend']})")
    for name, value in result["nodes"].items():
        words, is_slow = f"node {name}: {value / 1e9:.2f} GB/s to a neighbour", name in result["slow"]
        advice = f"slower than the others; try again with exclude={name.split()[0]}" if is_slow else ""
        yield Check("warning" if is_slow else "ok", words, advice)
