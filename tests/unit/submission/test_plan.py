"""From config and target to what Slurm or this machine gets: values in, values out."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jobkit.config import yamlfile
from jobkit.config.load import load
from jobkit.errors import InputError
from jobkit.slurm import commands, nodes
from jobkit.slurm.nodes import Partition
from jobkit.submission.plan import LaunchPlan, make_plan, target
from jobkit.submission.sbatch import SlurmExecutor

BASE: dict[str, Any] = {"name": "toy", "task": "toy:train"}


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "is_available", lambda: False)
    monkeypatch.setenv("JOBKIT_CONFIG", str(tmp_path / "none.yaml"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan(tmp_path: Path, cluster: str | None = "slurm", **values: Any) -> LaunchPlan:
    file = tmp_path / "toy.yaml"
    file.write_text(yamlfile.dump({**BASE, **values}))
    loaded = load(file)
    return make_plan(loaded, tmp_path / "runs", target(loaded.config, local=cluster is None, cluster=cluster))


def partitions(monkeypatch: pytest.MonkeyPatch, *choice: Partition) -> None:
    monkeypatch.setattr(commands, "is_available", lambda: True)
    monkeypatch.setattr(nodes, "partitions", lambda names: list(choice))


@pytest.mark.parametrize(
    ("has_slurm", "local", "cluster", "expected"),
    [
        (True, False, None, ("slurm", "slurm")),
        (False, False, None, ("local", "local")),
        (True, True, None, ("local", "local")),
        (False, False, "h100", ("h100", "slurm")),
        (True, False, "desk", ("desk", "local")),
        (True, False, "local", ("local", "local")),
    ],
)
def test_the_place_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_slurm: bool,
    local: bool,
    cluster: str | None,
    expected: tuple[str, str],
) -> None:
    monkeypatch.setattr(commands, "is_available", lambda: has_slurm)
    file = tmp_path / "toy.yaml"
    file.write_text(yamlfile.dump({**BASE, "clusters": {"h100": {}, "desk": {"scheduler": "local"}}}))
    place = target(load(file).config, local=local, cluster=cluster)
    assert (place.name, place.scheduler) == expected


def test_an_unknown_cluster_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        plan(tmp_path, "h10", clusters={"h100": {}})
    assert (caught.value.key, caught.value.found) == ("--cluster", "h10")
    assert "h100" in caught.value.allowed
    assert "h100" in caught.value.hint


def test_an_entry_overrides_resources_and_becomes_sbatch_parameters(tmp_path: Path) -> None:
    entry = {"partition": "h100", "nodes": 4, "time": "90min", "gpus_per_node": 8, "nice": 3, "exclusive": False}
    resources = {"nodes": 1, "tasks_per_node": "auto", "cpus_per_task": 6, "spares": 1}
    made = plan(tmp_path, "h100", resources=resources, clusters={"h100": entry})
    parameters = dict(made.parameters)
    assert parameters.pop("additional_parameters") == {"nice": 3, "requeue": True, "no_kill": True}
    assert parameters == {
        "job_name": made.run.name,
        "partition": "h100",
        "time": 90,
        "nodes": 5,
        "ntasks_per_node": 8,
        "cpus_per_task": 6,
        "gpus_per_node": 8,
        "wckey": None,
    }
    assert (made.config.resources.nodes, made.config.resources.world_size) == (4, 32)
    assert made.loaded.written["resources"]["tasks_per_node"] == 8


def test_a_slip_in_an_entry_that_is_not_used_shows_now(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        plan(tmp_path, None, clusters={"h100": {"partiton": "h100"}})
    assert caught.value.key == "clusters.h100.partiton"


def test_resources_do_not_name_the_run(tmp_path: Path) -> None:
    assert plan(tmp_path, resources={"nodes": 2}).run.name == plan(tmp_path, None, resources={"nodes": 3}).run.name


@pytest.mark.parametrize(
    ("entry", "expected"),
    [({}, 4), ({"gres": "gpu:a100:4"}, None), ({"gres": "gpu:4,tmp:9"}, None), ({"gpus_per_node": "a100:4"}, "a100:4")],
)
def test_gpus_are_asked_of_the_node_and_once(tmp_path: Path, entry: dict[str, Any], expected: Any) -> None:
    made = plan(tmp_path, "a", resources={"tasks_per_node": 4, "gpus_per_task": 1}, clusters={"a": entry})
    assert made.parameters.get("gpus_per_node") == expected


def test_more_ranks_than_the_entry_has_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        plan(tmp_path, "a", resources={"tasks_per_node": 8, "gpus_per_task": 1}, clusters={"a": {"gres": "gpu:4"}})
    assert caught.value.found == 8


@pytest.mark.parametrize(
    ("limits", "minutes"), [([], 60), ([None], 60), ([1800.0], 30), ([1800.0, 2700.0], 45), ([7 * 86400.0], 60)]
)
def test_time_auto_is_an_hour_or_the_partitions_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: list[float | None], minutes: int
) -> None:
    partitions(monkeypatch, *(Partition(f"p{index}", 9, max_seconds=limit) for index, limit in enumerate(limits)))
    made = plan(tmp_path)
    assert (made.parameters["time"], made.config.resources.seconds) == (minutes, minutes * 60)
    assert plan(tmp_path, None).config.resources.seconds is None


@pytest.mark.parametrize(
    ("entry", "resources", "key"),
    [
        ({}, {"time": "2h"}, "resources.time"),
        ({"time": "2h"}, {}, "clusters.a.time"),
        ({}, {"nodes": 3, "spares": 2}, "resources.nodes"),
        ({}, {"tasks_per_node": 8, "cpus_per_task": 3}, "resources.cpus_per_task"),
        ({"mem": "64G"}, {}, "clusters.a.mem"),
        ({"mem": 0}, {}, "clusters.a.mem"),
        ({"mem_per_cpu": "3G"}, {"tasks_per_node": 6, "cpus_per_task": 2}, "clusters.a.mem_per_cpu"),
        ({"mem_per_cpu": "2G"}, {"tasks_per_node": 8, "cpus_per_task": 2}, None),
        ({"mem": "64G", "qos": "long"}, {"time": "2h"}, None),  # a QOS may lift the limits
        ({"mem": "31GB"}, {"time": "1h"}, None),
    ],
)
def test_a_job_that_its_partition_never_starts_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: dict[str, Any], resources: dict[str, Any], key: str | None
) -> None:
    partitions(monkeypatch, Partition("p", 4, max_seconds=3600, max_cpus=16, max_megabytes=32 * 1024))
    if key is None:
        assert plan(tmp_path, "a", clusters={"a": entry}, resources=resources)
        return
    with pytest.raises(InputError) as caught:
        plan(tmp_path, "a", clusters={"a": entry}, resources=resources)
    assert caught.value.key == key


def test_a_partition_that_is_down_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    down = Partition("p", 4, state="DOWN")
    for choice, count in (([down], 1), ([down, Partition("q", 4)], 0)):
        partitions(monkeypatch, *choice)
        assert len(plan(tmp_path).notes) == count


def test_fewest_nodes_above_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        plan(tmp_path, resources={"nodes": 2, "min_nodes": 3})
    assert caught.value.key == "resources.min_nodes"


def header(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_the_batch_script_has_the_header_and_the_definitions(tmp_path: Path) -> None:
    setup = ["export A='it''s'", 'if true; then\n  B="$A b"\nfi']
    entry = {"partition": "h100", "setup": setup, "teardown": "echo bye", "srun_args": ["--export=ALL,A=b c"]}
    made = plan(tmp_path, "a", clusters={"a": entry})
    script = SlurmExecutor(made).script()
    options = header(script)
    assert "signal" not in options
    assert {"requeue", "no-kill"} <= set(options)
    assert options["open-mode"] == "append"
    assert options["output"] == str(made.run.job_log)
    assert "error" not in options
    assert (options["job-name"], options["partition"], options["time"]) == (made.run.name, "h100", "60")

    bash = shutil.which("bash")
    definitions = script.partition("# setup\n")[2].partition("\n# command\n")[0]
    show = 'printf "%s\\0" "$jobkit_scheduler" "${jobkit_runs[@]}" "${jobkit_setup[@]}" "${jobkit_srun_args[@]}"'
    printed = subprocess.run([str(bash), "-c", f"{definitions}\n{show}"], capture_output=True, check=True, text=True)
    assert printed.stdout.split("\0")[:-1] == ["slurm", str(made.run.path), *setup, "--export=ALL,A=b c"]
    subprocess.run([str(bash), "-n"], input=script, check=True, text=True, env=dict(os.environ))
