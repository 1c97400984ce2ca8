"""A stand-in for NVIDIA's driver, which answers from a JSON file, so that a test can break a device at any moment.

nvml = Nvml(folder, gpu(), gpu(ecc=2))
subprocess.run(..., env={**os.environ, **nvml.environment})     # a process that finds it as `pynvml`
nvml.wait_for_look(1)
nvml.write(gpu(), gpu(ecc="GPU_IS_LOST"))

Errors, constants and the names of functions are those of the real pynvml, which needs no driver for that.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.runs import PATIENCE, begin_with, wait_until

MODULE = """\
import importlib.util, sys
sys.path.insert(0, {tests!r})
from harness.nvml import answers
with open({real!r}) as file:
    exec(compile(file.read(), {real!r}, "exec"), globals())
globals().update(answers(globals(), {state!r}))
"""


def gpu(**facts: Any) -> dict[str, Any]:
    """A device that is well. A fact may be an error, as NOT_SUPPORTED; `hangs` is the seconds that a question takes."""
    return {"ecc": 0, "rows": [0, 0, 0, 0], "processes": [], "found": None, "hangs": 0, "model": "H100", **facts}


class Nvml:
    """A driver, and the environment in which a process finds it."""

    def __init__(self, folder: Path, *gpus: dict[str, Any]) -> None:
        import pynvml

        self.state = folder / "driver.json"
        self.write(*gpus)
        module = folder / "driver" / "pynvml.py"
        module.parent.mkdir()
        words = {"tests": str(Path(__file__).parents[1]), "real": pynvml.__file__, "state": str(self.state)}
        module.write_text(MODULE.format(**words))
        path = os.pathsep.join(filter(None, (str(module.parent), os.environ.get("PYTHONPATH"))))
        names = ",".join(map(str, range(len(gpus))))
        self.environment = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": names, "SLURMD_NODENAME": "node7"}

    def wait_for_words(self) -> None:
        """Let agents wait for the driver's word as long as a test waits: on a busy machine 2 s may be too few."""
        lines = f"from jobkit.agent.devices import HealthWatch\nHealthWatch.ask.__defaults__ = ({PATIENCE!r},)"
        begin_with(self.state.parent / "driver", "jobkit.agent.agent", lines)

    def write(self, *gpus: dict[str, Any], init: str | None = None) -> None:
        """Change the devices; `init` is the error of a driver that does not start."""
        temporary = self.state.with_suffix(".tmp")
        temporary.write_text(json.dumps({"gpus": gpus, "init": init}))
        temporary.rename(self.state)

    def wait_for_look(self, device: int) -> None:
        """Return once the health of a device has been asked for, since the last call."""
        asked = self.state.with_name("asked")
        wait_until(lambda: asked.exists() and f"{device} rows\n" in asked.read_text(), f"a look at device {device}")
        asked.unlink()


def answers(module: dict[str, Any], state: str) -> dict[str, Any]:
    """Return the functions of pynvml that ask a driver, with answers from the file `state`."""

    def answer(value: Any) -> Any:
        if isinstance(value, str):
            raise module["NVMLError"](module[f"NVML_ERROR_{value}"])
        return value

    def driver() -> Any:
        return json.loads(Path(state).read_text())

    def of(index: int, fact: str) -> Any:
        device = driver()["gpus"][index]
        with Path(state).with_name("asked").open("a") as file:
            file.write(f"{index} {fact}\n")
        time.sleep(device["hangs"])
        return answer(device[fact])

    def by_index(index: int) -> int:
        of(index, "found")
        return index

    def errors(index: int, kind: int, counter: int) -> Any:
        assert (kind, counter) == (module["NVML_MEMORY_ERROR_TYPE_UNCORRECTED"], module["NVML_VOLATILE_ECC"])
        return of(index, "ecc")

    def processes(index: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in of(index, "processes")]

    return {
        "nvmlInit": lambda: answer(driver()["init"]),
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(driver()["gpus"]),
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
        "nvmlDeviceGetName": lambda index: driver()["gpus"][index]["model"],
        "nvmlDeviceGetTotalEccErrors": errors,
        "nvmlDeviceGetRemappedRows": lambda index: of(index, "rows"),
        "nvmlDeviceGetComputeRunningProcesses": processes,
    }
