"""jobkit resume RUN ...: continue runs as they were last submitted, from wherever one stands."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys

from jobkit import submit
from jobkit.cli.arguments import add_selection, chosen_runs, confirm
from jobkit.cli.several import each, worst
from jobkit.errors import EXIT_RESUMABLE, InputError
from jobkit.run import secrets
from jobkit.run.command_line import to_type
from jobkit.run.continuation import how_to_continue
from jobkit.run.experiment import LoadedConfig
from jobkit.run.identity import name_in
from jobkit.run.places import Places
from jobkit.run.rundir import RunDir
from jobkit.run.runs import versions
from jobkit.run.usage import show_examples
from jobkit.run.yamlfile import read_yaml
from jobkit.submission.follow_several import follow_runs
from jobkit.submission.plan import Turn
from jobkit.submission.signals import hand_over, is_told_to_stop, signals_of_a_submission


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, asks=True)
    parser.add_argument("--detach", action="store_true", help="local: in the background")
    parser.add_argument("--follow", action="store_true", help="slurm: stay, and show output and progress")
    parser.add_argument(
        "--json", action="store_true", help="for programs: an object {run, path, state, ...} a line; local: as --detach"
    )
    show_examples(
        parser,
        "latest  the newest run",
        "'digits*' --state interrupted,failed -y  all that stopped",
    )


def run(arguments: argparse.Namespace) -> int:
    """Submit each run's own resolved config again, to the same place, with the code as it is there now."""
    found = chosen_runs(arguments)
    if len(found) > 1 and arguments.follow:
        raise InputError(f"--follow shows one run, not {len(found)}; {to_type('logs', '-f')} shows several")
    if arguments.json and arguments.follow:
        raise InputError("--json prints an object a run and returns, so --follow does not go with it")
    confirm(found, arguments)
    stays = len(found) > 1 and not (arguments.detach or arguments.json)
    # Of several the next is not to wait for the end of the one before.
    arguments.detach |= len(found) > 1 or arguments.json
    started: list[tuple[RunDir, subprocess.Popen[bytes]]] = []
    done: list[str] = []
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(signals_of_a_submission()) if len(found) > 1 else []

        def one(run: RunDir) -> int:
            code = resume(run, arguments, started)
            done.append(run.name)
            if len(found) > 1:
                hand_over()
                if is_told_to_stop(asked) and run is not found[-1]:
                    raise KeyboardInterrupt
            return code

        try:
            code = each(found, one)
        except KeyboardInterrupt:
            if not done:
                return submit.interrupted()
            print(f"interrupted: nothing was submitted after {done[-1]}", file=sys.stderr, flush=True)
            code = EXIT_RESUMABLE
            if not is_told_to_stop(asked):
                asked.append(signal.SIGINT)
        return worst([code, follow_runs(f"{len(started)} run(s)", started, asked)]) if stays and started else code


def resume(
    found: RunDir, arguments: argparse.Namespace, started: list[tuple[RunDir, subprocess.Popen[bytes]]] | None = None
) -> int:
    """Submit one again; of `arguments` only `detach`, `follow` and `json` are read; `started` as of `submit.start`."""
    status, config = found.status(), found.config()
    if lacking := secrets.lacking_in(dataclasses.asdict(config)):
        raise InputError(
            f"{found.name}: the value of {', '.join(lacking)} is its owner's alone; submit it with your own"
        )
    if status.submissions and not status.command:
        raise InputError(
            f"{found.name} was not started by jobkit.submit, but by a script or a launcher; the same command continues "
            f"it: {how_to_continue(found, status)}"
        )
    name = name_in(found.path.parent, config)
    newest = next(reversed([*versions(found.path.parent, name)]), None)
    if newest is None:
        raise InputError(f"{found.path}: the run's own name is {name}; rename it back")
    if newest.path != found.path:
        raise InputError(f"{found.name} was started again as {newest.name}; only the newest can be continued")
    try:
        os.chdir(status.cwd or ".")  # the task is imported from where it was submitted
    except OSError as error:
        raise InputError(f"{status.cwd}: {error.strerror}: {found.name} was submitted there") from None
    return submit.start(
        # As it is: what stands in it was resolved once, and a text may look like an interpolation by now.
        LoadedConfig(
            config, [], Places(path=found.config_file, lines=read_yaml(found.config_file)[1]), bool(status.resume)
        ),
        status.cluster or "local",
        found.path.parent,
        command=status.command,
        detach=arguments.detach,
        follow=arguments.follow,
        turn=Turn(queues=status.queues, priority=status.priority),
        as_json=getattr(arguments, "json", False),
        started=started,
    )
