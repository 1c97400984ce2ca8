"""A real container for tests: bubblewrap, with the Python environment in another place, and no checkout of jobkit.

yaml = YAML + yaml_of(Box(project.folder))
os.kill(outside(launch, launch.rank_pid(0)), signal.SIGKILL)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.runs import Launch

PYTHON = "/opt/env/bin/python"


def box(*seen: Path, python: bool = True) -> list[str]:
    """Return the prefix of a container with its own processes, which sees these folders and a Python environment.

    Without --die-with-parent: a supervisor that is killed would take its ranks with it.
    """
    words = ["bwrap", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--unshare-pid"]
    for name in ("/usr", "/etc", sys.base_prefix):
        words += ["--ro-bind", name, name]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if Path(name).is_symlink():
            words += ["--symlink", str(Path(name).readlink()), name]
    if Path("/usr/bin/sbatch").exists():  # an image has none of Slurm's commands
        words += ["--ro-bind", "/dev/null", "/usr/bin/sbatch"]
    if python:
        words += ["--ro-bind", sys.prefix, "/opt/env"]
    for folder in seen:
        words += ["--bind", str(folder), str(folder)]
    if shutil.which("bwrap") is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("bubblewrap starts no container here")
    return words


def yaml_of(prefix: list[str], python: str = PYTHON) -> str:
    """Return the `container:` of a YAML."""
    return f"container: {json.dumps({'prefix': prefix, 'python': python})}\n"


def outside(launch: Launch, pid: int, node: str = "") -> int:
    """Return the process that has this pid in the newest container of a run, of a node of Slurm where one is named, by
    its pid here: containers of other runs and nodes have the same pids."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
            environment = status.with_name("environ").read_text(errors="replace").split("\0")
            words = status.with_name("cmdline").read_text(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        pids = next((line.split()[1:] for line in text.splitlines() if line.startswith("NSpid:")), [])
        is_of_run = str(launch.run.path) in words and (not node or f"SLURMD_NODENAME={node}" in environment)
        if len(pids) > 1 and pids[-1] == str(pid) and is_of_run:
            found.append(int(pids[0]))
    return max(found)
