"""`check:` of a YAML: a function of the user's own that looks at what a run needs, before anything is queued.

It runs in a process of its own, so that what it imports, prints or leaves behind is nothing to the submission.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from jobkit.errors import InputError, InvalidValue
from jobkit.run import references
from jobkit.run.config import Config
from jobkit.start import words
from jobkit.submission.task_check import check_task

PATIENCE_SECONDS = 60.0
"""How long it may take for the params of one run: it is to look at the beginning of what there is."""


def run_check(config: Config, source: Path) -> None:
    """Call the config's `check` with its `params`, imported from the folder `source`.

    Raises InvalidValue with what it found wrong. Where `params` or `inputs` wait for another run's values it is not
    called.
    """
    for _, error in refused([config], source):
        raise error


def refused(configs: Sequence[Config], source: Path) -> Iterator[tuple[int, InvalidValue]]:
    """As `run_check` of several configs, in one process for each check that they have, which gets equal params once:
    the numbers of those that it refuses, of each check the first."""
    asked: dict[str, dict[str, int]] = {}
    for number, config in enumerate(configs):
        if config.check and not any(True for _ in references.texts_with_references(config)):
            asked.setdefault(config.check, {}).setdefault(repr(config.params), number)
    for check, by_params in asked.items():
        numbers = list(by_params.values())
        found = _first_refused(check, [configs[number].params for number in numbers], source)
        if found is not None:
            yield numbers[found[0]], InvalidValue(*found[1:])


def _first_refused(check: str, params: Sequence[Mapping[str, Any]], source: Path) -> tuple[int, str, str] | None:
    """The number of the first of some params in which a check finds something wrong, the key of that and what it is."""
    try:
        check_task(check, source, has_setup=True)  # a missing package it says itself, with the way out
    except InvalidValue as error:
        return 0, "check", error.problem
    with tempfile.TemporaryDirectory() as folder:
        given, done, report, output = (Path(folder, name) for name in (PARAMS, DONE, REPORT, "output"))
        given.write_bytes(pickle.dumps(params))
        done.touch()
        code = _code_of(words("jobkit.submission.own_check", str(source), folder, check), source, output, done)
        number = done.stat().st_size
        if code is None:
            return number, "check", f"{check}: not done within {PATIENCE_SECONDS:g} s"
        if not report.exists():
            said = " / ".join(output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])
            return number, "check", f"{check}: its process ended with {code}: {said}"
        found = json.loads(report.read_text(encoding="utf-8"))
        return None if found is None else (number, *found)


PARAMS, DONE, REPORT = "params.pickle", "done", "report.json"
"""In the folder that the process is given: what to check, a byte for each params that are right, and what is wrong."""


def _code_of(command: list[str], folder: Path, output: Path, done: Path) -> int | None:
    """The exit code of a command whose output goes to a file; None if the file `done` does not grow for too long. What
    it began ends with it."""
    with output.open("wb") as file:  # a pipe would be held open by whatever process it leaves behind
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # to end all of it
        )
    try:
        before = -1
        while before < (before := done.stat().st_size):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(PATIENCE_SECONDS)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(arguments: list[str]) -> int:
    """Call the function `arguments[2]`, imported from the folder `arguments[0]`, with each of the mappings in PARAMS
    until it finds something wrong with one.

    That is in the folder `arguments[1]`, as is then REPORT: what it found wrong, as [key, problem], or null.
    """
    source, folder, check = arguments
    params = pickle.loads(Path(folder, PARAMS).read_bytes())
    sys.path[:] = [source, *filter(None, sys.path)]
    module, _, name = check.partition(":")
    found = None
    done = os.open(Path(folder, DONE), os.O_WRONLY | os.O_APPEND)
    try:
        function = getattr(import_module(module), name)
        for one in params:
            function(one)
            os.write(done, b".")
    except InvalidValue as error:
        found = error.key, error.problem
    except InputError as error:
        found = "check", str(error)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(source)]
        place = (own or frames)[-1]
        said = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            said += (
                f"; a check runs where it is submitted, without the job's setup: install {package} for "
                f"{sys.executable}, or leave the check out, by 'check=\"\"'"
            )
        found = "check", f"{check}: {said}"
    Path(folder, REPORT).write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # else threads that it began would be waited for
