"""The refusals before anything is queued: a missing task, command or input, a directory of another user.

Answers come from file names and syntax. Nothing of the user is imported: that would cost seconds of torch.
submit.py calls `check`, the transaction the rest. Raises InputError with one hint.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from jobkit.errors import InputError, SchedulerError, SchedulerTimeout, nearest
from jobkit.mirror import services
from jobkit.run import disk, layout
from jobkit.run.files import foreign_owner
from jobkit.run.machine import idle_devices
from jobkit.run.older import HINT
from jobkit.run.rundir import RunDir
from jobkit.run.schema import ContainerConfig
from jobkit.run.status import Status
from jobkit.slurm import commands
from jobkit.submission.plan import LaunchPlan

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
        notes += _check_command(config.command, folder) if config.command else _check_task(config.task, folder)
        for service in services(config.mirror):
            _check_service(service)
    except _NotInstalled as error:
        if not plan.options.setup and config.container is None:
            raise
        provider = "the cluster's setup lines provide" if config.container is None else "the container provides"
        notes.append(f"{error}; the run fails unless {provider} it")
    if plan.target.scheduler == "local" and (idle := idle_devices(config, config.resources.world_size)):
        notes.append(f"warning: {idle}")
    return notes


class _NotInstalled(InputError):
    """A program or a package is not here. In the job a container, or setup lines of the cluster, may provide it."""


def _check_runs_dir(plan: LaunchPlan) -> None:
    runs_dir = plan.run.path.parent
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


# Task and command


def _check_task(task: str, folder: Path) -> Iterator[str]:
    """Refuse `module:callable` where the module is not found, is no valid Python or defines no such name; yield
    warnings."""
    module, _, name = task.partition(":")
    spec = _find(module, folder, "task")
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise InputError("not a Python file", key="task", found=spec.origin or f"the folder {module}")
    yield from _imports_from_above(Path(spec.origin), folder)
    names = _names_in(Path(spec.origin))
    if names is not None and name not in names:
        raise InputError(f"{spec.origin} does not define it", key="task", found=name, hint=nearest(name, sorted(names)))


def _find(module: str, folder: Path, key: str) -> ModuleSpec:
    """The spec of a dotted module. Its parents are not imported."""
    path: list[str] = [str(folder), *sys.path]
    spec: ModuleSpec | None = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None and path[:1] == [str(folder)]:
            spec = importlib.util.find_spec(part)  # an editable install has a finder of its own
        if spec is None:
            break
        path = [*(spec.submodule_search_locations or ())]
    if spec is None:
        top = module.partition(".")[0]
        hint = nearest(module, [file.stem for file in folder.glob("*.py")])
        if (above := _folder_above(top, folder)) is not None:
            hint = f"{top} is in {above}: type the command there"
        raise _NotInstalled(f"no such module in {folder}, and none is installed", key=key, found=module, hint=hint)
    return spec


def _imports_from_above(file: Path, folder: Path) -> Iterator[str]:
    """Yield a line for each module that a file may import from a folder above, by `__file__`: its copy in the job has
    other folders above."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if not file.is_relative_to(folder) or "__file__" not in text:
        return
    for node in _parse(file).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in {name.partition(".")[0] for name in names}:
            above = _folder_above(name, folder)
            if above is None or PathFinder.find_spec(name, [str(file.parent), str(folder)]):
                continue
            if importlib.util.find_spec(name) is None:
                yield f"warning: {file.name} imports {name}; if that is {above / name}, type the command in {above}"


def _folder_above(module: str, folder: Path) -> Path | None:
    """The folder above that has a module."""
    places = ((above, above / module) for above in folder.parents)
    is_there = (above for above, path in places if path.with_suffix(".py").exists() or any(path.glob("*.py")))
    return next(is_there, None)


def _names_in(file: Path) -> set[str] | None:
    """The names that a module's top defines; None where a star import, or a test, leaves that open."""
    names: set[str] = set()
    for node in _parse(file).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            stored = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
            names |= {inner.id for inner in stored if isinstance(inner.ctx, ast.Store)}
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                return None
    return None if "*" in names else names


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        message = getattr(error, "msg", str(error))
        raise InputError(f"not valid Python: {message}").at(file, getattr(error, "lineno", 1)) from None


def _check_command(command: list[str], folder: Path) -> Iterator[str]:
    """Refuse a program that is not on PATH, and for a Python a script or module that is not there; yield
    warnings."""
    program, *words = command
    if shutil.which(program, path=None if os.sep not in program else str(folder)) is None:
        if (folder / program).is_file():
            raise InputError("it may not be executed", key="command", found=program, hint=f"chmod +x {program}")
        hint = nearest(program, ["python", "torchrun", "accelerate", "bash"])
        raise _NotInstalled("no such program on PATH", key="command", found=program, hint=hint)
    if not re.fullmatch(r"python[\d.]*", Path(program).name):
        return
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[2:] if words[0] in ("-W", "-X") else words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        _find(words[1], folder, "command")
    elif words[:1] != ["-c"]:
        if not words:
            raise InputError("it runs nothing", key="command", found=program, allowed="a script, -m MODULE or -c CODE")
        if "${" not in words[0] and not (folder / words[0]).exists():
            hint = nearest(words[0], [file.name for file in folder.glob("*.py")])
            raise InputError(f"no such file in {folder}", key="command", found=words[0], hint=hint)
        if words[0].endswith(".py") and (folder / words[0]).is_file():
            _parse(folder / words[0])
            yield from _imports_from_above(folder / words[0], folder)


def _check_service(name: str) -> None:
    """Refuse a mirror whose package is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of the user's that has its name
        package = {"wandb": "wandb", "mlflow": "mlflow-skinny"}[name]
        raise _NotInstalled(f"{package} is not installed", key=f"mirror.{name}", hint=f"pip install {package}")


# Directories


def refuse_unwritable(runs_dir: Path) -> None:
    """Make the runs directory. Raises InputError where nothing can be written there."""
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror}", key="--runs-dir", found=str(runs_dir)) from None
    if (problem := disk.write_probe(runs_dir)) is not None:
        raise disk.explained(problem)


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
