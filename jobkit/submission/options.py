"""The options a cluster entry may hold: Submitit's parameters, all other options of sbatch, and our resources."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from typing import Any

from submitit.slurm import slurm as submitit_slurm

from jobkit.errors import InvalidValue, nearest
from jobkit.run.config import Resources

_OTHER = """
acctg_freq batch bb bbf begin cluster_constraint container contiguous core_spec cores_per_socket cpu_freq deadline
delay_boot distribution export export_file extra_node_info get_user_env gid gpu_freq gres_flags hint hold
kill_on_invalid_dep licenses mcs_label mem_bind mincpus network nice no_kill nodefile ntasks_per_core
ntasks_per_socket overcommit oversubscribe power prefer priority profile propagate reboot reservation sockets_per_node
spread_job switches thread_spec threads_per_core time_min tmp uid use_min_nodes wait_all_nodes
"""
OTHER_SBATCH = frozenset(_OTHER.split())
"""Long options of sbatch(1) that Submitit's signature does not have; its additional_parameters pass them on."""

RESOURCES = frozenset(field.name for field in dataclasses.fields(Resources))

# Options whose value jobkit needs for itself, and where to say instead what a person wants by them.
OWNED = {
    "job_name": "the job's name is the run's; set `name`",
    "ntasks_per_node": "set tasks_per_node",
    "ntasks": "set nodes and tasks_per_node",
    "output": "logs are in the run directory: `python -m jobkit logs RUN`",
    "error": "logs are in the run directory: `python -m jobkit logs RUN`",
    "open_mode": "a requeued job appends",
    "signal": "set signal_delay_s",
    "array": "one run is one job; several runs are an array: --sweep key=v1,v2",
    "requeue": "always on: that is how a preempted run continues",
    "no_requeue": "a run that may not be requeued would be lost by a preemption",
    "chdir": "the job starts where the command was typed",
    "wrap": "set task",
    "use_srun": "the tasks are always started by srun",
    "array_parallelism": "one run is one job; how many of a sweep's train at once: --max-running",
    "stderr_to_stdout": "each rank has a file for either",
    "num_gpus": "set gpus_per_task",
    "gpus": "Slurm may spread them unevenly; set gpus_per_task, or gpus_per_node",
    "gpus_per_socket": "set gpus_per_task, or gpus_per_node",
    "ntasks_per_gpu": "set tasks_per_node and gpus_per_task",
    "tres_per_task": "set gpus_per_task and cpus_per_task",
    "gpu_bind": "each rank sees all GPUs of its node, and LOCAL_RANK chooses",
    "clusters": "it asks the Slurm of this machine about its jobs: submit on that cluster's login node",
}


SRUN_OWNED = {
    **dict.fromkeys(("-n", "-N", "--ntasks", "--nodes", "--ntasks-per-node"), "set nodes and tasks_per_node"),
    **dict.fromkeys(("-w", "--nodelist"), "set it for the job, or exclude nodes"),
    **dict.fromkeys(("-c", "--cpus-per-task"), "set cpus_per_task"),
    **dict.fromkeys(("-G", "--gpus", "--gpus-per-task", "--gpu-bind"), "its ranks see all GPUs of their node"),
    **dict.fromkeys(("-o", "-e", "--output", "--error"), "logs are in the run directory: `python -m jobkit logs RUN`"),
}
"""Options of srun, which starts one process a node, that jobkit needs for itself."""


NUL = "\0"
LINE_ENDS = "\n\r" + NUL
"""What would begin a line of its own in the batch script, or end the script for its reader."""
_NAMED = {LINE_ENDS: "line breaks", NUL: "a NUL character"}


def split(cluster: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A cluster entry as (resources it overrides, Submitit's parameters); raises InvalidValue, with the nearest key."""
    submitit = set(submitit_slurm._get_default_parameters())
    allowed = (submitit | OTHER_SBATCH | RESOURCES) - set(OWNED)
    resources: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    additional: dict[str, Any] = {}
    for written, value in options.items():
        _refuse_line_ends(str(written), f"clusters.{cluster}", "a key")
        key = str(written).replace("-", "_")
        full_key = f"clusters.{cluster}.{written}"
        if key == "scheduler":
            continue
        _refuse_owned(key, full_key)
        if key not in allowed:
            raise InvalidValue(full_key, f"not an option of sbatch{nearest(key, allowed)} (`man sbatch` lists them)")
        if key in RESOURCES:
            resources[key] = value
        elif key == "additional_parameters":
            additional.update(_additional(value, full_key))
        elif key == "signal_delay_s" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise InvalidValue(full_key, f"found {value!r}, expected a number of seconds")
        elif key in submitit:
            texts = key in ("setup", "teardown", "srun_args")
            parameters[key] = _texts(key, value, full_key) if texts else _scalar(value, full_key)
            for word in parameters[key] if key == "srun_args" else ():
                name = word.partition("=")[0] if word.startswith("--") else word[:2]
                if name in SRUN_OWNED:
                    raise InvalidValue(full_key, f"{name}: jobkit sets this itself: {SRUN_OWNED[name]}")
        else:
            additional[key] = _scalar(value, full_key)
    if additional:
        parameters["additional_parameters"] = additional
    return resources, parameters


def with_dependency(parameters: Mapping[str, Any], more: str) -> dict[str, Any]:
    """Submitit's parameters of a job that waits for more than the user's own entry says, in sbatch's words."""
    additional = dict(parameters.get("additional_parameters", {}))
    both = (parameters.get("dependency"), additional.pop("dependency", None), more)
    return {**parameters, "additional_parameters": additional, "dependency": ",".join(str(one) for one in both if one)}


def _texts(key: str, value: Any, full_key: str) -> list[str]:
    if isinstance(value, str):
        texts = shlex.split(value) if key == "srun_args" else [value]
    elif isinstance(value, list) and all(isinstance(one, str) for one in value):
        texts = value
    else:
        raise InvalidValue(full_key, f"found {value!r}, expected a text or a list of texts")
    for text in texts:
        # setup and teardown are lines of the script themselves.
        _refuse_line_ends(
            text, full_key, "an argument" if key == "srun_args" else "a text", LINE_ENDS if key == "srun_args" else NUL
        )
    return texts


def _scalar(value: Any, full_key: str) -> Any:
    if isinstance(value, (str, int, float)):  # bool is an int
        _refuse_line_ends(str(value), full_key, "one value")
        return value
    raise InvalidValue(full_key, f"found {value!r}, expected one value, as sbatch takes it")


def _additional(value: Any, full_key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValue(full_key, f"found {value!r}, expected a mapping")
    for key in value:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", str(key)):  # `array=0-3` would be one that jobkit owns
            raise InvalidValue(full_key, f"found {str(key)!r}, expected the name of an option of sbatch")
        _refuse_owned(str(key).replace("-", "_"), f"{full_key}.{key}")
        if str(key).replace("-", "_") == "gpus_per_task":  # Slurm would divide a node's GPUs among its tasks
            raise InvalidValue(f"{full_key}.{key}", "set gpus_per_task in the entry itself, or under resources")
    return {str(key): _scalar(one, f"{full_key}.{key}") for key, one in value.items()}


def _refuse_line_ends(text: str, full_key: str, expected: str, refused: str = LINE_ENDS) -> None:
    if any(character in text for character in refused):
        raise InvalidValue(full_key, f"found {text!r}, expected {expected} without {_NAMED[refused]}")


def _refuse_owned(key: str, full_key: str) -> None:
    if key in OWNED:
        raise InvalidValue(full_key, f"jobkit sets this itself: {OWNED[key]}")
