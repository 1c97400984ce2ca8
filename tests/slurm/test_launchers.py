"""jobkit.init() under every launcher: one world, whoever started it, and one run, whoever began it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import submitit
from harness.project import TASK, describe, events, is_over, logged_steps, status, step, wait_for, weights
from slurm_cluster import Cluster

from jobkit.addresses import free_port
from jobkit.errors import DistributedError
from jobkit.worker.launcher import Topology, find_topology

# What a launcher says


def torchrun(rank: int, size: int, *, local: int, of: int, node: int = 0, nodes: int = 1) -> dict[str, str]:
    """The variables of torchrun."""
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(of),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
    }


def mpirun(rank: int, size: int, *, local: int, of: int) -> dict[str, str]:
    """The variables of Open MPI's mpirun."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(of),
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "1577713665",
    }


def srun(rank: int, size: int, *, local: int, node: int, per_node: str) -> dict[str, str]:
    """The variables of a Slurm step."""
    nodes = per_node.count(",") + 1 if "x" not in per_node else 2
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }


BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
INTERACTIVE = {**srun(0, 1, local=0, node=0, per_node="1"), "SLURM_NTASKS": "4"}
SUBMITIT = {
    "SUBMITIT_LOCAL_JOB_ID": "123",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_LOCALID": "1",
    "SUBMITIT_LOCAL_NODEID": "0",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}

TOLD: dict[str, tuple[Mapping[str, str], str, Topology, str]] = {
    "nothing": ({}, "python", Topology(), "alone"),
    "torchrun": (torchrun(3, 4, local=1, of=2, node=1, nodes=2), "torchrun", Topology(3, 4, 1, 2, 1, 2), "env"),
    "torchrun with one rank": (torchrun(0, 1, local=0, of=1), "torchrun", Topology(), "alone"),
    "mpirun on a node": (mpirun(3, 4, local=3, of=4), "mpirun", Topology(3, 4, 3, 4, 0, 1), "file"),
    "mpirun on two": (mpirun(3, 4, local=1, of=2), "mpirun", Topology(3, 4, 1, 2, 1, 2), "file"),
    "srun": (srun(2, 4, local=0, node=1, per_node="2(x2)"), "srun", Topology(2, 4, 0, 2, 1, 2), "file"),
    "srun, unevenly": (srun(3, 4, local=0, node=1, per_node="3,1"), "srun", Topology(3, 4, 0, 1, 1, 2), "file"),
    "a batch script without srun": (BATCH_SCRIPT, "python", Topology(), "alone"),
    "srun with an address": (
        {**srun(1, 2, local=1, node=0, per_node="2"), "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        *("srun", Topology(1, 2, 1, 2, 0, 1), "env"),
    ),
    "torchrun under srun": (
        {
            **srun(1, 2, local=0, node=1, per_node="1(x2)"),
            **torchrun(5, 8, local=1, of=4, node=1, nodes=2),
        },
        *("torchrun", Topology(5, 8, 1, 4, 1, 2), "env"),
    ),
    "the shell of an interactive step": (INTERACTIVE, "srun", Topology(), "alone"),
    "torchrun in that": (
        {**INTERACTIVE, **torchrun(1, 4, local=1, of=4)},
        *("torchrun", Topology(1, 4, 1, 4, 0, 1), "env"),
    ),
    "mpirun in a Slurm job": (
        {**mpirun(3, 4, local=1, of=2), **srun(0, 1, local=0, node=0, per_node="1")},
        *("mpirun", Topology(3, 4, 1, 2, 1, 2), "file"),
    ),
    "Submitit": (SUBMITIT, "Submitit's LocalExecutor", Topology(1, 2, 1, 2, 0, 1), "file"),
    "an MPI with PMI": (
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        *("an MPI with PMI", Topology(1, 2, 1, 2, 0, 1), "file"),
    ),
    "variables set by hand": (BY_HAND, "RANK and WORLD_SIZE", Topology(1, 2, 1, 2, 0, 1), "env"),
    "empty variables": ({"RANK": "", "WORLD_SIZE": "", "SLURM_STEP_ID": ""}, "python", Topology(), "alone"),
}


@pytest.mark.parametrize("case", TOLD)
def test_a_process_is_where_its_launcher_says(case: str) -> None:
    environ, launcher, topology, rendezvous = TOLD[case]
    found = find_topology(environ)
    assert (found.launcher, found.topology, found.rendezvous) == (launcher, topology, rendezvous)


def test_what_no_variable_tells_is_known_to_be_guessed() -> None:
    assert find_topology(torchrun(0, 2, local=0, of=2)).guessed == ()
    assert find_topology(mpirun(0, 4, local=0, of=2)).guessed == ("node", "nodes")
    assert find_topology(BY_HAND).guessed == ("local_rank", "local_world_size", "node", "nodes")


def test_a_process_group_that_exists_is_used() -> None:
    found = find_topology(torchrun(1, 2, local=1, of=2), group=(1, 2))
    assert (found.rendezvous, found.topology, found.guessed) == ("group", Topology(1, 2, 1, 2, 0, 1), ())
    other = find_topology({}, group=(2, 3))
    assert (other.rendezvous, other.topology.rank, other.topology.world_size) == ("group", 2, 3)


def test_two_launches_do_not_share_a_file() -> None:
    first = srun(0, 2, local=0, node=0, per_node="2")
    changes = [{"SLURM_JOB_ID": "8"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}]
    keys = {find_topology(first | change).key for change in [{}, *changes]}
    assert len(keys) == 4
    assert all(key.replace("-", "").replace(".", "").isalnum() for key in keys)
    assert find_topology(first).key == find_topology(first | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}).key


APART: dict[str, tuple[Mapping[str, str], str]] = {
    "a step whose tasks are told to be alone": (
        {**srun(1, 4, local=1, node=0, per_node="4"), "RANK": "0", "WORLD_SIZE": "1"},
        "SLURM_STEP_NUM_TASKS=4",
    ),
    "one torchrun for each task of a step": (
        {**srun(1, 2, local=0, node=1, per_node="1(x2)"), **torchrun(0, 4, local=0, of=4)},
        "SLURM_STEP_NUM_TASKS=2",
    ),
    "mpirun of python under a wrapper that sets RANK": (
        {**mpirun(1, 4, local=1, of=4), "RANK": "0", "WORLD_SIZE": "1"},
        "OMPI_COMM_WORLD_SIZE=4",
    ),
    "mpirun's size alone": ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
    "mpirun's variables hidden": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, "PMIX_RANK=1"),
    "a size without a rank": ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
    "a group of one in a step of two": (srun(1, 2, local=1, node=0, per_node="2"), "SLURM_STEP_NUM_TASKS=2"),
    "a rank beyond the world": ({"RANK": "4", "WORLD_SIZE": "4"}, "no such rank"),
    "a rank that is no number": ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK='one'"),
}


@pytest.mark.parametrize("case", APART)
def test_tasks_that_would_train_apart_are_an_error(case: str) -> None:
    environ, said = APART[case]
    with pytest.raises(DistributedError, match=said):
        find_topology(environ, group=(0, 1) if case.startswith("a group") else None)


# Real launchers

STEPS = 120
FAMILY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
SCRIPT = f"""\
import json, os
import torch
import torch.distributed as dist
import jobkit
import mytask

if os.environ.get("GROUP_OF_ITS_OWN"):
    dist.init_process_group("gloo")
ctx = jobkit.init(name="chain", params={{"steps": {STEPS}}})
total = torch.tensor([ctx.rank + 1.0])
dist.all_reduce(total)
seen = {{name: os.environ[name] for name in {FAMILY}}}
seen |= {{"place": [ctx.rank, ctx.world_size, ctx.local_rank], "total": total.item(), "pid": os.getpid()}}
(ctx.run_dir / f"seen_{{ctx.attempt}}_{{ctx.rank}}.json").write_text(json.dumps(seen))
ctx.finish(mytask.train(ctx))
if os.environ.get("GROUP_OF_ITS_OWN"):
    dist.all_reduce(total)  # the group is still there
    dist.destroy_process_group()
"""
ORDERS = """\
import os, time


def at_step(ctx, step):
    time.sleep(float(os.environ.get("SLEEP", "0")))
"""
PLACE = """\
import json, os
from dataclasses import asdict
from pathlib import Path
from jobkit.worker.launcher import find_topology

found = find_topology(os.environ)
text = json.dumps({"launcher": found.launcher} | asdict(found.topology))
Path(os.environ["PLACES"], f"{found.topology.rank}.json").write_text(text)
"""

PYTHON = sys.executable
RANKS = 2
"""Of each launcher where the ranks train: each of them imports torch."""


def launch(launcher: str, ranks: int = RANKS) -> list[str]:
    """The words before the name of a script. srun takes two nodes."""
    port = f"--master-port={free_port()}"  # free now: it may be another test's in a minute
    return {
        "torchrun": [PYTHON, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"],
        "launch": [PYTHON, "-m", "torch.distributed.launch", f"--nproc-per-node={ranks}", port],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), PYTHON],
        "srun": ["srun", "--nodes=2", f"--ntasks-per-node={ranks // 2}", "--cpus-per-task=1", PYTHON],
    }[launcher]


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """`process`, which a test that fails does not leave behind."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


class Chain:
    """One script and one run of it, which different launchers start one after the other."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir()
        for name, text in {"train.py": SCRIPT, "mytask.py": TASK, "orders.py": ORDERS}.items():
            (folder / name).write_text(text)
        self.folder = folder
        # Submitit's jobs run train.py by its path, which puts nothing on Python's.
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.env = {**os.environ, **environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.env["JOBKIT_RUNS"] = str(folder / "runs")

    @property
    def run(self) -> Path:
        (run,) = self.folder.glob("runs/chain-*")
        return run

    def start(self, command: list[str], **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, "train.py"],
            cwd=self.folder,
            env=self.env | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def train_for_a_while(self, command: list[str], stop: Callable[[subprocess.Popen[str]], None]) -> None:
        """Under a launcher until some steps are done and `stop` has ended them."""
        before = status(self.run)["step"] if list(self.folder.glob("runs/chain-*")) else 0
        with ended(self.start(command, SLEEP="0.05")) as process:
            wait_for("a run", lambda: process.poll() is not None or list(self.folder.glob("runs/chain-*")))
            wait_for("some steps", lambda: process.poll() is not None or step(self.run) > before + 3, self.run)
            if trains := process.poll() is None:
                stop(process)
            output, _ = process.communicate(timeout=600)
        assert trains and process.returncode != 0, output

    def train_to_the_end(self, command: list[str], **environment: str) -> str:
        """What was printed."""
        with ended(self.start(command, **environment)) as process:
            output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert status(self.run)["state"] == "finished", describe(self.run)
        return output

    def assert_placed(self, launcher: str, nodes: int = 1, ranks: int = RANKS) -> None:
        """The newest attempt: where each rank was, and that they were together."""
        attempt = status(self.run)["attempts"][-1]
        seen = [json.loads((self.run / f"seen_{attempt['id']}_{rank}.json").read_text()) for rank in range(ranks)]
        per_node = ranks // nodes
        for rank, one in enumerate(seen):
            assert one["place"] == [rank, ranks, rank % per_node]
            assert one["total"] == sum(range(ranks + 1))
            found = [int(one[name]) for name in FAMILY[:5]]
            assert found == [rank, ranks, rank % per_node, per_node, rank // per_node]
        assert len({one["MASTER_PORT"] for one in seen}) == 1
        started = [event for event in events(self.run) if event["event"] == "started"]
        assert [event["attempt"] for event in started] == list(range(1, attempt["id"] + 1))
        assert started[-1]["launcher"] == launcher

    def pids(self) -> list[int]:
        """The newest attempt's ranks."""
        attempt = status(self.run)["attempts"][-1]["id"]
        return [json.loads(file.read_text())["pid"] for file in self.run.glob(f"seen_{attempt}_*.json")]


def assert_interrupted(run: Path) -> None:
    """The newest attempt stopped with a checkpoint of its last step, and went on from that of the one before."""
    *before, last = status(run)["attempts"]
    assert (status(run)["state"], last["cause"]) == ("interrupted", "user"), describe(run)
    assert last["first_step"] == (before[-1]["last_step"] if before else 0)
    assert status(run)["checkpoint"] == last["last_step"] > last["first_step"]


def need_mpirun() -> None:
    if shutil.which("mpirun") is None:
        if os.environ.get("JOBKIT_REQUIRE_SLURM") == "1":
            pytest.fail("mpirun is not installed; apt install openmpi-bin")
        pytest.skip("no mpirun on this machine")


def executor(kind: type[Any], folder: Path, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of Submitit's, whose jobs get `environment`."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return kind(folder=folder / "submitit")


@pytest.mark.parametrize("launcher", ["torchrun", "launch", "mpirun", "srun", "LocalExecutor", "SlurmExecutor"])
def test_four_processes_of_a_launcher_know_their_places(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    need_mpirun()
    (tmp_path / "place.py").write_text(PLACE)
    environment = {**os.environ, **slurm.env, "PLACES": str(tmp_path)}
    script = functools.partial(runpy.run_path, str(tmp_path / "place.py"), run_name="__main__")
    if launcher == "LocalExecutor":
        local = executor(submitit.LocalExecutor, tmp_path, environment, monkeypatch)
        local.update_parameters(tasks_per_node=4, timeout_min=30)
        local.submit(script).results()
    elif launcher == "SlurmExecutor":
        on_slurm = executor(submitit.SlurmExecutor, tmp_path, environment, monkeypatch)
        on_slurm.update_parameters(partition="low", nodes=2, ntasks_per_node=2, time=30)
        on_slurm.submit(script)
    else:
        subprocess.run([*launch(launcher, 4), "place.py"], cwd=tmp_path, env=environment, check=True)
    wait_for("all of them", lambda: len(list(tmp_path.glob("[0-3].json"))) == 4)
    nodes = 2 if launcher in ("srun", "SlurmExecutor") else 1
    names = {"launch": "torchrun", "LocalExecutor": "Submitit's LocalExecutor", "SlurmExecutor": "srun"}
    for rank in range(4):
        local_rank, node = rank % (4 // nodes), rank // (4 // nodes)
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "launcher": names.get(launcher, launcher),
            **asdict(Topology(rank, 4, local_rank, 4 // nodes, node, nodes)),
        }


def test_a_run_goes_on_under_any_launcher_and_ends_with_the_uninterrupted_weights(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_mpirun()
    chain = Chain(tmp_path / "chain", slurm.env)

    chain.train_for_a_while(launch("torchrun"), lambda process: process.send_signal(signal.SIGTERM))
    chain.assert_placed("torchrun")
    assert_interrupted(chain.run)

    # It adds --local-rank=N to the script's arguments. A signal to one rank stops all of them.
    chain.train_for_a_while(launch("launch"), lambda process: os.kill(chain.pids()[-1], signal.SIGTERM))
    chain.assert_placed("torchrun")
    assert_interrupted(chain.run)
    alone = Chain(tmp_path / "alone", slurm.env)
    shutil.copytree(chain.run, alone.folder / "runs" / chain.run.name, symlinks=True)

    chain.train_for_a_while(launch("mpirun"), lambda process: process.send_signal(signal.SIGUSR2))
    chain.assert_placed("mpirun")
    assert_interrupted(chain.run)

    chain.train_for_a_while(launch("srun"), lambda process: process.send_signal(signal.SIGUSR2))
    chain.assert_placed("srun", nodes=2)
    assert_interrupted(chain.run)

    script = functools.partial(runpy.run_path, str(chain.folder / "train.py"), run_name="__main__")
    local = executor(submitit.LocalExecutor, tmp_path, {**chain.env, "SLEEP": "0.05"}, monkeypatch)
    local.update_parameters(tasks_per_node=RANKS, timeout_min=30)
    before = status(chain.run)["step"]
    job = local.submit(script)
    wait_for("some steps", lambda: job.done() or step(chain.run) > before + 3, chain.run)
    for pid in chain.pids():
        with contextlib.suppress(ProcessLookupError):  # the signal to one has ended all
            os.kill(pid, signal.SIGTERM)
    wait_for("the end", lambda: status(chain.run)["state"] != "running", chain.run)
    chain.assert_placed("Submitit's LocalExecutor")
    assert_interrupted(chain.run)

    on_slurm = executor(submitit.SlurmExecutor, tmp_path, {**chain.env, "SLEEP": "0"}, monkeypatch)
    on_slurm.update_parameters(partition="low", nodes=2, ntasks_per_node=RANKS // 2, time=30)
    on_slurm.submit(script)
    wait_for("the end", lambda: is_over(chain.run), chain.run)  # not what it is between two attempts: queued
    chain.assert_placed("srun", nodes=2)
    assert status(chain.run)["state"] == "finished", describe(chain.run)
    assert logged_steps(chain.run) == list(range(STEPS))

    whole = Chain(tmp_path / "whole", slurm.env)
    whole.train_to_the_end(launch("torchrun"), GROUP_OF_ITS_OWN="1")
    whole.assert_placed("torchrun")
    assert weights(chain.run) == weights(whole.run)
    assert whole.train_to_the_end(launch("mpirun")).count("already finished") == 1

    alone.train_to_the_end([PYTHON])
    alone.assert_placed("python", ranks=1)
    assert logged_steps(alone.run) == list(range(STEPS))
