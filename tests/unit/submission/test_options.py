"""Options of a cluster entry: sorted by what they are for, or refused with the nearest right name."""

from __future__ import annotations

from typing import Any

import pytest

from jobkit.errors import InputError
from jobkit.submission.options import OWNED, Options, split


def test_an_entry_is_sorted() -> None:
    entry = {
        "partition": "h100",
        "constraint": "ib",
        "nodes": 4,
        "min_nodes": 2,
        "core-spec": 2,
        "exclusive": True,
        "setup": ["module load cuda", "if true; then\n  x=1\nfi"],
        "teardown": "rm -r $TMP",
        "srun_args": "--mpi=none --export=ALL",
        "scheduler": "slurm",
        "additional_parameters": {"container-image": "a b.sqsh", "licenses": "a:1", "gpus_per_node": 2},
    }
    assert split("h100", entry) == Options(
        resources={"nodes": 4, "min_nodes": 2},
        sbatch={"partition": "h100", "constraint": "ib", "exclusive": True, "gpus_per_node": 2},
        additional={"core_spec": 2, "container_image": "a b.sqsh", "licenses": "a:1"},
        setup=["module load cuda", "if true; then\n  x=1\nfi"],
        teardown=["rm -r $TMP"],
        srun_args=["--mpi=none", "--export=ALL"],
    )


def test_a_false_or_null_option_is_left_out() -> None:
    entry = {"exclusive": False, "qos": None, "spares": None, "additional_parameters": {"reboot": False, "tmp": None}}
    assert split("h100", entry) == Options()


def test_false_of_an_option_with_a_value_reaches_sbatch() -> None:
    """`kill_on_invalid_dep: no` is false for YAML, and sbatch's default is yes."""
    entry = {"kill-on-invalid-dep": False, "additional_parameters": {"oom_kill_step": False, "wait-all-nodes": True}}
    assert split("a", entry).additional == {"kill_on_invalid_dep": "no", "oom_kill_step": 0, "wait_all_nodes": 1}


REFUSED: list[tuple[dict[str, Any], str, str]] = [  # entry, key, part of the hint
    ({"partiton": "h100"}, "clusters.a.partiton", "'partition'"),
    ({"wall-time": "1h"}, "clusters.a.wall-time", "'time'"),
    ({"signal_delay_s": 90}, "clusters.a.signal_delay_s", "clock"),
    ({"ntasks-per-node": 8}, "clusters.a.ntasks-per-node", "tasks_per_node"),
    ({"comment": "mine"}, "clusters.a.comment", "finds"),
    ({"requeue": False}, "clusters.a.requeue", "always on"),
    ({"no-kill": False}, "clusters.a.no-kill", "always on"),
    ({"additional_parameters": {"requeue": False}}, "clusters.a.additional_parameters.requeue", "always on"),
    ({"additional_parameters": {"array": "0-3"}}, "clusters.a.additional_parameters.array", "one job"),
    ({"srun_args": ["-n4"]}, "clusters.a.srun_args", "nodes"),
    ({"srun_args": "--ntasks=4"}, "clusters.a.srun_args", "nodes"),
]


@pytest.mark.parametrize(("entry", "key", "hint"), REFUSED, ids=[key for _, key, _ in REFUSED])
def test_what_jobkit_owns_or_sbatch_does_not_know_is_refused(entry: dict[str, Any], key: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        split("a", entry)
    assert caught.value.key == key
    assert hint in caught.value.hint


VALUES: list[tuple[dict[str, Any], str]] = [
    ({"constraint": "a\nrm -r /"}, "clusters.a.constraint"),
    ({"partition": ["a", "b"]}, "clusters.a.partition"),
    ({"setup": {"module": "cuda"}}, "clusters.a.setup"),
    ({"setup": ["a\0b"]}, "clusters.a.setup"),
    ({"additional_parameters": "x"}, "clusters.a.additional_parameters"),
    ({"additional_parameters": {"a=b": 1}}, "clusters.a.additional_parameters.a=b"),
    ({"additional_parameters": {"image": "a\rb"}}, "clusters.a.additional_parameters.image"),
]


@pytest.mark.parametrize(("entry", "key"), VALUES)
def test_a_value_that_no_line_of_the_script_can_hold_is_refused(entry: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        split("a", entry)
    assert caught.value.key == key
    assert caught.value.allowed


def test_every_owned_option_has_a_next_step() -> None:
    assert all(OWNED.values())
