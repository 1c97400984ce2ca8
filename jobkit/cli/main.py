"""The `jobkit` command: dispatches to one file a verb, and imports only that one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from jobkit.errors import EXIT_BAD_INPUT, EXIT_FINISHED, nearest
from jobkit.run.usage import Parser, exit_code, joined, program

VERBS = {
    "submit": "run an experiment, or continue it",
    "list": "all runs in the runs directory",
    "status": "how a run stands",
    "logs": "what the ranks of a run printed",
    "top": "the runs under way, as they go on",
    "wait": "return when runs are over, with the exit code of the worst",
    "queue": "who waits for this machine's devices, and what waited before a reboot",
    "cancel": "stop a run for good, with a checkpoint",
    "resume": "continue a run as it was last submitted",
    "rewind": "go back to a checkpoint of a run, keeping what came after it",
    "preempt": "rehearse a preemption: a run stops, and continues by itself",
    "rm": "remove runs, or their checkpoints",
    "diff": "what two runs have differently, and what came of it",
    "report": "one HTML page about runs: curves, attempts, config, code",
    "board": "TensorBoard for some runs, until Ctrl-C",
    "mirror": "copy to other services what they lack of what was logged",
    "doctor": "check this machine, the cluster and the network between its nodes",
    "completion": "the script by which bash, zsh or fish completes jobkit's commands",
}

ELSEWHERE = {
    "ls": "list", "ps": "list", "squeue": "list", "run": "submit", "train": "submit", "sbatch": "submit",
    "sweep": "submit EXP.yaml --sweep key=v1,v2", "fork": "submit EXP.yaml --from RUN", "stop": "cancel",
    "kill": "cancel", "scancel": "cancel", "delete": "rm", "remove": "rm", "show": "status", "info": "status",
    "tail": "logs -f", "compare": "diff", "tensorboard": "board",
}  # fmt: skip
"""What other programs call it."""

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended, as shells give it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; a JobkitError becomes its message and exit code."""
    return exit_code(lambda: _run(list(sys.argv[1:] if argv is None else argv)), interrupted=lambda: INTERRUPTED)


def _run(arguments: list[str]) -> int:
    parser = Parser(
        prog=program(),
        description="Run PyTorch training here or on Slurm, and never lose a run.",
        epilog=f"{program('VERB')} --help shows what a command takes.",
    )
    parser.add_argument("--version", action=_Version, help="print which jobkit this is, and which Python")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what a word may become
        return _complete(parser, subparsers)
    if arguments[:1] == ["submit"]:
        from jobkit import submit

        return submit.main(arguments[1:], prog=program("submit"))
    if not arguments:
        print(f"error: which command? (there are: {', '.join(VERBS)}; {program()} --help)", file=sys.stderr)
        return EXIT_BAD_INPUT
    if not arguments[0].startswith("-") and arguments[0] not in VERBS:
        from jobkit.run.command_line import to_type

        found = arguments[0]
        typed = f"; did you mean `{to_type('submit', found)}`?"
        hint = typed if found.endswith((".yaml", ".yml")) else _meant(found)
        print(f"error: no command {found!r}{hint} (there are: {', '.join(VERBS)})", file=sys.stderr)
        return EXIT_BAD_INPUT
    told_by = parser
    for verb, summary in VERBS.items():
        subparser = subparsers.add_parser(verb, help=summary, description=summary)
        if verb in arguments[:1]:
            module = import_module(f"jobkit.cli.{verb}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
            told_by = subparser
    parsed, unknown = parser.parse_known_args(joined(arguments))
    if hasattr(parsed, "run_names"):  # argparse takes none behind an option that stands behind others
        parsed.run_names += [word for word in unknown if not word.startswith("-")]
        unknown = [word for word in unknown if word.startswith("-")]
    if unknown:
        told_by.error(f"unrecognized arguments: {' '.join(unknown)}")
    from jobkit.log import configure  # here: --help needs no logging, whose import takes a sixth of its time

    configure()
    return int(parsed.run(parsed))


def _meant(found: str) -> str:
    return f"; did you mean {ELSEWHERE[found]!r}?" if found in ELSEWHERE else nearest(found, VERBS)


def _complete(parser: Parser, subparsers: Any) -> int:
    from jobkit import submit
    from jobkit.cli import completion

    words = completion.words_so_far()
    for verb, summary in VERBS.items():
        subparser = subparsers.add_parser(verb, help=summary)
        if words[:1] == [verb]:
            module = submit if verb == "submit" else import_module(f"jobkit.cli.{verb}")
            module.add_arguments(subparser)
            completion.add_completers(subparser)
            completion.put_options_first(subparser)
    completion.answer(parser)
    return EXIT_FINISHED


class _Version(argparse.Action):
    """`--version`: read only where it is asked for, which takes a tenth of a second."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import platform
        from importlib.metadata import version

        print(f"jobkit {version('jobkit')} (Python {platform.python_version()}, {sys.executable})")
        parser.exit()
