"""jobkit list: every run, the latest first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from jobkit.cli.arguments import add_runs_dir, runs_dir
from jobkit.errors import EXIT_FINISHED
from jobkit.run.command_line import to_type
from jobkit.run.runs import all_runs
from jobkit.submission.overview import look_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs: a list of {run, ...status}")
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print them as they are now; what has ended is as it was recorded."""
    runs = all_runs(runs_dir(arguments))
    shown = [(one.run, one.status) for one in look_at(runs)]
    if arguments.json:
        print(json.dumps([{"run": name, **status} for name, status in shown], indent=1))
        return EXIT_FINISHED
    if not shown:
        print(f"no runs in {runs_dir(arguments)}; {to_type('submit', 'EXP.yaml')} makes one")
        return EXIT_FINISHED
    rows: list[tuple[str, ...]] = [("RUN", "STATE", "STEP", "ATTEMPTS", "WHERE", "JOB")]
    rows += [_row(name, status) for name, status in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{width}}}" for width in widths).format
    print("\n".join(line(*row).rstrip() for row in rows))
    return EXIT_FINISHED


def _row(name: str, status: Mapping[str, Any]) -> tuple[str, ...]:
    step, total = status["step"], status["total_steps"]
    has_loop = total is not None or step or any(one["resumed"] is not None for one in status["attempts"])
    state = f"probably {status['probably']}" if status.get("probably") else str(status["state"])
    where = (status["cluster"] or "-", status["job_id"] or "-")
    steps = (f"{step}/{total}" if total else str(step)) if has_loop else "-"
    return name, state, steps, str(len(status["attempts"])), *where
