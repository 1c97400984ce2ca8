"""What one attempt has compiled the next one does not compile again, on a node that has none of it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from harness.processes import processes_of
from harness.project import Project, causes, describe, status, step, wait_for

from jobkit.run import archive
from jobkit.supervisor.fork_client import WARM_SERVER

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
        del self.env[WARM_SERVER]  # it has read which compiler there is
        compiler.write_text(COMPILER.format(calls=self.calls))
        compiler.chmod(0o755)
        (path / "mytask.py").write_text(task)

    def compiled(self) -> int:
        """How many files have been compiled since the last time."""
        count = len(self.calls.read_text().splitlines()) if self.calls.exists() else 0
        self.calls.unlink(missing_ok=True)
        return count

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
    wait_for("a checkpoint and an archive", lambda: step(run) == 3 and list(run.glob("cache/*.tar")), run)
    for process in processes_of(run):
        process.send(signal.SIGKILL)
    first.communicate(timeout=600)
    assert project.compiled() > 0
    assert list(project.node.glob("jobkit-*/*/inductor/fxgraph"))

    project.replace_node()
    project.submit(*ALONE)
    assert causes(run)[-1] == "finished", describe(run)
    counts = status(run)["result"]
    assert (counts.get("fxgraph_cache_miss", 0), counts.get("autograd_cache_miss", 0)) == (0, 0), counts
    assert counts["fxgraph_cache_hit"] > 0, counts
    assert project.compiled() == 0

    (saved,) = run.glob("cache/*.tar")
    assert all(not name.startswith(("/", "..")) for name in archive.contents(saved))
