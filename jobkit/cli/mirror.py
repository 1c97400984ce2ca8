"""jobkit mirror RUN ...: copy to other services what they lack of what was logged."""

from __future__ import annotations

import argparse

from jobkit.cli.arguments import add_selection, chosen_runs
from jobkit.cli.several import each
from jobkit.errors import EXIT_FINISHED, InputError, JobkitError
from jobkit.run.rundir import RunDir
from jobkit.run.usage import show_examples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    show_examples(
        parser,
        "toy  copy what a service that was away has missed",
    )


def run(arguments: argparse.Namespace) -> int:
    """Copy once; a run that trains does it by itself."""
    return each(chosen_runs(arguments), _mirror)


def _mirror(run: RunDir) -> int:
    from filelock import Timeout

    from jobkit.mirror.mirroring import SERVICES, mirrors_of

    mirrors = mirrors_of(run)
    if not mirrors:
        raise InputError(f"{run.name}: its config has no `mirror:`, as in mirror: {{mlflow: {{}}}}")
    failed = []
    for mirror in mirrors:
        service = SERVICES[mirror.service]
        try:
            with mirror.lock().acquire(timeout=0):
                mirror.update()
                mirror.close()
            print(f"{run.name}: {mirror.copied} points copied to {service}")
        except Timeout:
            print(f"{run.name}: another process is copying to {service}")
        except Exception as error:  # of whatever package
            failed.append(f"{service}: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
    if failed:
        raise JobkitError(f"{run.name}: {'; '.join(failed)}")
    return EXIT_FINISHED
