"""jobkit diff A B: what two runs have differently, and what came of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.cli.arguments import WORDS, add_runs_dir, runs_dir
from jobkit.errors import EXIT_FINISHED
from jobkit.run.choose import find_run
from jobkit.run.code_diff import Line, code_diff
from jobkit.run.differences import ABSENT, Difference, differences
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.run.usage import show_examples

CODE_LINES = 40
"""How many lines of code are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("A", "B"):
        parser.add_argument(f"run_{name.lower()}", metavar=name, help=WORDS)
    add_runs_dir(parser)
    parser.add_argument("--json", action="store_true", help="for programs: all of it, with all lines of code")
    show_examples(
        parser,
        "toy-1f0c2a3b toy-9d8e7f60  what two runs of a name have differently",
    )


@dataclass(frozen=True)
class Comparison:
    """Two runs, side by side."""

    runs: tuple[RunDir, RunDir]
    status: tuple[Status, Status]
    config: list[Difference]
    code: list[Line]
    versions: list[Difference]
    outcome: list[Difference]
    """State, step, the result and what was logged last, also where they are equal."""

    @property
    def snapshots(self) -> tuple[Path, Path]:
        """The folders of their code."""
        first, second = (run.code / status.code for run, status in zip(self.runs, self.status, strict=True))
        return first, second


def run(arguments: argparse.Namespace) -> int:
    """Print how the two differ: config, code, versions, and what came of each."""
    found = compare(*(find_run(word, runs_dir(arguments)) for word in (arguments.run_a, arguments.run_b)))
    print(json.dumps(as_json(found), indent=1) if arguments.json else "\n".join(describe(found)))
    return EXIT_FINISHED


def compare(first: RunDir, second: RunDir) -> Comparison:
    """What two runs have differently."""
    one, other = first.status(), second.status()
    same_code = one.code == other.code or not (one.code and other.code)
    return Comparison(
        runs=(first, second),
        status=(one, other),
        config=differences(first.config(), second.config()),
        code=[] if same_code else code_diff(first.code / one.code, second.code / other.code),
        versions=[each for each in _pairs(_versions(one), _versions(other)) if each.before != each.after],
        outcome=list(_pairs(_outcome(one), _outcome(other))),
    )


def _versions(status: Status) -> dict[str, str]:
    """Of the newest attempt that has recorded them."""
    return next((one.versions for one in reversed(status.attempts) if one.versions), {})


def _outcome(status: Status) -> dict[str, Any]:
    found: dict[str, Any] = {"state": str(status.state)}
    found |= {"step": status.step} if status.has_loop else {}
    found |= dict(_leaves(status.result, "result")) | dict(_leaves(status.values, "logged"))
    return found


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _leaves(one, f"{key}.{name}")
    elif value is not None:
        yield key, value


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    for key in dict.fromkeys([*one, *other]):
        yield Difference(key, one.get(key, ABSENT), other.get(key, ABSENT))


def describe(found: Comparison) -> list[str]:
    """The comparison in lines for a person."""
    rows = [(one.key, f"{one.before} -> {one.after}") for one in found.config if not one.key.startswith("start_from.")]
    starts = [_start(run) for run in found.runs]
    rows += [("start", " -> ".join(starts))] if starts[0] != starts[1] else []
    rows += [("code", str(line)) for line in found.code[:CODE_LINES]]
    if len(found.code) > CODE_LINES:
        more = f"{len(found.code) - CODE_LINES} more lines: diff -r {' '.join(map(str, found.snapshots))}"
        rows.append(("code", more))
    rows += [(f"versions.{one.key}", f"{one.before} -> {one.after}") for one in found.versions]
    if not rows:
        rows.append(("no difference", "in config, code and versions"))
    for one in found.outcome:
        before, after = _short(one.before), _short(one.after)
        rows.append((one.key, f"{before}, both" if one.before == one.after else f"{before} -> {after}"))
    width = max(len(key) for key, _ in rows)
    return [f"{key:<{width}}  {text}" for key, text in rows]


def _start(run: RunDir) -> str:
    start = run.config().start_from
    return str(start) if start.run else "step 0"


def _short(value: Any) -> str:
    """A number as a person compares it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def as_json(found: Comparison) -> dict[str, Any]:
    """The comparison as JSON: of each key the two values, None where a run has none."""

    def pairs(differences: list[Difference]) -> dict[str, list[Any]]:
        return {one.key: [None if v is ABSENT else v for v in (one.before, one.after)] for one in differences}

    return {
        "runs": [run.name for run in found.runs],
        "config": pairs(found.config),
        "code": [dataclasses.asdict(line) for line in found.code],
        "snapshots": [str(folder) for folder in found.snapshots],
        "versions": pairs(found.versions),
        "outcome": pairs(found.outcome),
    }
