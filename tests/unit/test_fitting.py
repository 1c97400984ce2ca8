"""How many ranks and GPUs a submission has: `auto` in numbers, and what is said where they do not fit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import InputError
from jobkit.run.config import Config, ParallelConfig, Resources
from jobkit.run.device_kinds import KINDS, DeviceKind
from jobkit.run.experiment import load
from jobkit.run.identity import run_name
from jobkit.submission.devices import asked_for
from jobkit.submission.plan import LaunchPlan, make_plan
from jobkit.submission.sbatch import script

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml"))
SMALL = [path for path in EXPERIMENTS if "\ndemo:" in path.read_text()]


def plan(
    cluster: str = "local",
    entry: dict[str, Any] | None = None,
    parallel: Any = None,
    device: str = "auto",
    **resources: Any,
) -> LaunchPlan:
    config = Config(
        name="toy",
        task="m:f",
        device=device,
        resources=Resources(**resources),
        parallel=parallel or ParallelConfig(),
        clusters={cluster: entry} if entry is not None else {},
    )
    return make_plan(Path("/runs/toy-12345678"), config, cluster)


def numbers(made: LaunchPlan) -> tuple[int, int, int]:
    """(nodes, tasks of each, GPUs of each task)."""
    resources = made.config.resources
    return resources.nodes, resources.ranks_per_node, resources.devices_per_rank


HERE: list[tuple[str, dict[str, Any], tuple[int, int, int], str]] = [
    ("", {"tasks_per_node": "auto", "gpus_per_task": "auto"}, (1, 1, 0), ""),
    ("4,5", {"tasks_per_node": "auto", "gpus_per_task": "auto"}, (1, 2, 1), ""),
    ("0,1,2,3", {"tasks_per_node": "auto", "gpus_per_task": 2}, (1, 2, 2), ""),
    ("0,1,2,3", {"tasks_per_node": "auto", "gpus_per_task": "auto", "nodes": 2}, (2, 2, 1), ""),
    ("0,1,2,3", {"tasks_per_node": 2, "gpus_per_task": "auto"}, (1, 2, 1), "2 of 4 .* all: resources.tasks_per_node=4"),
    ("0", {"tasks_per_node": 2, "gpus_per_task": "auto"}, (1, 1, 1), "tasks_per_node is 1, not 2, so that each"),
    ("", {"tasks_per_node": 2, "gpus_per_task": "auto"}, (1, 2, 0), ""),
    ("0,1", {"tasks_per_node": 2}, (1, 2, 0), "0 of 2 .* all: resources.gpus_per_task=1$"),
    ("0,1,2", {"nodes": 2, "gpus_per_task": 1}, (2, 1, 1), "all: resources.nodes=1 resources.tasks_per_node=3$"),
    ("0,1", {"tasks_per_node": 2, "gpus_per_task": 1}, (1, 2, 1), ""),
]


@pytest.mark.parametrize(("visible", "resources", "expected", "note"), HERE)
def test_auto_is_what_this_machine_shows_and_what_is_left_unused_is_said(
    visible: str, resources: dict[str, Any], expected: tuple[int, int, int], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    made = plan(**resources)
    assert numbers(made) == expected
    assert [bool(re.search(note, said)) for said in made.notes] == [True] * bool(note), made.notes


def test_a_yaml_for_64_ranks_says_what_makes_it_fit_here(monkeypatch: pytest.MonkeyPatch) -> None:
    big: dict[str, Any] = {"nodes": 8, "tasks_per_node": 8, "gpus_per_task": 1}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    fits = (
        "64 rank.* need 64, CUDA_VISIBLE_DEVICES allows 2; .*add: resources.nodes=1 resources.tasks_per_node=2 .resou"
    )
    with pytest.raises(InputError, match=fits):
        plan(**big)
    with pytest.raises(InputError, match=r"add: clusters\.local\.nodes=1 resources\.tasks_per_node=2 "):
        plan(entry={"nodes": 8}, **big)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    with pytest.raises(InputError, match=r"resources\.tasks_per_node=6 "):  # 7 do not divide by 2
        plan(parallel=ParallelConfig(tensor=2), **big)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cpu = "resources.nodes=1 resources.tasks_per_node=1 resources.gpus_per_task=0 .*is the CPU.$"
    with pytest.raises(InputError, match=cpu):
        plan(**big)


def test_what_is_advised_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(InputError) as refused:
        plan(nodes=8, tasks_per_node=8, gpus_per_task=1)
    advice = str(refused.value).partition("add: ")[2].partition(" (")[0].replace("resources.", "").split()
    made = plan(**{"gpus_per_task": 1} | {key: int(value) for key, _, value in (one.partition("=") for one in advice)})
    assert (numbers(made), made.notes) == ((1, 2, 1), [])


def test_tasks_per_node_auto_alone_means_gpus_too_and_is_not_part_of_the_runs_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    (tmp_path / "toy.yaml").write_text("name: toy\ntask: m:f\nresources: {tasks_per_node: auto}\n")
    config = load(tmp_path / "toy.yaml").config
    made = make_plan(tmp_path / "run", config, "local")
    assert numbers(made) == (1, 3, 1)
    assert run_name(config) == run_name(made.config) == run_name(dataclasses.replace(config, resources=Resources()))
    on_cpu = load(tmp_path / "toy.yaml", ["resources.gpus_per_task=0"]).config
    assert numbers(make_plan(tmp_path / "run", on_cpu, "local")) == (1, 1, 0)


@pytest.mark.parametrize("visible", ["", "3", "0,1,2,3"])
@pytest.mark.parametrize("experiment", SMALL, ids=lambda path: path.stem)
def test_the_small_recipes_use_a_gpu_that_is_there(
    experiment: Path, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    overrides = ["params.run=/runs/a"] if experiment.stem.endswith(("_sample", "_generate")) else []
    made = make_plan(Path("/runs/a-1"), load(experiment, overrides, demo=True).config, "local")
    count = len(visible.split(",")) if visible else 0
    assert numbers(made) == ((1, min(2, count), 1) if count else (1, 2, 0))
    on_slurm = make_plan(Path("/runs/a-1"), load(experiment, overrides, demo=True).config, "slurm")
    assert numbers(on_slurm) == (1, 2, 0)


FULL = ("IMAGENET_DIR", "INCEPTION", "MINIMIND_DATA", "MINIMIND_TOKENIZER", "COGVIDEO_DATA", "COGVIDEO_WEIGHTS")


def full(experiment: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Config:
    for variable in FULL:
        monkeypatch.setenv(variable, "/data")
    run = ["params.run=/runs/a"] if experiment.stem.endswith(("_sample", "_generate")) else []
    return load(experiment, [*run, *overrides], demo=False).config


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda path: path.stem)
def test_the_full_recipes_run_on_a_workstations_gpus_and_keep_their_size_on_slurm(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = full(experiment, monkeypatch)
    wanted = config.resources.nodes, config.resources.tasks_per_node
    assert numbers(make_plan(Path("/runs/a-1"), config, "slurm")) == (*wanted, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    here = make_plan(Path("/runs/a-1"), config, "local")
    assert numbers(here) == (1, min(2, int(wanted[1])), 1)
    one = make_plan(Path("/runs/a-1"), full(experiment, monkeypatch, "resources.tasks_per_node=1"), "local")
    assert numbers(one) == (1, 1, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InputError, match=r"allows 0; .*add: resources.gpus_per_task=0 .*is the CPU"):
        make_plan(Path("/runs/a-1"), config, "local")


# On Slurm, where the submitting machine sees no node


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"gpus_per_node": 4}, ("gpus_per_node", 4)),
        ({"gpus_per_node": "a100:4"}, ("gpus_per_node", 4)),
        ({"gpus_per_node": "a100:2,h100:1"}, ("gpus_per_node", 3)),
        ({"gres": "gpu:a100:2,nvme:1"}, ("gres", 2)),
        ({"gres": "gpu"}, ("gres", 1)),
        ({"gres": "nvme:1"}, None),
        ({"additional_parameters": {"gpus-per-node": 8}}, ("gpus-per-node", 8)),
        ({}, None),
    ],
)
def test_what_an_entry_asks_for_is_understood(entry: dict[str, Any], expected: tuple[str, int] | None) -> None:
    assert asked_for(entry) == expected


def gpu_lines(made: LaunchPlan) -> list[str]:
    return [line for line in script(made).splitlines() if "gpu" in line or "gres" in line]


def test_auto_on_slurm_is_what_the_entry_asks_for() -> None:
    auto = {"tasks_per_node": "auto", "gpus_per_task": "auto"}
    made = plan("slurm", {"gpus_per_node": 8}, **auto)
    assert (numbers(made), gpu_lines(made), made.notes) == ((1, 8, 1), ["#SBATCH --gpus-per-node=8"], [])
    assert numbers(plan("slurm", {"gres": "gpu:8"}, tasks_per_node="auto", gpus_per_task=2)) == (1, 4, 2)
    assert numbers(plan("slurm", {"tasks_per_node": "auto", "gpus_per_node": 8}, gpus_per_task=1)) == (1, 8, 1)
    assert (numbers(plan("slurm", **auto)), gpu_lines(plan("slurm", **auto))) == ((1, 1, 0), [])
    with pytest.raises(InputError, match=r"how many GPUs a node has .*set clusters.slurm.gpus_per_node, or a number"):
        plan("slurm", tasks_per_node="auto", gpus_per_task=1)


def test_an_entrys_own_request_stays_and_is_the_only_one() -> None:
    made = plan("slurm", {"gres": "gpu:a100:4"}, tasks_per_node=2, gpus_per_task=1)
    assert gpu_lines(made) == ["#SBATCH --gres=gpu:a100:4"], "with two, Slurm shows the ranks the smaller one"
    assert [note.partition("; ")[2] for note in made.notes] == ["all: resources.tasks_per_node=auto"]
    with pytest.raises(InputError, match=r"clusters.slurm.gpus_per_node: 2 GPU.* but 4 task.* need 4"):
        plan("slurm", {"gpus_per_node": 2}, tasks_per_node=4, gpus_per_task=1)
    (note,) = plan("slurm", {"gpus_per_node": 2}, tasks_per_node=2).notes
    assert "0 of 2 GPU(s) are used" in note and "resources.gpus_per_task=auto" in note


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_gpus_are_asked_for_only_where_the_device_is_one(kind: DeviceKind) -> None:
    ranks = {"tasks_per_node": 8, "gpus_per_task": 1}
    assert kind.is_gpu == (kind.name in ("cuda", "xpu"))
    if kind.is_gpu:
        assert gpu_lines(plan("slurm", device=kind.name, **ranks)) == ["#SBATCH --gpus-per-node=8"]
    elif kind.name == "cpu":
        made = plan("slurm", device=kind.name, **ranks)
        assert (numbers(made), gpu_lines(made)) == ((1, 8, 0), [])
    else:
        name = kind.gres or kind.name
        with pytest.raises(InputError, match=rf"clusters.slurm.gres: missing.* {kind.name} is no GPU.*gres: {name}:8"):
            plan("slurm", device=kind.name, **ranks)
        made = plan("slurm", {"gres": f"{name}:8"}, device=kind.name, **ranks)
        assert (gpu_lines(made), made.notes) == ([f"#SBATCH --gres={name}:8"], [])
        assert f"8 rank(s), 1 {kind.name}(s) and" in made.describe()


@pytest.mark.parametrize(
    ("gres", "tasks"),
    [("npu:8", 8), ("nvme:1,npu:910b:4", 4), ("gpu:8", 8), ("ascend:910b:2", 2), ("npu:4,npu:other:2", 6)],
)
def test_the_ranks_of_a_node_of_npus_are_what_gres_says(gres: str, tasks: int) -> None:
    made = plan("slurm", {"gres": gres}, device="npu", tasks_per_node="auto", gpus_per_task=1)
    assert (numbers(made), gpu_lines(made)) == ((1, tasks, 1), [f"#SBATCH --gres={gres}"])


@pytest.mark.parametrize("ranks", [{"tasks_per_node": "auto"}, {"tasks_per_node": 2, "gpus_per_task": "auto"}])
def test_of_several_names_of_which_none_is_known_for_the_device_none_is_taken(ranks: dict[str, Any]) -> None:
    said = (
        r"clusters.slurm.gres: found nvme, ascend; which of them are the npus is not known here.*: set "
        r"resources.tasks_per_node and resources.gpus_per_task to numbers, as tasks_per_node=8 gpus_per_task=1$"
    )
    entry = {"gres": "nvme:1,ascend:910b:2"}
    with pytest.raises(InputError, match=said):
        plan("slurm", entry, device="npu", **{"gpus_per_task": 1, **ranks})
    made = plan("slurm", entry, device="npu", tasks_per_node=2, gpus_per_task=1)
    assert (numbers(made), gpu_lines(made), made.notes) == ((1, 2, 1), ["#SBATCH --gres=nvme:1,ascend:910b:2"], [])


def test_more_ranks_than_a_node_has_npus_are_refused_and_fewer_are_told() -> None:
    with pytest.raises(InputError, match=r"clusters.slurm.gres: 2 npu\(s\) on each node, but 4 task\(s\) of 1 need 4"):
        plan("slurm", {"gres": "npu:2"}, device="npu", tasks_per_node=4, gpus_per_task=1)
    (note,) = plan("slurm", {"gres": "npu:8"}, device="npu", tasks_per_node=4, gpus_per_task=1).notes
    assert "4 of 8 npu(s) are used (clusters.slurm.gres asks for 8 on each node)" in note


def test_an_entry_with_npus_is_not_given_gpus_as_well() -> None:
    made = plan("slurm", {"gres": "npu:8"}, tasks_per_node="auto", gpus_per_task="auto")
    assert (numbers(made), gpu_lines(made)) == ((1, 8, 1), ["#SBATCH --gres=npu:8"])


def test_a_device_that_is_named_is_never_left_out_for_want_of_a_number() -> None:
    made = plan("slurm", device="cuda", gpus_per_task="auto")
    assert (numbers(made), gpu_lines(made)) == ((1, 1, 1), ["#SBATCH --gpus-per-node=1"])


@pytest.mark.parametrize(
    "entry",
    [
        {"gpus": 4},
        {"gpu_bind": "single:1"},
        {"tres_per_task": "gres/gpu:1"},
        {"additional_parameters": {"gpus-per-task": 1}},
        {"srun_args": "--gpus-per-task=1"},
        {"srun_args": "--gpu-bind=closest"},
    ],
    ids=str,
)
def test_what_would_hide_a_nodes_gpus_from_its_ranks_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"clusters.slurm"):
        plan("slurm", entry)
