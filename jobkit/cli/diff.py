"""jobkit diff A B: what differs between two runs: config, state, results, logged values, and lines of code.

config.yaml, status, progress.json --leaves--> dotted key -> value  }
code/.snapshot.json: file -> digest --difflib--> lines              }--> only the differences
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jobkit.cli.rows import Row, read_rows
from jobkit.errors import EXIT_FINISHED, InputError
from jobkit.run.files import json_text, leaves, read_json
from jobkit.run.rundir import RunDir
from jobkit.run.runs import WORDS, find, joined, runs_dir_of
from jobkit.run.secrets import masked
from jobkit.run.snapshot import MANIFEST
from jobkit.usage import show_examples

CODE_LINES = 40
"""More lines of code are for `diff -r` or --json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help=f"a run: {WORDS}")
    parser.add_argument("second", metavar="B", help="another run")
    parser.add_argument("--json", action="store_true", help="for programs: {runs, config, outcome, code}, all lines")
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="default: $JOBKIT_RUNS or ./runs")
    show_examples(parser, {"digits-aaaaaaaa digits-bbbbbbbb": "why the second one is better"})


def run(arguments: argparse.Namespace) -> int:
    """Print the differences between two runs."""
    from jobkit.config.yamlfile import read_yaml  # --help needs no yaml

    runs = [_only(word, runs_dir_of(arguments.runs_dir)) for word in (arguments.first, arguments.second)]
    pairs = differences(*(dict(leaves(read_yaml(run.config_file)[0])) for run in runs))
    config = {key: masked(pair, key) for key, pair in pairs.items()}
    outcome = differences(*map(_outcome, read_rows(runs)))
    code = list(code_lines(runs[0].code, runs[1].code))
    if arguments.json:
        print(json_text({"runs": [run.name for run in runs], "config": config, "outcome": outcome, "code": code}))
        return EXIT_FINISHED
    lines = [*as_lines({**config, **outcome}), *code[:CODE_LINES]]
    if len(code) > CODE_LINES:
        lines.append(f"... and {len(code) - CODE_LINES} more lines: diff -r {runs[0].code}/ {runs[1].code}/")
    print("\n".join(lines or ["no difference in config, code, state and results"]))
    return EXIT_FINISHED


def _only(word: str, runs_dir: Path) -> RunDir:
    runs = find([word], runs_dir)
    if len(runs) > 1:
        raise InputError(key="RUN", found=word, allowed=f"one of {joined([run.name for run in runs])}")
    return runs[0]


def _outcome(row: Row) -> dict[str, Any]:
    """State, step, the leaves of the result, and the newest logged values."""
    progress = row.run.progress()  # the row of a finished run has no logged values
    logged = progress.values if progress is not None else {}
    facts = {key: row.values.get(key) for key in ("state", "step")}
    return {**facts, **dict(leaves(row.values.get("result"), "result.")), **dict(leaves(logged, "logged."))}


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the two values of each key that differ; None where a mapping has no such key.

    differences({"seed": 0, "lr": 0.3}, {"seed": 0, "lr": 0.01})      # {"lr": [0.3, 0.01]}
    """
    pairs = {key: [first.get(key), second.get(key)] for key in {**first, **second}}
    # As texts, since for Python True is 1, and NaN is not NaN.
    return {key: values for key, values in pairs.items() if json.dumps(values[0]) != json.dumps(values[1])}


def as_lines(pairs: Mapping[str, list[Any]]) -> list[str]:
    """Return an aligned line for each key: `params.lr  0.3 -> 0.01`."""
    width = max(map(len, pairs), default=0)
    return [f"{key:{width}}  {' -> '.join(_texts(values))}" for key, values in pairs.items()]


def _texts(values: list[Any]) -> list[str]:
    """Texts without quotes, unless the quotes are the difference: 1 and "1"."""
    exact = ["-" if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    plain = [text[1:-1] if text[0] == '"' and "\\" not in text else text for text in exact]
    return plain if plain[0] != plain[1] else exact


def code_lines(first: Path, second: Path) -> Iterator[str]:
    """Yield the unified diff of two code snapshots; a line alone for a snapshot that is gone and for a binary file."""
    digests = []
    for folder in (first, second):
        manifest = read_json(folder / MANIFEST)
        digests.append(manifest if isinstance(manifest, dict) else {})
        if not digests[-1]:
            yield f"no code snapshot in {folder}"
    for name in sorted(digests[0].keys() | digests[1].keys()) if all(digests) else ():
        if digests[0].get(name) == digests[1].get(name):
            continue
        contents = [(folder / name).read_bytes() if (folder / name).is_file() else b"" for folder in (first, second)]
        if contents[0] == contents[1] or any(b"\0" in content for content in contents):
            yield f"{name} differs, and not in its lines"
            continue
        before, after = (content.decode(errors="replace").splitlines() for content in contents)
        yield from difflib.unified_diff(before, after, f"A/{name}", f"B/{name}", n=1, lineterm="")
