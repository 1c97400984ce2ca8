"""The scripts in examples/, run with two ranks each as `command:`, and held where something is to interrupt them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.project import Project, describe, is_over, logged_steps, status, wait_for
from harness.reference import made_once
from jobkit.addresses import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"

RANKS = 2

YAML = """\
name: NAME
command: [python, train.py]
resources: {nodes: 1, tasks_per_node: 2, time: "0:10:00"}
checkpoint: {every: 3}
clusters: {slurm: {partition: low}}
"""

GATE = """\
# Holds this rank after so many steps of an attempt, until it is told to stop or killed.
import os
import time
from pathlib import Path

from jobkit.worker.stop import STOP_SIGNALS
from torch.optim.optimizer import register_optimizer_step_post_hook

attempt, done = int(os.environ["JOBKIT_ATTEMPT"]), 0
held = Path(os.environ["JOBKIT_RUN"], f"held_{attempt}_{os.environ['RANK']}")


def hold(*_):
    global done
    done += 1
    if done <= HOLDS.get(attempt, 0):
        time.sleep(0.3)  # of steps so long the ranks agree on a stop after each
    if done == HOLDS.get(attempt):
        held.with_suffix(".new").write_text(str(os.getpid()))
        held.with_suffix(".new").rename(held)
        while not STOP_SIGNALS.pending:
            time.sleep(0.02)


register_optimizer_step_post_hook(hold)
"""


@dataclass(frozen=True)
class Example:
    """One folder of examples/."""

    name: str
    steps: range
    """Those at which its curve has points."""
    needs: tuple[str, ...] = ()
    """Packages."""
    line: tuple[str, str] = ("", "")
    """A line of after.py, and what a test adds before it: the curve of a script that draws none."""

    kept: int = 9
    """The checkpoint that is left where a rank is killed in the fifth step after the fifth."""

    @property
    def is_installed(self) -> bool:
        return all(find_spec(package) is not None for package in self.needs)

    def skip_without_packages(self) -> None:
        if not self.is_installed:
            pytest.skip(f"needs {', '.join(self.needs)}")


LOG = '            ctx.log({"train/loss": loss})\n'

USUAL = [
    Example("plain", range(24), line=("            optimizer.zero_grad()\n", LOG)),
    Example("huggingface", range(1, 25), needs=("transformers", "accelerate")),
    Example("lightning", range(24), needs=("lightning",)),
]
ACCELERATE = Example("accelerate", range(24), needs=("accelerate",))
BY_BOUNDARY = [
    Example("framework", range(30)),
    Example("torchtitan", range(30), kept=6),  # torch steps the optimizer to load it: the gate is earlier
    Example("fabric", range(30), needs=("lightning",)),
    Example("deepspeed", range(30), needs=("deepspeed",)),
]

BEFORE = """
import runpy
from jobkit.worker.startup import jobkit_torch_threads
jobkit_torch_threads.wait_at_exit()
runpy.run_path("before.py", run_name="__main__")
"""
"""Runs the script, and ends as every program under jobkit does: PyTorch aborts one run in four that leaves its process
group open."""


class Adopted(Project):
    """An example as a project of a user's, whose ranks are held in attempts after so many of their steps."""

    def __init__(
        self, path: Path, example: Example, holds: dict[int, int], environment: dict[str, str] | None = None
    ) -> None:
        super().__init__(path, {"DS_ACCELERATOR": "cpu", **(environment or {})})
        self.example = example
        shutil.copytree(EXAMPLES / example.name, path, dirs_exist_ok=True)
        line, added = example.line
        script = (path / "after.py").read_text()
        assert line in script
        (path / "train.py").write_text("import gate\n" + script.replace(line, added + line))
        (path / "gate.py").write_text(f"HOLDS = {holds}\n" + GATE)
        (path / "toy.yaml").write_text(YAML.replace("NAME", example.name))

    @property
    def run(self) -> Path:
        """Its one run directory."""
        (run,) = self.runs
        return run

    def wait_until_held(self, attempt: int, process: subprocess.Popen[str] | None = None) -> list[int]:
        """The process ids of the ranks, by rank."""

        def files() -> list[Path]:
            return sorted(self.run.glob(f"held_{attempt}_[0-9]"))

        def reached() -> bool:
            assert process is None or process.poll() is None, process.communicate()
            assert not self.runs or not is_over(self.run), describe(self.run)
            return bool(self.runs) and len(files()) == RANKS

        wait_for(f"{self.example.name}: attempt {attempt} at its gate", reached, *self.runs)
        return [int(file.read_text()) for file in files()]

    def interrupt(self, expect: int = 75) -> None:
        """Submit it here, and type Ctrl-C when its ranks are held."""
        with self.start("submit", "toy.yaml", "--local") as process:
            self.wait_until_held(1, process)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=300)
        assert process.returncode == expect, f"{output}\n{errors}\n{describe(self.run)}"

    def kill_rank(self, attempt: int, process: subprocess.Popen[str] | None = None) -> None:
        """Kill rank 1 when the ranks are held and their checkpoint is on the disk."""
        ranks, after = self.wait_until_held(attempt, process), self.example.kept
        wait_for(f"the checkpoint of step {after}", lambda: status(self.run)["checkpoint"] == after, self.run)
        os.kill(ranks[1], signal.SIGKILL)

    def train_before(self) -> None:
        """The script as it was before: its ranks as a launcher starts them."""
        place = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": str(free_port()), "GROUP_RANK": "0"}
        environments = [self.env | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
        with (self.path / "before.log").open("w") as log:
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-c", BEFORE], cwd=self.path, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
                for environment in environments
            ]
            codes = [rank.wait(300) for rank in ranks]
        assert codes == [0] * RANKS, (self.path / "before.log").read_text()

    def weights(self) -> bytes:
        """What the script has saved."""
        return weights_in(self.path)

    def causes(self) -> list[str]:
        return [attempt["cause"] for attempt in status(self.run)["attempts"]]


def assert_as_before(adopted: Adopted, before: bytes, causes: list[str]) -> None:
    """Its attempts ended so; the weights are those of before.py, and each step is in the curve once."""
    assert adopted.causes() == causes, describe(adopted.run)
    assert adopted.weights() == before, adopted.example.name
    assert logged_steps(adopted.run) == list(adopted.example.steps), describe(adopted.run)


def weights_in(folder: Path) -> bytes:
    """What an example has saved in its folder."""
    saved = folder / "weights.pt"
    return (saved if saved.exists() else folder / "model/model.safetensors").read_bytes()


def weights_before(factory: pytest.TempPathFactory, example: Example) -> bytes:
    """Those of before.py, which has never heard of jobkit."""
    make = lambda folder: Adopted(folder, example, {}).train_before()  # noqa: E731
    return weights_in(made_once(factory, f"before-{example.name}", make))
