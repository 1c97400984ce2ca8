"""The `jobkit` command: one file a verb, and only the file of the typed verb is imported.

jobkit VERB words... --> cli/VERB.py: add_arguments(parser), run(arguments) -> exit code
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from jobkit.errors import EXIT_FINISHED, InputError, nearest
from jobkit.usage import Parser, exit_code, program

VERBS = {
    "submit": "run an experiment, or continue it",
    "list": "all runs in the runs directory",
    "status": "how a run stands, attempt by attempt",
    "logs": "what the ranks of a run printed",
    "wait": "return when runs are over, with the exit code of the worst",
    "cancel": "stop a run for good, with a checkpoint",
    "resume": "continue a run as it was last submitted",
    "rewind": "go back within a run, to one of its checkpoints",
    "rm": "remove runs that are over, or their checkpoints",
    "verify": "prove that interruptions change no bit of a training, or name what they change",
    "report": "one HTML page about runs: curves, images, attempts, failures, config",
    "preempt": "rehearse a preemption: a run stops, and continues by itself",
    "diff": "what differs between two runs: config, code, results",
    "board": "TensorBoard for some runs, or for all",
    "doctor": "check this machine and the cluster",
    "completion": "the script that makes a shell complete verbs, options and names of runs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: run_verb(words))


def run_verb(words: Sequence[str]) -> int:
    """Run the verb that is the first word. Raises the errors that `exit_code` shows."""
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help"):
        print(_help())
        return EXIT_FINISHED
    if verb == "--version":
        from jobkit import __version__

        print(f"jobkit {__version__} (Python {sys.version.split()[0]}, {sys.executable})")
        return EXIT_FINISHED
    if verb == "--help-agent":
        from pathlib import Path

        print(Path(__file__).parents[1].joinpath("AGENTS.md").read_text(encoding="utf-8"), end="")
        return EXIT_FINISHED
    if verb not in VERBS:
        is_yaml = verb.endswith((".yaml", ".yml"))
        hint = f"did you mean `{program('submit')} {verb}`?" if is_yaml else nearest(verb, VERBS)
        raise InputError(key="command", found=verb, allowed=f"one of {', '.join(VERBS)}", hint=hint)
    module = import_module(module_of(verb))
    parser = Parser(prog=program(verb), description=VERBS[verb])
    module.add_arguments(parser)
    arguments = parser.parse(words[1:])
    from jobkit.log import configure  # --help needs no logging, whose import takes a sixth of its time

    configure()
    return int(module.run(arguments))


def module_of(verb: str) -> str:
    """Return the module with `add_arguments` and `run` of a verb."""
    return "jobkit.submit" if verb == "submit" else f"jobkit.cli.{verb}"


def _help() -> str:
    verbs = "\n".join(f"  {verb:12}{summary}" for verb, summary in VERBS.items())
    return (
        f"usage: {program('VERB')} ...\n\nRun PyTorch training here or on Slurm, and never lose a run.\n\n{verbs}\n\n"
        f"{program('VERB')} --help shows what a command takes; --help-agent is a page for coding agents."
    )
