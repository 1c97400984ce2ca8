"""What jobkit uses of Submitit beyond its documentation: this says in words what a newer one has changed."""

from __future__ import annotations

import configparser
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from submitit.core import core, submission
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission
from submitit.local import local
from submitit.slurm import slurm

from jobkit.worker.job_environment import JobkitJobEnvironment

SETUP = Path(__file__).parents[2] / "setup.cfg"
HERE = f"submitit {version('submitit')}"
ADVICE = f"change jobkit for it, or keep the range of submitit in {SETUP.name} below it"

SIGNATURES: list[tuple[str, Any, str]] = [
    ("SlurmExecutor", slurm.SlurmExecutor.__init__, "self folder max_num_timeout max_pickle_size_gb python"),
    ("SlurmExecutor.submit", slurm.SlurmExecutor.submit, "self fn args kwargs"),
    ("SlurmExecutor.update_parameters", slurm.SlurmExecutor.update_parameters, "self kwargs"),
    ("SlurmExecutor.affinity", slurm.SlurmExecutor.affinity, ""),
    (
        "SlurmExecutor._internal_process_submissions",
        slurm.SlurmExecutor._internal_process_submissions,
        "self delayed_submissions",
    ),
    (
        "SlurmExecutor._make_submission_file_text",
        slurm.SlurmExecutor._make_submission_file_text,
        "self command uid",
    ),
    ("SlurmExecutor._num_tasks", slurm.SlurmExecutor._num_tasks, "self"),
    ("SlurmJob", slurm.SlurmJob.__init__, "self folder job_id tasks"),
    (
        "LocalExecutor._internal_process_submissions",
        local.LocalExecutor._internal_process_submissions,
        "self delayed_submissions",
    ),
    ("LocalJob", local.LocalJob.__init__, "self folder job_id tasks process"),
    ("DelayedSubmission", DelayedSubmission.__init__, "self function args kwargs"),
    ("DelayedSubmission.dump", DelayedSubmission.dump, "self filepath"),
    ("process_job", submission.process_job, "folder"),
    ("JobEnvironment._handle_signals", JobEnvironment._handle_signals, "self paths submission"),
    (
        "_make_sbatch_string",
        slurm._make_sbatch_string,
        "command folder job_name partition time nodes ntasks_per_node cpus_per_task cpus_per_gpu num_gpus "
        "gpus_per_node gpus_per_task qos setup teardown mem mem_per_gpu mem_per_cpu signal_delay_s comment constraint "
        "exclude account gres mail_type mail_user nodelist dependency exclusive array_parallelism wckey "
        "stderr_to_stdout map_count additional_parameters srun_args use_srun",
    ),
]


def difference(name: str, found: list[str], written_for: list[str]) -> str:
    """What is new and what is gone, in words; empty where nothing is."""
    new = [one for one in found if one not in written_for]
    gone = [one for one in written_for if one not in found]
    words = [f"has {', '.join(new)}, which is new"] * bool(new) + [f"has no {', '.join(gone)} any more"] * bool(gone)
    if not words and found != written_for:
        words = [f"takes its parameters in another order: {', '.join(found)}"]
    return f"{HERE}: {name} {' and '.join(words)}: {ADVICE}" if words else ""


@pytest.mark.parametrize(("name", "function", "parameters"), SIGNATURES, ids=[row[0] for row in SIGNATURES])
def test_a_function_of_submitit_has_the_parameters_that_jobkit_was_written_for(
    name: str, function: Any, parameters: str
) -> None:
    said = difference(name, list(inspect.signature(function).parameters), parameters.split())
    assert not said, said


def test_the_options_of_a_cluster_are_those_of_submitits_function() -> None:
    written = [name for name, _, words in SIGNATURES if name == "_make_sbatch_string" for name in words.split()]
    said = difference(
        "_get_default_parameters",
        sorted(slurm._get_default_parameters()),
        sorted({*written} - {"command", "folder", "map_count"}),
    )
    assert not said, said


def test_submitit_asks_for_the_variables_that_jobkit_names() -> None:
    properties = {name for name, value in vars(JobEnvironment).items() if isinstance(value, property)}
    named = set(JobkitJobEnvironment._env)
    assert named == set(slurm.SlurmJobEnvironment._env) - {"nodes", "array_job_id", "array_task_id"}, (
        f"{HERE}: SlurmJobEnvironment._env names {sorted(slurm.SlurmJobEnvironment._env)}: {ADVICE}"
    )
    assert named <= properties, f"{HERE}: JobEnvironment has no {', '.join(named - properties)}: {ADVICE}"


def test_submitit_calls_what_jobkit_puts_in_its_place() -> None:
    assert "_internal_process_submissions" in inspect.getsource(core.Executor.submit), (
        f"{HERE}: Executor.submit does not call _internal_process_submissions any more: {ADVICE}"
    )
    assert "_handle_signals" in inspect.getsource(submission.process_job), (
        f"{HERE}: process_job does not call _handle_signals any more: {ADVICE}"
    )


def test_a_change_is_told_in_words() -> None:
    assert difference("f", ["a", "b"], ["a", "c"]).startswith(f"{HERE}: f has b, which is new and has no c any more")
    assert "another order: b, a" in difference("f", ["b", "a"], ["a", "b"])
    assert difference("f", ["a"], ["a"]) == ""


def test_the_range_of_submitit_ends_before_the_next_version_that_may_change_them() -> None:
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    (wanted,) = [line for line in setup["options"]["install_requires"].split() if line.startswith("submitit")]
    assert wanted == "submitit>=1.5.4,<1.6"
