"""`check:` of a YAML: a function of the user's own that looks at what a run needs, before anything is queued.

It runs in a process of its own, so that what it imports, prints or leaves behind is nothing to the submission.
"""

from __future__ import annotations

import json
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
        report = Path(folder) / "report.json"
        try:
            done = subprocess.run(
                words("jobkit.submission.own_check", str(source), str(report), config.check),
                input=json.dumps(config.params),
                cwd=source,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise InvalidValue("check", f"{config.check}: not done within {PATIENCE_SECONDS:g} s") from None
        if not report.exists():
            said = " / ".join(done.stdout.strip().splitlines()[-3:])
            raise InvalidValue("check", f"{config.check}: its process ended with {done.returncode}: {said}")
        if (found := json.loads(report.read_text())) is not None:
            key, problem = found
            raise InvalidValue(key, problem)


def main(arguments: list[str]) -> int:
    """Call the function `arguments[2]`, imported from the folder `arguments[0]`, with the mapping on standard input.

    What it finds wrong, as [key, problem], or null, goes to the file `arguments[1]`.
    """
    source, report, check = arguments
    params = json.load(sys.stdin)
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
    Path(report).write_text(json.dumps(found))
    return 0
