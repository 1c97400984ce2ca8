"""The word of NVIDIA's driver about devices. No device is here: a stand-in answers in the driver's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from harness.nvml import Nvml, answers, gpu
from harness.runs import PATIENCE

from jobkit.agent import devices, gpus
from jobkit.agent.devices import HealthWatch, Word, watched
from jobkit.cli import doctor
from jobkit.cli.main import main
from jobkit.config.schema import Config, Resources

Ask = Callable[..., Word | None]
WELL = gpu()


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml(tmp_path, WELL, WELL)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def ask(nvml: Nvml, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Look at device 1, and again when the driver's facts are others."""
    for name, answer in answers(vars(pynvml), str(nvml.state)).items():
        monkeypatch.setattr(pynvml, name, answer)

    def word(before: dict[str, Any], now: dict[str, Any], *names: str, init: str | None = None) -> Word | None:
        def question() -> str:
            nvml.write(WELL, now)
            return "\n"

        nvml.write(WELL, before, init=init)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=question))
        assert gpus.main(list(names or ("0", "1"))) == 0
        return Word(**json.loads(capsys.readouterr().out))

    return word


OLD = gpu(ecc=1, rows=[0, 1, 1, 0])
CONSUMER = gpu(ecc="NOT_SUPPORTED", rows="NOT_SUPPORTED")
GONE = gpu(found="GPU_IS_LOST")


@pytest.mark.parametrize(
    ("before", "now", "words", "is_sick"),
    [
        pytest.param(WELL, WELL, "", False, id="well"),
        pytest.param(WELL, gpu(ecc=1), "1 uncorrected ECC error", True, id="error"),
        pytest.param(
            WELL, gpu(ecc=2, rows=[0, 1, 1, 0]), "2 uncorrected ECC errors, row remap pending", True, id="row"
        ),
        pytest.param(WELL, gpu(rows=[0, 1, 0, 1]), "row remap failed", True, id="failed"),
        pytest.param(WELL, gpu(rows=[5, 1, 0, 0]), "", False, id="remapped"),
        pytest.param(WELL, gpu(ecc="GPU_IS_LOST"), "lost from the bus", True, id="lost"),
        pytest.param(WELL, gpu(ecc="NOT_SUPPORTED", rows="GPU_IS_LOST"), "lost from the bus", True, id="lost-late"),
        pytest.param(WELL, gpu(ecc="RESET_REQUIRED"), "needs a reset", True, id="reset"),
        pytest.param(GONE, GONE, "not seen by the driver", True, id="lost-before"),
        pytest.param(OLD, OLD, "1 uncorrected ECC error, row remap pending", False, id="weeks-ago"),
        pytest.param(OLD, gpu(ecc=2), "2 uncorrected ECC errors", True, id="one-more"),
        pytest.param(OLD, WELL, "", False, id="reset-meanwhile"),
        pytest.param(CONSUMER, CONSUMER, "", False, id="consumer"),
        pytest.param(WELL, gpu(rows="FUNCTION_NOT_FOUND", ecc="NO_PERMISSION"), "", False, id="old-driver"),
    ],
)
def test_the_word_about_a_device(
    ask: Ask, before: dict[str, Any], now: dict[str, Any], words: str, is_sick: bool
) -> None:
    assert ask(before, now) == Word(health=words and f"cuda:1 on node7: {words}", is_sick=is_sick)


def test_a_number_that_the_driver_does_not_have(ask: Ask) -> None:
    assert ask(WELL, WELL, "1", "2") == Word(health="cuda:2 on node7: not seen by the driver", is_sick=True)
    assert ask(WELL, gpu(ecc=1), "GPU-1") == Word(health="cuda:GPU-1 on node7: 1 uncorrected ECC error", is_sick=True)
    assert ask(WELL, WELL, "MIG-1") == Word()
    assert ask(gpu(model="A100"), gpu(ecc=1, model="A100")) == Word(), "CUDA may number two models in another order"


@pytest.mark.parametrize(
    ("error", "words", "is_sick"),
    [("DRIVER_NOT_LOADED", "cuda:1 on node7: not seen by the driver", True), ("LIBRARY_NOT_FOUND", "", False)],
)
def test_a_driver_that_does_not_start(ask: Ask, error: str, words: str, is_sick: bool) -> None:
    assert ask(WELL, WELL, "1", init=error) == Word(health=words, is_sick=is_sick)


def test_own_processes_do_not_make_a_device_busy(ask: Ask, nvml: Nvml) -> None:
    nvml.write(gpu(processes=[[os.getpid(), 1]]), gpu(processes=[[2**22 + 1, 1]]))
    with gpus.opened(["0", "1"]) as found:
        assert [item.users for item in found.values()] == [[], [f"process {2**22 + 1} of another container"]]


def test_whose_memory_it_is(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOBKIT_JOB_ID", "12")
    others = {"text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen(["cat"], env={"JOBKIT_JOB_ID": "12"}, **others) as rank,
        subprocess.Popen(["cat"], env={"JOBKIT_JOB_ID": "13"}, **others) as other,
    ):
        for process in (rank, other):  # one that has not called exec yet has the environment of this test
            process.stdin.write("a\n")
            process.stdin.flush()
            assert process.stdout.readline() == "a\n"
        said = ask(WELL, gpu(processes=[[rank.pid, 60 * 2**30], [other.pid, 12 * 2**30 + 2**28], [2**22 + 1, None]]))
        words = f"process {other.pid} of yours has 12.2 GiB, process {2**22 + 1} of another container has 0.0 GiB"
        assert said == Word(memory=f"cuda:1 on node7: {words}")
        for process in (rank, other):
            process.stdin.close()


def test_a_process_of_its_own_asks(nvml: Nvml) -> None:
    watch = HealthWatch(["0", "1"])
    nvml.wait_for_look(1)
    nvml.write(WELL, gpu(ecc=3))
    assert watch.ask(PATIENCE) == Word(health="cuda:1 on node7: 3 uncorrected ECC errors", is_sick=True)
    assert watch.close()


def test_a_driver_that_hangs_is_given_up(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "KILL_SECONDS", PATIENCE)  # to end takes longer on a busy machine
    watch = HealthWatch(["0", "1"])
    nvml.wait_for_look(1)
    nvml.write(gpu(hangs=8), WELL)
    assert watch.ask() is None
    assert watch.close()
    assert not Path(f"/proc/{watch.pid}").exists()


def test_a_watch_ends_with_its_agent(nvml: Nvml) -> None:
    program = (
        "import os; from jobkit.agent.devices import HealthWatch; "
        "print(HealthWatch(['0']).pid, flush=True); os._exit(0)"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ, timeout=PATIENCE)
    assert done.stderr == "", "run() returns when its pipes are closed: also by the process that is left behind"


@pytest.mark.parametrize(
    ("device", "each", "names"), [("cuda", 1, ["0", "1"]), ("auto", 1, ["0", "1"]), ("cuda", 0, []), ("cpu", 1, [])]
)
def test_an_agent_on_slurm_watches_the_devices_of_its_step(
    nvml: Nvml, device: str, each: int, names: list[str]
) -> None:
    config = Config(name="a", device=device, resources=Resources(tasks_per_node=2, gpus_per_task=each))
    assert watched(config, None) == names


@pytest.mark.parametrize(
    ("now", "code", "state"),
    [
        pytest.param(WELL, 0, "", id="well"),
        pytest.param(OLD, 0, "warning cuda:1 on node7: 1 uncorrected ECC error, row remap pending", id="warning"),
        pytest.param(GONE, 1, "problem cuda:1 on node7: not seen by the driver", id="problem"),
    ],
)
def test_doctor_says_it(
    nvml: Nvml,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    now: dict[str, Any],
    code: int,
    state: str,
) -> None:
    monkeypatch.setattr(doctor, "DRIVER_SECONDS", PATIENCE)  # the driver's process has to start, too
    nvml.write(WELL, now)
    assert main(["doctor", "--local"]) == code
    lines = [line for line in capsys.readouterr().out.splitlines() if "on node7" in line]
    assert [line.startswith(state) for line in lines] == [True] * bool(state)
