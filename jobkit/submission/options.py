"""The options of a cluster entry: Submitit's parameters, the other long options of sbatch, and keys of `resources`.

    clusters: {h100: {partition: h100, constraint: ib, setup: [module load cuda], nodes: 4}}
        -> split("h100", entry) -> Options(resources={"nodes": 4}, sbatch={...}, setup=["module load cuda"], ...)

plan.py calls it, for the entry that is used and, so that a mistake shows at once, for all others.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jobkit.config.schema import Resources
from jobkit.errors import InputError, nearest

_OTHER = """
acctg_freq batch bb bbf begin cluster_constraint consolidate_segments container container_id contiguous core_spec
cores_per_socket cpu_freq deadline delay_boot distribution export export_file extra extra_node_info get_user_env gid
gpu_freq gres_flags hint hold kill_on_invalid_dep licenses mcs_label mem_bind mincpus network nice nodefile
ntasks_per_core ntasks_per_socket oom_kill_step overcommit oversubscribe power prefer priority profile propagate reboot
reservation resv_ports segment sockets_per_node spread_job spread_segments stepmgr switches thread_spec threads_per_core
time_min tmp uid use_min_nodes wait_all_nodes
"""
OTHER_SBATCH = frozenset(_OTHER.split())
"""Long options of sbatch(1) that Submitit's signature does not have; its `additional_parameters` pass them on."""

RESOURCES = frozenset(field.name for field in dataclasses.fields(Resources))

_LOGS = "`python -m jobkit logs RUN` shows what was printed"
_GPUS = "set gpus_per_task, or gpus_per_node"
OWNED = {
    "job_name": "the job has the run's name; set `name`",
    "comment": "jobkit finds the run's job by it",
    "ntasks_per_node": "set tasks_per_node",
    "ntasks": "set nodes and tasks_per_node",
    "output": _LOGS,
    "error": _LOGS,
    "stderr_to_stdout": _LOGS,
    "open_mode": "a requeued job appends",
    "signal": "the supervisor watches the clock, and asks the ranks to save before the time is over",
    "signal_delay_s": "the supervisor watches the clock, and asks the ranks to save before the time is over",
    "array": "a run is one job",
    "array_parallelism": "a run is one job",
    "requeue": "always on: a preempted run continues by it",
    "no_requeue": "a preemption would end the run for ever",
    "no_kill": "always on: the run continues without a node that died",
    "chdir": "the job starts in the folder of the command",
    "wrap": "set task or command",
    "use_srun": "srun always starts the tasks",
    "num_gpus": _GPUS,
    "gpus": f"Slurm may divide them unevenly; {_GPUS}",
    "gpus_per_socket": _GPUS,
    "ntasks_per_gpu": "set tasks_per_node and gpus_per_task",
    "tres_per_task": "set gpus_per_task and cpus_per_task",
    "gpu_bind": "each rank sees all GPUs of its node, and LOCAL_RANK chooses",
    "clusters": "submit on a login node of that cluster",
}
"""Options whose values jobkit sets itself, and for each the user's next step."""

SWITCHES = {"kill_on_invalid_dep": ("no", "yes"), "oom_kill_step": (0, 1), "wait_all_nodes": (0, 1)}
"""Options that sbatch takes with a value for false and for true; YAML reads a bare `no` as false."""

_NODES = "set nodes and tasks_per_node"
SRUN_OWNED = {
    **dict.fromkeys(("-n", "-N", "--ntasks", "--nodes", "--ntasks-per-node"), _NODES),
    **dict.fromkeys(("-w", "--nodelist"), "set nodelist or exclude for the job"),
    **dict.fromkeys(("-c", "--cpus-per-task"), "set cpus_per_task"),
    **dict.fromkeys(("-G", "--gpus", "--gpus-per-task", "--gpu-bind"), "its ranks see all GPUs of their node"),
    **dict.fromkeys(("-o", "-e", "--output", "--error"), _LOGS),
}
"""Options of srun, which starts one agent a node, that jobkit sets itself."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A cluster entry, sorted by use."""

    resources: dict[str, Any] = field(default_factory=dict)
    """Keys of `resources:` that hold on this cluster."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Submitit's parameters, by the names of its signature."""
    additional: dict[str, Any] = field(default_factory=dict)
    """Other options of sbatch, with underscores."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the supervisor starts."""
    teardown: list[str] = field(default_factory=list)
    """Shell lines after it has ended."""
    srun_args: list[str] = field(default_factory=list)
    container: Mapping[str, Any] | None = None
    """Keys of `container:` that hold on this cluster; empty for none."""

    def of_sbatch(self, name: str) -> Any:
        """The value of an option of sbatch, wherever it was written; None if the entry does not set it."""
        return {**self.additional, **self.sbatch}.get(name)


@cache
def submitit_parameters() -> frozenset[str]:
    """The parameters of Submitit's function that writes a batch script."""
    from submitit.slurm import slurm  # imports asyncio: 70 ms

    return frozenset(slurm._get_default_parameters())


def split(cluster: str, entry: Mapping[str, Any]) -> Options:
    """The options of a cluster entry. Raises InputError with the nearest right name."""
    result = Options()
    for written, value in entry.items():
        name, key = str(written).replace("-", "_"), f"clusters.{cluster}.{written}"
        if value is None or name == "scheduler":
            continue
        if name == "additional_parameters" and value is not False:
            _add_unknown(result, value, key)
        elif name == "container" and isinstance(value, Mapping):  # a text is sbatch's own option
            result = dataclasses.replace(result, container=value)
        else:
            _sort_in(result, name, value, key)
    return result


def _sort_in(result: Options, name: str, value: Any, key: str) -> None:
    """Put one option where it belongs. One that is false is left out; jobkit's own is refused all the same: `requeue:
    false` asks for a job that jobkit does not make."""
    if name in OWNED:
        raise InputError("jobkit sets this option itself", key=key, hint=OWNED[name])
    if isinstance(value, bool) and name in SWITCHES:
        value = SWITCHES[name][value]
    if value is False:
        return
    if name in RESOURCES:
        result.resources[name] = value
    elif name in ("setup", "teardown", "srun_args"):
        getattr(result, name).extend(_texts(name, value, key))
    elif name in submitit_parameters():
        result.sbatch[name] = _scalar(value, key)
    elif name in OTHER_SBATCH:
        result.additional[name] = _scalar(value, key)
    else:
        allowed = (submitit_parameters() | OTHER_SBATCH | RESOURCES) - set(OWNED)
        raise InputError("not an option of sbatch", key=key, hint=nearest(name, allowed) or "`man sbatch` lists them")


def _add_unknown(result: Options, value: Any, key: str) -> None:
    """Take options that sbatch(1) need not have: a plug-in of the site may add some."""
    if not isinstance(value, Mapping):
        raise InputError(key=key, found=value, allowed="a mapping of options")
    for written, inner in value.items():
        name, inner_key = str(written).replace("-", "_"), f"{key}.{written}"
        if not re.fullmatch(r"[A-Za-z]\w*", name):
            raise InputError(key=inner_key, found=str(written), allowed="the name of a long option of sbatch")
        if inner is None:
            continue
        if name in {*OWNED, *RESOURCES, *submitit_parameters(), *SWITCHES}:
            _sort_in(result, name, inner, inner_key)
        elif inner is not False:
            result.additional[name] = _scalar(inner, inner_key)


def _texts(name: str, value: Any, key: str) -> list[str]:
    if isinstance(value, str):
        texts = shlex.split(value) if name == "srun_args" else [value]
    elif isinstance(value, list) and all(isinstance(text, str) for text in value):
        texts = value
    else:
        raise InputError(key=key, found=value, allowed="a text or a list of texts")
    for text in texts:
        option = text.partition("=")[0] if text.startswith("--") else text[:2]
        if name == "srun_args" and option in SRUN_OWNED:
            raise InputError("jobkit sets this option itself", key=key, found=text, hint=SRUN_OWNED[option])
        if "\0" in text:
            raise InputError(key=key, found=text, allowed="a text without a NUL character")
    return texts


def _scalar(value: Any, key: str) -> Any:
    # A line end would begin a line of its own in the batch script.
    if isinstance(value, (str, int, float)) and not any(character in str(value) for character in "\n\r\0"):
        return value
    raise InputError(key=key, found=value, allowed="one value in one line, as sbatch takes it")
