"""The command that starts an agent, in a container where the config has one: `container: {prefix: [...], python: ...}`.

    supervisor --(srun)--> apptainer exec image.sif --> sh: are the files there? --> python start.py worker.inside
                           (the user's `prefix`)                                     --> agent --fork--> ranks

The supervisor stays outside, with Slurm's commands. The Python of an image knows no jobkit: a copy of the supervisor's
own jobkit lies in the runs directory, which the container has to see, at the same path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from importlib.metadata import distribution
from pathlib import Path

from jobkit import start
from jobkit.run.files import foreign_owner
from jobkit.run.locks import make_folder
from jobkit.run.schema import ContainerConfig

EXIT_UNFIT = 78  # EX_CONFIG of sysexits.h
"""Exit code of an agent that cannot start in its container: another try would end the same way."""

# The arguments: the Python, start.py, and the arguments of start.py. PYTHONHOME of the host would break another Python.
_GUARD = f"""\
unfit() {{ echo "jobkit: $1" >&2; exit {EXIT_UNFIT}; }}
command -v "$1" >/dev/null || unfit "no Python $1 in the container: see container.python"
[ -r "$2" ] || unfit "the container does not see $2: mount the runs directory"
unset PYTHONHOME
PYTHONUNBUFFERED=1 exec "$@"
"""


def command(container: ContainerConfig | None, runs_dir: Path, program: str, *arguments: str) -> list[str]:
    """Return the words that start a program of jobkit: `agent` with the run's directory, or `check` for doctor.

    command(ContainerConfig(prefix=["apptainer", "exec", "a.sif"]), Path("/runs"), "agent", "/runs/toy-11f5f19c")
    """
    if container is None or not (container.prefix or container.python):
        return start.words("jobkit.worker.agent", *arguments)
    python, file = container.python or sys.executable, own_files(runs_dir) / "jobkit" / "start.py"
    inside = [python, str(file), "jobkit.worker.inside", program, str(Path.cwd()), *arguments]
    return [*container.prefix, "sh", "-c", _GUARD, "jobkit", *inside]


def own_files(runs_dir: Path) -> Path:
    """Return the folder in a runs directory with this jobkit and its metadata, made if it is not there.

    Agents are of the very version of their supervisor, also in a job that waited while jobkit was updated.
    """
    package, meta = Path(start.FILE).parent, distribution("jobkit")
    about = {name: text for name in ("METADATA", "PKG-INFO", "entry_points.txt") if (text := meta.read_text(name))}
    files = [file for file in sorted(package.rglob("*")) if file.is_file() and "__pycache__" not in file.parts]
    digest = hashlib.sha256(f"{os.geteuid()} {about}".encode())
    for file in files:
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    code = runs_dir / ".code"
    path = code / f"jobkit-{digest.hexdigest()[:12]}"
    if path.is_dir() and foreign_owner(path) is None:
        return path
    make_folder(code)
    staging = code / f".{os.getpid()}.{time.time_ns()}.tmp"
    for file in files:
        target = staging / "jobkit" / file.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    metadata = staging / f"jobkit-{meta.version}.dist-info"
    metadata.mkdir()
    for name, text in about.items():
        (metadata / name.replace("PKG-INFO", "METADATA")).write_text(text, encoding="utf-8")
    try:
        staging.rename(path)
    except OSError:  # the supervisor of another run was faster
        shutil.rmtree(staging)
    return path
