"""`check:` of a YAML: a function of the user's own that looks at what a run needs, before anything is queued.

It runs in a process of its own, so that what it imports, prints or leaves behind is nothing to the submission.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path

from jobkit.errors import InputError, InvalidValue
from jobkit.run import references
from jobkit.run.config import Config
from jobkit.start import words
from jobkit.submission.task_check import check_task

PATIENCE_SECONDS = 60.0
"""How long it may take: it is to look at the beginning of what there is."""


def run_check(config: Config, source: Path) -> None:
    """Call the config's `check` with its `params`, imported from the folder `source`.

    Raises InvalidValue with what it found wrong. Where `params` or `inputs` wait for another run's values it is not
    called.
    """
    if not config.check or any(True for _ in references.texts_with_references(config)):
        return
    try:
        check_task(config.check, source)
    except InvalidValue as error:
        raise InvalidValue("check", error.problem) from None
    with tempfile.TemporaryDirectory() as folder:
        params, report, output = (Path(folder, name) for name in ("params.json", "report.json", "output"))
        params.write_text(json.dumps(config.params), encoding="utf-8")
        code = _code_of(words("jobkit.submission.own_check", str(source), folder, config.check), source, output)
        if code is None:
            raise InvalidValue("check", f"{config.check}: not done within {PATIENCE_SECONDS:g} s")
        if not report.exists():
            said = " / ".join(output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])
            raise InvalidValue("check", f"{config.check}: its process ended with {code}: {said}")
        if (found := json.loads(report.read_text(encoding="utf-8"))) is not None:
            key, problem = found
            raise InvalidValue(key, problem)


def _code_of(command: list[str], folder: Path, output: Path) -> int | None:
    """The exit code of a command whose output goes to a file; None if it takes too long. What it began ends with it."""
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
        return process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(arguments: list[str]) -> int:
    """Call the function `arguments[2]`, imported from the folder `arguments[0]`, with the mapping in params.json.

    That is in the folder `arguments[1]`, as is then report.json: what it finds wrong, as [key, problem], or null.
    """
    source, folder, check = arguments
    params = json.loads(Path(folder, "params.json").read_text(encoding="utf-8"))
    sys.path[:] = [source, *filter(None, sys.path)]
    module, _, name = check.partition(":")
    found = None
    try:
        getattr(import_module(module), name)(params)
    except InvalidValue as error:
        found = error.key, error.problem
    except InputError as error:
        found = "check", str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        found = "check", f"{check}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    Path(folder, "report.json").write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # else threads that it began would be waited for
