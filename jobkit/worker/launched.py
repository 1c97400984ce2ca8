"""A run whose ranks torchrun, mpirun, srun or a person has started: its resources, its folder, its attempt."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import socket
import sys
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
from filelock import FileLock, Timeout
from torch.distributed import Store  # type: ignore[attr-defined]

from jobkit.errors import InputError, JobkitError
from jobkit.group import RankGroup
from jobkit.run import layout, secrets
from jobkit.run.command_line import is_started_by_itself, own_words
from jobkit.run.config import AUTO, Config
from jobkit.run.events import Event
from jobkit.run.identity import run_name
from jobkit.run.left_unfinished import left_unfinished
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.supervisor import attempt as attempts
from jobkit.worker.disks import Disks
from jobkit.worker.launcher import Topology

STORE_SECONDS = 5.0
"""How long a rank that has failed waits for an answer of the store, which may be gone with rank 0."""

OF_THIS_MACHINE = ("resources", "clusters", "inputs")
"""Keys of a config that may differ from machine to machine."""


def with_ranks(config: Config, topology: Topology, gpus: int | None) -> Config:
    """The config with the resources that were started; `gpus`, of each rank, is the YAML's where None.

    Raises InputError where its `parallel:` does not fit so many ranks.
    """
    even = topology.nodes * topology.local_world_size == topology.world_size
    per_node = topology.local_world_size if even else 1
    resources = dataclasses.replace(
        config.resources,
        nodes=topology.world_size // per_node,
        tasks_per_node=per_node,
        gpus_per_task=_gpus_of_rank(config) if gpus is None else gpus,
    )
    try:
        layout.check(config.parallel, config.comm, resources, config.precision)
    except ValueError as error:
        raise InputError(f"parallel: {error} (started were {topology.world_size} rank(s))") from None
    config = dataclasses.replace(config, resources=resources)
    try:
        layout.check_verification(config)
    except ValueError as error:
        raise InputError(f"verify_every: {error}") from None
    return config


def _gpus_of_rank(config: Config) -> int:
    each = config.resources.gpus_per_task
    return int(torch.accelerator.is_available()) if each == AUTO else int(each)


def make_folders(run: RunDir) -> None:
    """On every rank: each learns by itself whether it can write where the others are."""
    try:
        for folder in (run.launch_file("").parent, run.checkpoints, run.tensorboard):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; set runs_dir=... or JOBKIT_RUNS") from None


def begin(run: RunDir, config: Config, launcher: str, lock: FileLock) -> int | None:
    """On rank 0: own the run and begin an attempt; its number, or None where the run is finished.

    `lock` is held until this process ends: two scripts never write one run.
    """
    try:
        lock.acquire(timeout=10)  # whoever asks whether the run lives takes the lock for an instant
    except Timeout:
        raise JobkitError(f"{run.name} is being run by another process already") from None
    before = run.status()
    script = own_script()
    if _is_another(before.script, script):
        raise JobkitError(
            f"{run.name} is a run of {before.script}, and this is {script}, with the same name and params: give it a "
            "name of its own, jobkit.init(name=...)"
        )
    if before.state == State.FINISHED:
        print(f"already finished{before.at_steps}: {run.path}; other params or another name make a new run")
        return None
    if told_before := left_unfinished(run, config, RunDir.status):
        print(told_before, file=sys.stderr)
    run.write_config(config)  # before the event: whoever sees a run in the journal may read its config
    by = "python" if is_started_by_itself() else launcher
    here = str(Path.cwd())
    told = {"script": script, "typed": _typed(by), "launcher": by, "cwd": here, **config.told()}
    run.record(Event.SUBMITTING, cluster="local", scheduler="local", **told)
    return attempts.begin(run, job_id=str(os.getpid()), scheduler="local", launcher=launcher).number


def _typed(launcher: str) -> str:
    """What starts this process again, as others may see it; torchrun has put the Python in front of it."""
    words = own_words()
    if launcher == "torchrun" and words:
        words = words[2:] if words[1:2] == ["-u"] else words[1:]
    return shlex.join(secrets.masked(words))


def own_script() -> str:
    """The path of the user's script that this process runs; empty where it is none, as in a notebook."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" or not script.is_file() or Path(__file__).parents[1] in script.resolve().parents:
        return ""
    return str(script.resolve())


def _is_another(before: str, script: str) -> bool:
    """Whether a run is of another script: not one that was moved or copied."""
    if not before or not script or before == script or not Path(before).is_file():
        return False
    return Path(before).read_bytes() != Path(script).read_bytes()


def give_config(run: RunDir, config: Config, group: RankGroup, disks: Disks) -> None:
    """Write the config on the disks that are not rank 0's, too: a jobkit.init in a `command:` looks for it there."""
    is_first = group.rank != 0 and any(disk[0] == group.rank for disk in disks)
    group.all_or_none(lambda: run.write_config(config) if is_first else None)


def refuse_different_configs(config: Config, group: RankGroup) -> None:
    """Raise InputError, on all ranks, where machines were given different YAMLs or overrides. Collective.

    What is secret in a config is not sent: digests of its values are.
    """
    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in OF_THIS_MACHINE}
    own = {key: _digest(value) for key, value in values.items()}
    found = group.gather((socket.gethostname(), run_name(config), own))
    host, name, first = found[0]
    for rank, (other_host, other_name, other) in enumerate(found):
        if differ := [key for key in first if other.get(key) != first[key]]:
            raise InputError(
                f"rank {rank} on {other_host} was given another {', '.join(differ)} ({other_name}) than rank 0 on "
                f"{host} ({name}): give all machines the same YAML and the same overrides"
            )


def show_first_traceback(store: Store) -> None:
    """Let the first rank that fails print its traceback, and the others a line: theirs follow from it, or say the same.

    `store` is one that all ranks see. Where it has gone, a rank prints its own.
    """
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_first = True
        with contextlib.suppress(RuntimeError):
            store.set_timeout(timedelta(seconds=STORE_SECONDS))
            is_first = store.add("jobkit.worker/tracebacks", 1) == 1
        if is_first:
            shown(kind, error, trace)
        else:
            line = (str(error).splitlines() or [""])[0]
            print(f"rank {os.environ['RANK']} ended after another rank: {kind.__name__}: {line}", file=sys.stderr)

    sys.excepthook = show


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
