"""The articles' own commands against a script with jobkit.init, and any YAML under the launchers that people have."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import article
from harness.ranks import free_port
from harness.runs import PATIENCE, Project
from slurmbox import Cluster

EXPORT = "export IMAGENET_DIR=$PWD/data IMAGENET_RES=64 CUDA_VISIBLE_DEVICES=4,5; "
DATA = " train.py --data_path=${IMAGENET_DIR}/train_${IMAGENET_RES}/box/"
TORCHRUN = EXPORT + "torchrun --nproc_per_node=2" + DATA
LAUNCH = EXPORT + "python -m torch.distributed.launch --nproc_per_node=2" + DATA
PYTHON = EXPORT + "python" + DATA
MACHINE = (
    "torchrun --nnodes 2 --node_rank {} --master_addr 127.0.0.1 --master_port {} --nproc_per_node 1 train_pretrain.py"
    " --data_path=data/train_64/box/"
)
MPIRUN = "mpirun --allow-run-as-root --oversubscribe -n 2 python"

PROBE = """\
import json, os, sys
from pathlib import Path

names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES".split()
place = {name: os.environ.get(name) for name in names}
place["jobkit"] = any(name.partition(".")[0] == "jobkit" for name in sys.modules)
Path(sys.argv[1], place["RANK"]).write_text(json.dumps(place))
"""


pytestmark = pytest.mark.usefixtures("no_process_left")


def typed(folder: Path, line: str, **variables: str) -> subprocess.Popen[str]:
    """Type a line into a shell, in a folder; a terminal's Ctrl-C goes to its process group."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    for name in ("JOBKIT_RUNS", "IMAGENET_DIR"):
        environment.pop(name, None)
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", "-c", line], cwd=folder, env=environment, start_new_session=True, **pipe)


def ended(process: subprocess.Popen[str], *, well: bool = True) -> str:
    output, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode == 0) is well, output
    return output


def ctrl_c_at(step: int, process: subprocess.Popen[str], folder: Path, attempt: int = 1) -> str:
    Project(folder).only_run().wait_for_attempt(attempt).wait_for_step(step)
    os.killpg(process.pid, signal.SIGINT)
    return ended(process, well=False)


@pytest.fixture(scope="module")
def result_of_two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of the article's script on two machines that share a disk, which nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight")
    article.write(folder, "train_pretrain.py")
    port = free_port()
    machines = [typed(folder, MACHINE.format(node, port)) for node in range(2)]
    for machine in machines:
        ended(machine)
    return Project(folder).only_run().status.result


def test_a_script_needs_five_lines_and_one_for_a_plain_value() -> None:
    changes = [(old.strip("\n").split("\n"), new.strip("\n").split("\n")) for old, new in article.CHANGES.items()]
    assert sum(max(len(new) - len(old), 1) for old, new in changes) <= 5
    assert len(article.VALUES) == 1


def test_the_articles_commands_of_two_ranks_are_stopped_and_killed_and_go_on_exactly(
    tmp_path: Path, result_of_two: Any
) -> None:
    article.write(tmp_path)
    ctrl_c_at(4, typed(tmp_path, TORCHRUN, STEP_SECONDS="0.3"), tmp_path)
    launch = Project(tmp_path).only_run()
    process = typed(tmp_path, LAUNCH, STEP_SECONDS="0.3")
    launch.wait_for_attempt(2).wait_for_step((launch.ends[0].last_step or 0) + 2).kill_supervisor()
    ended(process, well=False)
    ended(typed(tmp_path, TORCHRUN))
    assert len(launch.causes) == 3 and launch.causes[-1] == "finished"
    assert launch.status.result == result_of_two


def test_the_articles_command_of_plain_python_goes_on_exactly(tmp_path: Path) -> None:
    for name in ("straight", "interrupted"):
        article.write(tmp_path / name)
    ended(typed(tmp_path / "straight", PYTHON))
    folder = tmp_path / "interrupted"
    first = typed(folder, PYTHON, STEP_SECONDS="0.3")
    Project(folder).only_run().wait_for_step(1)
    (folder / "hold").touch()
    assert "already" in ended(typed(folder, PYTHON), well=False)  # a second task, which takes itself for the only one
    (folder / "hold").unlink()
    ctrl_c_at(4, first, folder)
    ended(typed(folder, PYTHON))
    launch = Project(folder).only_run()
    assert launch.causes == ["stopped", "finished"]
    assert launch.status.result == Project(tmp_path / "straight").only_run().status.result


def test_two_machines_without_a_shared_disk_go_on_together_and_never_from_0(tmp_path: Path, result_of_two: Any) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        article.write(folder, "train_pretrain.py")

    def both(seconds: str = "0") -> list[subprocess.Popen[str]]:
        lines = enumerate([MACHINE.format(node, port) for port in [free_port()] for node in range(2)])
        return [
            typed(folders[node], line, CUDA_VISIBLE_DEVICES=f"{4 + node}", STEP_SECONDS=seconds) for node, line in lines
        ]

    machines = both("0.3")
    ctrl_c_at(4, machines[0], folders[0])  # on one machine
    ended(machines[1], well=False)
    launch = Project(folders[0]).only_run()
    (step,) = [path.name for path in launch.run.checkpoints.glob("step_*")]
    assert [path.name for path in folders[1].glob("runs/*/checkpoints/step_*")] == [step]

    runs, lost = folders[0] / "runs", folders[0] / "lost"
    runs.rename(lost)  # the machine of rank 0 has lost its disk
    outputs = [ended(machine, well=False) for machine in both()]
    assert all("no checkpoint is on all of them" in output for output in outputs), outputs
    assert not list(runs.glob("*/checkpoints/step_*"))
    shutil.rmtree(runs)
    lost.rename(runs)

    alone = "torchrun --standalone --nproc_per_node 1 train_pretrain.py --data_path=data/train_64/box/"
    begun = int(step.removeprefix("step_"))
    ctrl_c_at(2 * begun + 2, typed(folders[1], alone, STEP_SECONDS="0.3"), folders[1])
    assert Project(folders[1]).only_run().ends[0].first_step == begun

    outputs = [ended(machine) for machine in both()]
    assert f"goes on from step {begun}, the newest on all disks" in outputs[0]
    assert launch.status.result == result_of_two


def test_machines_with_other_values_are_refused(tmp_path: Path) -> None:
    article.write(tmp_path, "train_pretrain.py")
    port = free_port()
    machines = [typed(tmp_path, f"{MACHINE.format(node, port)} --lr {node + 1}") for node in range(2)]
    outputs = [ended(machine, well=False) for machine in machines]
    assert all("params.lr" in output for output in outputs), outputs
    assert not list(tmp_path.glob("runs/*-*"))


def test_a_command_has_the_same_variables_under_every_launcher(project: Project) -> None:
    project.write("probe.py", PROBE)
    places = {}
    for name, launcher in {
        "agent": "python -m jobkit submit probe.yaml --local resources.tasks_per_node=2",
        "launch": "python -m torch.distributed.launch --nproc_per_node=2 -m jobkit.worker probe.yaml",  # --local-rank
        "mpirun": f"{MPIRUN} -m jobkit.worker probe.yaml",
    }.items():
        project.write("probe.yaml", f"name: {name}\ncommand: [python, probe.py, '${{run_dir}}/outputs']\n")
        ended(typed(project.folder, launcher, CUDA_VISIBLE_DEVICES="4,5"))
        (folder,) = project.folder.glob(f"runs/{name}-*")
        assert project.launch(folder).status.state == "finished"
        places[name] = [json.loads((folder / "outputs" / str(rank)).read_text()) for rank in range(2)]
        for place in places[name]:
            assert int(place.pop("MASTER_PORT")) > 0 and place.pop("MASTER_ADDR") in ("127.0.0.1", "localhost")
    assert all(place == places["agent"] for place in places.values()), places
    assert [place["LOCAL_RANK"] for place in places["agent"]] == ["0", "1"]
    assert {place["CUDA_VISIBLE_DEVICES"] for place in places["agent"]} == {"4,5"}
    assert not any(place["jobkit"] for place in places["agent"])


def test_srun_gives_its_ranks_the_same_variables_and_refuses_tasks_that_know_no_place(
    slurm: Cluster, on_slurm: Callable[..., Project]
) -> None:
    project = on_slurm(slurm)
    project.write("probe.py", PROBE)
    project.write("probe.yaml", "name: probe\ncommand: [python, probe.py, '${run_dir}/outputs']\n")
    worker = f"{sys.executable} -m jobkit.worker probe.yaml"
    output = ended(typed(project.folder, f"srun -n 2 env -u SLURM_PROCID {worker}", **slurm.env), well=False)
    assert output.count("SLURM_STEP_NUM_TASKS=2") == 2, output
    assert not list(project.folder.glob("runs/*-*"))
    ended(typed(project.folder, f"srun -n 2 {worker}", **slurm.env))
    (folder,) = project.folder.glob("runs/*-*")
    places = [json.loads((folder / "outputs" / str(rank)).read_text()) for rank in range(2)]
    assert [place["RANK"] for place in places] == ["0", "1"]
    assert all(place["WORLD_SIZE"] == "2" and place["MASTER_ADDR"] for place in places)
    assert len({place["MASTER_PORT"] for place in places}) == 1
