"""`start.py jobkit.agent.inside agent|check FOLDER ...`: the first program of jobkit in a container.

supervisor/container.py --prefix, python--> main --> jobkit.agent.agent, or a line for `jobkit doctor`

It says in one line what the container lacks, and ends with EXIT_UNFIT: the supervisor then tries no second time.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path

from jobkit import start
from jobkit.supervisor.container import EXIT_UNFIT

OLDEST_PYTHON = (3, 11)


def main(arguments: list[str]) -> int:
    """Become the agent of a run, or print the versions of Python and torch."""
    program, folder, *rest = arguments
    if (problem := _problem(program, folder)) is not None:
        print(f"jobkit: {problem}", file=sys.stderr)
        return EXIT_UNFIT
    if program == "check":
        print(f"Python {sys.version.split()[0]}, torch {version('torch')}")
        return 0
    # The paths of jobkit and of this Python also for the programs and loader workers that ranks start.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), start.ROOT]))
    from jobkit.agent import agent

    return agent.main(rest)


def _problem(program: str, folder: str) -> str | None:
    if sys.version_info < OLDEST_PYTHON:
        return f"{sys.executable} is Python {sys.version.split()[0]}: jobkit needs 3.11 or newer"
    try:
        os.chdir(folder)
    except OSError:
        return f"the container does not see {folder}, the folder of the command: mount it"
    start.leave_current_folder()
    if start.ROOT not in sys.path:
        sys.path.append(start.ROOT)
    if program == "agent" and "JOBKIT_JOB_ID" not in os.environ:
        return "the container hides the variables of the job: remove --cleanenv (apptainer), or add --env-host (podman)"
    if lacking := list(_lacking()):
        return f"the container lacks packages: {sys.executable} -m pip install {' '.join(map(repr, lacking))}"
    return None


def _lacking() -> Iterator[str]:
    """The packages that jobkit needs and this Python has not, or has too old."""
    (ours,) = Distribution.discover(name="jobkit", path=[start.ROOT])
    for text in ours.requires or ():
        match = re.match(r"([\w.-]+)[^;]*?>=\s*(\d+)\.?(\d*)", text)
        if match is None or "extra ==" in text:
            continue
        name, least = match[1], (int(match[2]), int(match[3] or 0))
        try:
            numbers = re.findall(r"\d+", version(name))
        except PackageNotFoundError:
            numbers = []
        if tuple(map(int, [*numbers, "0", "0"][:2])) < least:
            yield f"{name}>={least[0]}.{least[1]}"
