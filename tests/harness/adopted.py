"""Scripts that have been brought under jobkit, run uninterrupted and interrupted, to compare what is left of them.

A script is text. It writes its weights itself, as `weights.pt` or into `out/`, and lets each sample or step take a
while where a file `slow` exists, so that an interruption finds it at work:

    LONGER = 'import os, time; time.sleep(0.05 if os.path.exists("slow") else 0)'

    whole = Adopted(tmp_path / "whole", SCRIPT)          # environment={"NAME": "value"} for the script
    whole.run(PYTHON)                                    # or torchrun(2); waits for exit code 0
    stopped = Adopted(tmp_path / "stopped", SCRIPT)
    stopped.interrupt(PYTHON, 5, INTERRUPT)              # at step 5 of this attempt; its exit code
    stopped.run(PYTHON)                                  # continues
    assert_equal(whole, stopped)                         # weights bit for bit, and each point of each curve once

What interrupts: INTERRUPT (Ctrl-C at a terminal: SIGINT for the whole group), KILL (SIGKILL for all processes at once),
KILL_RANK (SIGKILL for the rank with the highest number), or any callable that is given the Adopted.

Under `jobkit submit --local`, where jobkit itself starts the ranks again, `submitted(ranks, every)` is the launch, and
the same calls work; a killed rank is started again within it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_cluster import process_table
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util

from harness.project import describe, status, step, wait_for

Launch = list[str]
"""The words of a command, typed in the folder of the script, train.py."""

PYTHON: Launch = [sys.executable, "train.py"]

TIMING = ("runtime", "per_second", "_time", "perf/", "final/", "_hparams_")
"""Curves that differ from run to run."""


def torchrun(ranks: int) -> Launch:
    """So many ranks on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py"]


def submitted(ranks: int, every: int | str = 3) -> Launch:
    """The script as the `command:` of a YAML, with a checkpoint every so many steps."""
    return [
        *(sys.executable, "-m", "jobkit", "submit", "adopted.yaml", "--local"),
        *(f"resources.tasks_per_node={ranks}", f"checkpoint.every={every}"),
    ]


class Adopted:
    """A folder with the script, and the one run that it has there."""

    def __init__(self, folder: Path, script: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(script)
        (folder / "adopted.yaml").write_text(f"name: adopted\ncommand: [{sys.executable}, train.py]\n")
        none = {"JOBKIT_CONFIG": str(folder / "none.yaml"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.env = {**os.environ, **none, "PWD_OF_TEST": str(folder), **(environment or {})}
        self.env.pop("JOBKIT_RUNS", None)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        (config,) = self.folder.glob("runs/*/config.yaml")
        return config.parent

    @property
    def output(self) -> str:
        """What the script has printed, of all attempts."""
        return (self.folder / "output.txt").read_text()

    def start(self, launch: Launch) -> subprocess.Popen[str]:
        """Start an attempt, in a process group of its own as a shell does."""
        with (self.folder / "output.txt").open("a") as file:
            self.process = subprocess.Popen(
                launch, cwd=self.folder, env=self.env, text=True, stdout=file, stderr=file, start_new_session=True
            )
        return self.process

    def run(self, launch: Launch, expect: int = 0) -> None:
        """An attempt that nothing interrupts."""
        (self.folder / "slow").unlink(missing_ok=True)
        code = self.start(launch).wait(timeout=600)
        assert code == expect, f"{code}\n{self.output[-6000:]}"

    def interrupt(self, launch: Launch, after: int, action: Callable[[Adopted], None]) -> int:
        """An attempt that has something done to it once it has done `after` more steps; its exit code.

        Where jobkit starts the ranks again by itself, that is waited for.
        """
        (self.folder / "slow").touch()
        attempts = len(status(self.run_dir)["attempts"]) if list(self.folder.glob("runs/*/config.yaml")) else 0
        process = self.start(launch)

        def is_at_work() -> bool:
            assert process.poll() is None, self.output[-6000:]
            if not list(self.folder.glob("runs/*/config.yaml")):
                return False
            known = status(self.run_dir).get("attempts", [])
            return len(known) == attempts + 1 and step(self.run_dir) >= (known[-1]["first_step"] or 0) + after

        wait_for(f"{after} steps of an attempt", is_at_work, seconds=300)
        action(self)
        (self.folder / "slow").unlink()
        return process.wait(timeout=600)

    def points(self) -> dict[str, list[tuple[int, float]]]:
        """By curve, (step, value) in the order in which they stand in the event files; not those of durations."""
        found: dict[str, list[tuple[int, float]]] = {}
        for file in sorted(self.run_dir.glob("tensorboard/events.out.tfevents.*")):
            for event in EventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    if value.HasField("tensor") and not any(part in value.tag for part in TIMING):
                        number = tensor_util.make_ndarray(value.tensor)
                        if number.size == 1 and number.dtype.kind == "f":
                            found.setdefault(value.tag, []).append((event.step, float(number)))
        return found

    def weights(self) -> dict[str, bytes]:
        """The files with weights that the script has written, and those of final/."""
        files = [*self.folder.glob("weights*.pt"), *self.folder.glob("out/*.safetensors")]
        return {str(file.relative_to(self.folder)): file.read_bytes() for file in files} | {
            f"final/{file.name}": file.read_bytes() for file in self.run_dir.glob("final/*.safetensors")
        }

    def ranks(self) -> list[int]:
        """Ids of the processes of the script by their rank, as their environment has it."""
        found = {}
        for pid, process in process_table().items():
            variables = dict(line.partition("=")[::2] for line in process.environment())
            if variables.get("PWD_OF_TEST") != str(self.folder) or "RANK" not in variables:
                continue
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if any(word.endswith("train.py") for word in words[1:3]):  # torchrun's have -u before it
                    parent = process_table().get(process.parent)
                    if parent is None or parent.name != "pt_data_worker":
                        found.setdefault(int(variables["RANK"]), pid)
        return [found[rank] for rank in sorted(found)]


def INTERRUPT(adopted: Adopted) -> None:
    """Ctrl-C at a terminal."""
    assert adopted.process is not None
    os.killpg(adopted.process.pid, signal.SIGINT)


def KILL(adopted: Adopted) -> None:
    """All processes at once, as when a machine goes down."""
    assert adopted.process is not None
    os.killpg(adopted.process.pid, signal.SIGKILL)


def KILL_RANK(adopted: Adopted) -> None:
    """The last rank."""
    os.kill(adopted.ranks()[-1], signal.SIGKILL)


def assert_equal(whole: Adopted, interrupted: Adopted, *, curves: bool = True) -> None:
    """The same weights, and the same points once each."""
    assert list(whole.weights()) and list(whole.weights()) == list(interrupted.weights())
    different = [name for name, data in whole.weights().items() if interrupted.weights()[name] != data]
    assert different == [], f"{different}\n{describe(interrupted.run_dir)}"
    if curves:
        expected, found = whole.points(), interrupted.points()
        assert expected == found, _difference(expected, found)


def _difference(expected: Mapping[str, list[tuple[int, float]]], found: Mapping[str, list[tuple[int, float]]]) -> str:
    lines = []
    for tag in sorted({*expected, *found}):
        if expected.get(tag) != found.get(tag):
            lines.append(f"{tag}\n  uninterrupted: {expected.get(tag)}\n  interrupted:   {found.get(tag)}")
    return "\n".join(lines)
