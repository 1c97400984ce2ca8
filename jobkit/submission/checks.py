"""The refusals before anything is queued: a missing input, program or image, a directory of another user.

user_code.py looks at the task and the command.
submit.py calls `check`, the transaction the rest. Raises InputError with one hint.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from jobkit import disk, start
from jobkit.agent import devices
from jobkit.config import layout
from jobkit.config.machine import idle_devices
from jobkit.config.schema import ContainerConfig
from jobkit.errors import InputError, SchedulerError, SchedulerTimeout
from jobkit.mirror import services
from jobkit.run.files import foreign_owner
from jobkit.run.older import HINT
from jobkit.run.rundir import RunDir
from jobkit.run.snapshot import is_excluded
from jobkit.run.status import Status
from jobkit.slurm import commands
from jobkit.submission.plan import LaunchPlan
from jobkit.submission.user_code import NotInstalled, check_command, check_task

PLUGIN = "jobkit.worker.job_environment:JobkitJobEnvironment"
"""Submitit, in the job, finds jobkit's environment through this entry point."""


def check(plan: LaunchPlan, folder: Path) -> list[str]:
    """Refuse a plan that would fail in its job; returns lines for the user. `folder` is where the command was typed."""
    config, notes = plan.config, list(plan.notes)
    _check_runs_dir(plan)
    if not is_installed():
        raise InputError(f"jobkit is not installed in {sys.executable}: no job of it would start", hint="pip install")
    layout.check(config, config.resources.world_size, config.resources.ranks_per_node)
    for path in config.inputs:
        if not Path(path).exists():
            hint = "`~` is not expanded: write the whole path" if path.startswith("~") else ""
            raise InputError("no such file or directory", key="inputs", found=path, hint=hint)
    notes += _check_container(config.container, plan.target.scheduler)
    _check_srun_arguments(plan)
    try:
        module = config.task.partition(":")[0].replace(".", "/")
        for name in config.command or [f"{module}.py", f"{module}/__init__.py"]:
            is_code = name.endswith(".py") and (folder / name).is_file()
            if is_code and is_excluded(Path(name), config.code.exclude):
                raise InputError(f"the run needs {name}", key="code.exclude", found=config.code.exclude)
        notes += check_command(config.command, folder) if config.command else check_task(config.task, folder)
        for service in services(config.mirror):
            _check_service(service)
    except NotInstalled as error:
        if not plan.options.setup and config.container is None:
            raise
        provider = "the cluster's setup lines provide" if config.container is None else "the container provides"
        notes.append(f"{error}; the run fails unless {provider} it")
    if plan.target.scheduler == "local":
        devices.folder()  # refuses one that another user has made
        if idle := idle_devices(config, config.resources.world_size):
            notes.append(f"warning: {idle}")
    return notes


def _check_runs_dir(plan: LaunchPlan) -> None:
    runs_dir = plan.run.path.parent
    for key, path in (("--runs-dir", str(runs_dir)), ("Python", sys.executable), ("jobkit", start.FILE)):
        # The job script and the records are UTF-8.
        if path.encode(errors="ignore").decode() != path:
            raise InputError("its path is no UTF-8", key=key, found=path)
    if plan.target.scheduler == "slurm" and (match := re.search(r"%|\\", str(runs_dir))):
        # `%j` in the path of a log is the job's id, and a backslash ends such names.
        raise InputError(f"Slurm gives {match[0]} a meaning of its own", key="--runs-dir", found=str(runs_dir))


def _check_container(container: ContainerConfig | None, scheduler: str) -> Iterator[str]:
    """Refuse a runtime and an image that this machine does not have. A node of Slurm may have them: yield warnings."""
    words = container.prefix if container is not None else []
    images = [word for word in words if word.endswith((".sif", ".sqsh", ".simg")) and not Path(word).exists()]
    if scheduler == "local" and words and shutil.which(words[0]) is None:
        raise InputError("no such program on PATH", key="container.prefix", found=words[0])
    if scheduler == "local" and images:
        raise InputError("no such image", key="container.prefix", found=images[0])
    for image in images:
        yield f"warning: {image} is not on this machine; the run fails if it is on no node either"


def _check_srun_arguments(plan: LaunchPlan) -> None:
    """Refuse options that srun does not know: it reads them before `--version`, and asks no controller."""
    if plan.options.srun_args and plan.target.scheduler == "slurm" and commands.is_available():
        try:
            commands.run("srun", *plan.options.srun_args, "--version")
        except SchedulerTimeout:
            return  # the job asks it again
        except SchedulerError as error:
            key = f"clusters.{plan.target.name}.srun_args"
            raise InputError(str(error), key=key, found=" ".join(plan.options.srun_args)) from None


def is_installed() -> bool:
    """Return whether jobs of this Python find jobkit."""
    try:
        entries = distribution("jobkit").entry_points  # of all packages it would take 8 ms
    except PackageNotFoundError:
        return False
    return any(entry.group == "submitit" and entry.value == PLUGIN for entry in entries)


def _check_service(name: str) -> None:
    """Refuse a mirror whose package is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of the user's that has its name
        package = {"wandb": "wandb", "mlflow": "mlflow-skinny"}[name]
        raise NotInstalled(f"{package} is not installed", key=f"mirror.{name}", hint=f"pip install {package}")


# Directories


def refuse_unwritable(runs_dir: Path) -> None:
    """Make the runs directory. Raises InputError where nothing can be written there."""
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror}", key="--runs-dir", found=str(runs_dir)) from None
    if (problem := disk.write_probe(runs_dir)) is not None:
        raise disk.explained(problem) from problem


def refuse_foreign(run: RunDir) -> None:
    """Refuse to continue a run that another user owns, or whose config another user wrote: it would run as this one."""
    for path in (run.path, run.config_file):
        if path.exists() and (owner := foreign_owner(path)) is not None:
            raise InputError(f"it belongs to {owner}", hint="--fresh makes a run of your own").at(path)


def refuse_older(run: RunDir, status: Status) -> None:
    """Refuse to continue a run that an older jobkit made: its journal and its checkpoints have other forms."""
    if status.is_older:
        problem = f"an older jobkit made this run ({status.state}): it is left as it is, --fresh makes a new one"
        raise InputError(problem, key=run.name, hint=HINT if run.final.exists() else "")
