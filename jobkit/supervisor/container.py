"""The command that starts an agent, in a container where the config has one: `container: {prefix: [...], python: ...}`.

    supervisor --(srun)--> apptainer exec image.sif --> sh: are the files there? --> python start.py worker.inside
                           (the user's `prefix`)                                     --> agent --fork--> ranks

The supervisor stays outside, with Slurm's commands. The Python of an image knows no jobkit: a copy of the supervisor's
own jobkit lies in the runs directory, which the container has to see, at the same path. slurm_allocation.py and
allocation.py put the prefix before an agent's command.
"""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.metadata import distribution
from pathlib import Path

from jobkit import start
from jobkit.config.schema import ContainerConfig
from jobkit.errors import InputError
from jobkit.run.files import foreign_owner, write_atomic
from jobkit.run.locks import make_folder

EXIT_UNFIT = 78  # EX_CONFIG of sysexits.h
"""Exit code of an agent that cannot start, as in a container without torch: another try would end the same way."""

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
    if container is None or container.is_none:
        return start.words("jobkit.agent.agent", *arguments)
    python, file = container.python or sys.executable, own_files(runs_dir) / "jobkit" / "start.py"
    inside = [python, str(file), "jobkit.agent.inside", program, str(Path.cwd()), *arguments]
    return [*container.prefix, "sh", "-c", _GUARD, "jobkit", *inside]


def own_files(runs_dir: Path) -> Path:
    """Return the folder in a runs directory with this jobkit and its metadata; files that are missing are written.

    Agents are of the very version of their supervisor, also in a job that waited while jobkit was updated. Nobody else
    can write there. Raises InputError where another user has made the folder.
    """
    package, meta = Path(start.FILE).parent, distribution("jobkit")
    about = {"METADATA": meta.read_text("METADATA") or meta.read_text("PKG-INFO")}  # PKG-INFO: an editable install's
    about["entry_points.txt"] = meta.read_text("entry_points.txt")
    files = {f"jobkit-{meta.version}.dist-info/{name}": (text or "").encode() for name, text in about.items()}
    for file in sorted(package.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            files[f"jobkit/{file.relative_to(package)}"] = file.read_bytes()
    digest = hashlib.sha256(f"{os.geteuid()} {sorted(files)}".encode() + b"".join(files.values()))
    path = runs_dir / ".code" / f"jobkit-{digest.hexdigest()[:12]}"
    make_folder(path.parent)
    if path.exists() and (owner := foreign_owner(path)) is not None:
        raise InputError(f"it belongs to {owner}", hint="remove it").at(path)
    for name, content in files.items():
        target = path / name
        if not target.is_file() or target.read_bytes() != content:  # a scratch disk may be swept file by file
            for folder in reversed([target.parent, *target.parent.parents][: name.count("/") + 1]):
                folder.mkdir(exist_ok=True)
                folder.chmod(0o755)
            write_atomic(target, content, durable=False, mode=0o644)
    return path
