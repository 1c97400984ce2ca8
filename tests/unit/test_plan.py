"""The plan of a submission: what sbatch is asked for, and which mistakes in a cluster's entry are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import InputError, InvalidValue
from jobkit.run.config import Config, Resources
from jobkit.submission import options
from jobkit.submission.devices import visible_gpus
from jobkit.submission.plan import LaunchPlan, make_plan
from jobkit.submission.sbatch import script


def plan(clusters: dict[str, Any] | None = None, cluster: str = "slurm", **resources: Any) -> LaunchPlan:
    config = Config(name="toy", task="m:f", resources=Resources(**resources), clusters=clusters or {})
    return make_plan(Path("/runs/toy-12345678"), config, cluster)


def sbatch_lines(made: LaunchPlan) -> dict[str, str]:
    """The #SBATCH lines as {option: value}."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script(made), re.MULTILINE))


def test_the_script_asks_for_the_resources() -> None:
    lines = sbatch_lines(plan(nodes=2, tasks_per_node=3, gpus_per_task=1, cpus_per_task=4, time="1:30:30"))
    expected = {"nodes": "2", "ntasks-per-node": "3", "gpus-per-node": "3", "cpus-per-task": "4", "time": "91"}
    expected |= {"job-name": "toy-12345678", "signal": "USR2@90", "requeue": "", "open-mode": "append"}
    assert {key: lines[key] for key in expected} == expected
    assert "wckey" not in lines


@pytest.mark.parametrize("word", ["--ntasks=1", "-n1", "-N 2", "--nodelist=a"])
def test_srun_is_not_told_otherwise_how_many_tasks_there_are(word: str) -> None:
    with pytest.raises(InvalidValue, match=r"clusters.slurm.srun_args") as refused:
        plan({"slurm": {"srun_args": [word]}})
    assert "jobkit sets this itself" in str(refused.value)


def test_spares_are_nodes_beyond_those_that_have_ranks() -> None:
    lines = sbatch_lines(plan(nodes=4, tasks_per_node=8, spares=2, min_nodes=3))
    assert (lines["nodes"], lines["no-kill"]) == ("6", "")
    with pytest.raises(InvalidValue, match=r"resources.min_nodes.*found 5, allowed: at most resources.nodes, 4"):
        plan(nodes=4, min_nodes=5)


@pytest.mark.parametrize("written", ["30s", "1", "0:05:00", "9min", "2d"])
def test_the_stop_signal_comes_within_the_time_limit(written: str) -> None:
    lines = sbatch_lines(plan(time=written))
    before = int(lines["signal"].removeprefix("USR2@"))
    assert 0 < before < int(lines["time"]) * 60


def test_slurm_does_not_signal_a_command() -> None:
    config = Config(name="toy", command=["train"], clusters={"slurm": {"signal_delay_s": 300}})
    assert "signal" not in sbatch_lines(make_plan(Path("/runs/toy-12345678"), config, "slurm"))


def test_a_cluster_may_have_resources_of_its_own() -> None:
    entry = {"nodes": 4, "tasks_per_node": 8, "time": "2h", "cpus-per-task": 6}
    made = plan({"h100": entry}, "h100", nodes=1, gpus_per_task=1)
    assert made.scheduler == "slurm"
    assert made.config.resources == Resources(nodes=4, tasks_per_node=8, gpus_per_task=1, cpus_per_task=6, time="2h")
    lines = sbatch_lines(made)
    assert (lines["nodes"], lines["ntasks-per-node"], lines["time"]) == ("4", "8", "120")


@pytest.mark.parametrize("key", ["oversubscribe", "gpu_freq", "gpu-freq", "mem-bind", "nice", "reservation"])
def test_any_option_of_sbatch_passes_through_with_dashes_or_underscores(key: str) -> None:
    assert sbatch_lines(plan({"slurm": {key: "value", "partition": "low"}}))[key.replace("_", "-")] == "value"


def test_options_for_sbatch_alone_may_be_given_as_additional_parameters() -> None:
    lines = sbatch_lines(plan({"slurm": {"additional_parameters": {"brand_new": 3}, "nice": 5}}))
    assert (lines["brand-new"], lines["nice"], lines["requeue"]) == ("3", "5", "")


@pytest.mark.parametrize("key", ["array", "output", "requeue", "no-requeue", "signal", "job_name"])
def test_additional_parameters_are_no_way_around_what_jobkit_owns(key: str) -> None:
    with pytest.raises(InputError, match=key):
        plan({"slurm": {"additional_parameters": {key: "0-3"}}})


OPTION_MISTAKES = [
    ({"partion": "low"}, ["clusters.slurm.partion", "did you mean 'partition'?", "man sbatch"]),
    ({"cpus": 1}, ["clusters.slurm.cpus: not an option of sbatch"]),
    ({"output": "x"}, ["clusters.slurm.output", "jobkit logs"]),
    ({"ntasks-per-node": 2}, ["clusters.slurm.ntasks-per-node", "tasks_per_node"]),
    ({"array": "0-3"}, ["clusters.slurm.array", "one run is one job", "--sweep key=v1,v2"]),
    ({"scheduler": "pbs"}, ["clusters.slurm.scheduler: found 'pbs'", "slurm, local"]),
    ({"nodes": 0}, ["clusters.slurm.nodes: found 0", "1 or more"]),
    ({"time": "soon"}, ["clusters.slurm.time: found 'soon'", "30min"]),
    ({"additional_parameters": 5}, ["clusters.slurm.additional_parameters: found 5", "a mapping"]),
]


@pytest.mark.parametrize(("entry", "said"), OPTION_MISTAKES, ids=[str(row[0]) for row in OPTION_MISTAKES])
def test_a_mistake_in_a_cluster_is_named(entry: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        plan({"slurm": entry})
    for part in said:
        assert part in str(refused.value)


LINE = "low\n#SBATCH --array=0-9"
LINES = [
    ({"partition": LINE}, "clusters.slurm.partition"),
    ({"nice": "5\r"}, "clusters.slurm.nice"),
    ({"comment": "a\0b"}, "clusters.slurm.comment"),
    ({LINE: 1}, "clusters.slurm"),
    ({"additional_parameters": {"brand_new": LINE}}, "clusters.slurm.additional_parameters.brand_new"),
    ({"additional_parameters": {LINE: 1}}, "clusters.slurm.additional_parameters"),
    ({"additional_parameters": {"array=0-9": 1}}, "clusters.slurm.additional_parameters"),
    ({"srun_args": ["--mpi=none\ntrue"]}, "clusters.slurm.srun_args"),
    ({"srun_args": "'--mpi=none\ntrue'"}, "clusters.slurm.srun_args"),
    ({"setup": "a\0b"}, "clusters.slurm.setup"),
]


@pytest.mark.parametrize(("entry", "key"), LINES, ids=[repr(row[0]) for row in LINES])
def test_no_option_can_begin_a_line_of_its_own_in_the_batch_script(entry: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        plan({"slurm": entry})
    assert refused.value.key == key
    assert "\n" not in str(refused.value) and "\0" not in str(refused.value)


def test_setup_may_have_several_lines_and_srun_args_be_written_over_several() -> None:
    made = plan({"slurm": {"setup": "a\nb", "srun_args": "--mpi=none\n--label\n"}})
    assert (made.parameters["setup"], made.parameters["srun_args"]) == (["a\nb"], ["--mpi=none", "--label"])


@pytest.mark.parametrize("value", [{"a": 1}, [1], None], ids=str)
def test_additional_parameters_have_one_value_each(value: Any) -> None:
    with pytest.raises(InvalidValue, match=r"clusters.slurm.additional_parameters.brand_new: found .*one value"):
        plan({"slurm": {"additional_parameters": {"brand_new": value}}})


WRONG_TYPES = [{"setup": 5}, {"setup": [5]}, {"teardown": 5}, {"srun_args": 5}, {"partition": ["low"]}, {"mem": {}}]


@pytest.mark.parametrize("entry", WRONG_TYPES, ids=str)
def test_an_option_of_the_wrong_type_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"clusters.slurm.{next(iter(entry))}"):
        plan({"slurm": entry})


def test_every_owned_option_is_refused_and_no_allowed_one_is_owned() -> None:
    for key in options.OWNED:
        with pytest.raises(InputError, match="jobkit sets this itself"):
            options.split("slurm", {key: "x"})
    assert not options.OTHER_SBATCH & set(options.OWNED)


@pytest.mark.parametrize(
    ("name", "clusters", "said"),
    [
        ("slrum", {}, "did you mean 'slurm'?"),
        ("h10", {"h100": {}}, "did you mean 'h100'?"),
        ("mars", {"h100": {}}, "known: h100, slurm, local"),
    ],
)
def test_an_unknown_cluster_is_refused_with_the_nearest(name: str, clusters: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"--cluster {name}: no such cluster") as refused:
        plan(clusters, name)
    assert said in str(refused.value)


def test_a_cluster_entry_may_be_this_machine() -> None:
    made = plan({"box": {"scheduler": "local", "nodes": 2}}, "box")
    assert (made.scheduler, made.parameters, made.config.resources.nodes) == ("local", {}, 2)


# GPUs of this machine


@pytest.mark.parametrize(
    ("listed", "count"), [("", 0), ("0", 1), ("0,1,3", 3), (" 4 , 5 ", 2), ("-1", 0), ("GPU-1a2b,MIG-3c", 2)]
)
def test_local_gpus_are_those_that_cuda_is_allowed_to_see(
    monkeypatch: pytest.MonkeyPatch, listed: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus() == count


@pytest.mark.parametrize(
    ("listed", "resources", "fits"),
    [
        ("0,1", {"tasks_per_node": 2, "gpus_per_task": 1}, True),
        ("0,1", {"tasks_per_node": 3, "gpus_per_task": 1}, False),
        ("0,1,2,3", {"nodes": 2, "tasks_per_node": 2, "gpus_per_task": 1}, True),
        ("0,1,2", {"nodes": 2, "tasks_per_node": 2, "gpus_per_task": 1}, False),
        ("", {"tasks_per_node": 8, "gpus_per_task": 0}, True),
        ("", {"gpus_per_task": 1}, False),
    ],
)
def test_more_ranks_than_gpus_are_refused_on_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, listed: str, resources: dict[str, int], fits: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    if fits:
        plan(cluster="local", **resources)
    else:
        with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES allows") as refused:
            plan(cluster="local", **resources)
        assert "resources.gpus_per_task=0" in str(refused.value)
    plan(cluster="slurm", **resources)
