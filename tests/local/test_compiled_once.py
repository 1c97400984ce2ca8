"""What one attempt has compiled the next one does not compile again, on a node that has none of it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from harness.processes import processes_of
from harness.project import Project, causes, describe, status, step, wait_for

from jobkit.run import archive
from jobkit.run.compiler_cache import files_in
from jobkit.supervisor.parents import WARM_PARENT

TASK = """
import time
import torch
from torch import nn
from torch._dynamo.utils import counters


def train(ctx):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    ctx.track(model=model)
    compiled = torch.compile(model)
    for step in ctx.steps(6):
        compiled(torch.ones(4, 8)).square().mean().backward()
        while ctx.attempt == 1 and step == 3:
            time.sleep(0.1)
    return {**counters["inductor"], **counters["aot_autograd"]}
"""

COMPILER = """#!/bin/sh
for word in "$@"; do
    case $word in --version | -v | -E) exec g++ "$@" ;; esac
done
echo compiled >> {calls}
exec g++ "$@"
"""

ALONE = ("--local", "resources.nodes=1", "resources.tasks_per_node=1", "watchdog=off", "checkpoint.every=2")


class NodeOfItsOwn(Project):
    """A project whose runs have a temporary folder of their own, as a node has, and a compiler that counts."""

    def __init__(self, path: Path, task: str = TASK) -> None:
        self.node, self.calls, compiler = path / "node", path / "calls", path / "compiler"
        super().__init__(path, {"TMPDIR": str(self.node), "CXX": str(compiler)})
        self.node.mkdir()
        del self.env[WARM_PARENT]  # it has read which compiler there is
        compiler.write_text(COMPILER.format(calls=self.calls))
        compiler.chmod(0o755)
        (path / "mytask.py").write_text(task)

    def compiled(self) -> int:
        """How many files have been compiled since the last time."""
        count = len(self.calls.read_text().splitlines()) if self.calls.exists() else 0
        self.calls.unlink(missing_ok=True)
        return count

    def on_node(self) -> dict[str, int]:
        """What the compilers have left there, with sizes in bytes."""
        return {name: size for one in self.node.glob("jobkit-*/*@*") for name, size in files_in(one).items()}

    def in_run_directory(self, run: Path) -> dict[str, int]:
        """The same of what is saved."""
        return {name: size for one in run.glob("cache/*.tar") for name, size in archive.contents(one).items()}

    def replace_node(self) -> None:
        """What an attempt finds on a node on which the run has never been."""
        shutil.rmtree(self.node)
        self.node.mkdir()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_an_attempt_on_a_new_node_compiles_nothing_again(tmp_path: Path) -> None:
    project = NodeOfItsOwn(tmp_path)
    first = project.start("submit", "toy.yaml", *ALONE)
    wait_for("a run directory", lambda: project.runs)
    (run,) = project.runs
    wait_for("all compiled", lambda: step(run) == 3, run)
    wait_for("all of it saved", lambda: project.on_node() == project.in_run_directory(run) != {}, run)
    for process in processes_of(run):
        process.send(signal.SIGKILL)
    first.communicate(timeout=600)
    assert project.compiled() > 0

    project.replace_node()
    project.submit(*ALONE)
    assert causes(run)[-1] == "finished", describe(run)
    counts = status(run)["result"]
    assert (counts.get("fxgraph_cache_miss", 0), counts.get("autograd_cache_miss", 0)) == (0, 0), counts
    assert counts["fxgraph_cache_hit"] > 0, counts
    assert project.compiled() == 0
    assert project.on_node() == {}, "the run is over"


def test_a_command_is_told_where_the_folder_is_and_the_users_own_stays(tmp_path: Path) -> None:
    project = NodeOfItsOwn(tmp_path)
    project.env["CUDA_CACHE_PATH"] = "/of/the/user"
    (project.path / "show.sh").write_text("ls -d $JOBKIT_CACHE/.used; env | grep -E '^(TRITON|CUDA)_CACHE'\n")
    (project.path / "toy.yaml").write_text("name: toy\ncommand: [sh, show.sh]\n")
    project.submit("--local")
    (run,) = project.runs
    used, *told = (run / "logs/1/rank_0.out").read_text().splitlines()
    folder = Path(used).parent
    assert folder.parent.parent == project.node
    assert sorted(told) == ["CUDA_CACHE_PATH=/of/the/user", f"TRITON_CACHE_DIR={folder}/triton"]
    assert not folder.exists(), "nothing was compiled, and the run is over"
