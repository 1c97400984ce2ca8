"""jobkit completion SHELL: the script that makes a shell complete verbs, options, choices and names of runs.

Tab --> the script --> jobkit completion SHELL --words =WORD ... (the last unfinished) --candidates--> lines

Where there are no candidates, the shell completes names of files.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from jobkit.errors import EXIT_FINISHED
from jobkit.usage import Parser, show_examples

SCRIPTS = {
    "bash": """\
_jobkit() {
    local words=("${COMP_WORDS[@]:1:COMP_CWORD}")
    mapfile -t COMPREPLY < <("$1" completion bash --words "${words[@]/#/=}" 2>/dev/null)
}
complete -o default -F _jobkit jobkit""",
    "zsh": """\
_jobkit() {
    local -a lines
    lines=("${(@f)$("${words[1]}" completion zsh --words "${(@)words[2,CURRENT]/#/=}" 2>/dev/null)}")
    if [[ -n "${lines[1]}" ]]; then compadd -a lines; else _files; fi
}
compdef _jobkit jobkit""",
    "fish": """\
function _jobkit
    set -l before (commandline -opc)
    set -l word (commandline -ct)
    set -l lines ($before[1] completion fish --words =$before[2..-1] "=$word" 2>/dev/null)
    if set -q lines[1]; printf '%s\\n' $lines; else; __fish_complete_path "$word"; end
end
complete -c jobkit -f -a '(_jobkit)'""",
}
_RUN = re.compile(r"[AB]|(.*\|)?RUN(\[.*)?")
"""Metavars of arguments that take runs: RUN, RUN[@STEP], EXP.yaml|RUN[@STEP], and A and B of `diff`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(SCRIPTS), help="the shell that completes")
    parser.add_argument("--words", nargs="+", help=argparse.SUPPRESS)  # each behind =, so that none is an option here
    show_examples(parser, {"bash": 'the script; a line for ~/.bashrc: eval "$(jobkit completion bash)"'})


def run(arguments: argparse.Namespace) -> int:
    """Print the script, or for the script the candidates for the last word."""
    if arguments.words is None:
        print(SCRIPTS[arguments.shell])
    else:
        print("\n".join(candidates([word[1:] for word in arguments.words], parser_of, runs_named)))
    return EXIT_FINISHED


def candidates(
    words: Sequence[str],
    parser_of: Callable[[str], argparse.ArgumentParser | None],
    runs_named: Callable[[Sequence[str]], Iterable[str]],
) -> list[str]:
    """Return what the last of the words behind `jobkit` may become.

    candidates(["lo"], parser_of, runs_named)                           # ["logs"]
    candidates(["logs", "toy", "--f"], parser_of, runs_named)           # ["--follow"]

    `parser_of` returns the parser of a verb, `runs_named` the names of runs for the words.
    """
    from jobkit.cli.main import VERBS

    *before, word = words
    if not before:
        return [verb for verb in VERBS if verb.startswith(word)]
    parser = parser_of(before[0])
    if parser is None:
        return []
    options = parser._option_string_actions
    positional = [action for action in parser._actions if not action.option_strings]
    action: Any = None
    for earlier in before[1:]:
        if action is not None:  # the value of the option before
            action = None
        elif earlier in options:
            action = options[earlier] if options[earlier].nargs is None else None
        elif not earlier.startswith("-") and positional and positional[0].nargs not in ("*", "+"):
            del positional[0]
    action = action or next(iter(positional), None)
    if word.startswith("-"):
        values: Iterable[str] = [name for name in options if options[name].help != argparse.SUPPRESS and name[1] == "-"]
    elif action is not None and _RUN.fullmatch(str(action.metavar)):
        values = runs_named(before)
    else:
        values = (action and action.choices) or ()
    return [value for value in values if value.startswith(word)]


def parser_of(verb: str) -> Parser | None:
    """Return the parser of a verb; None if there is no such verb."""
    from jobkit.cli.main import VERBS, module_of

    if verb not in VERBS:
        return None
    parser = Parser()
    import_module(module_of(verb)).add_arguments(parser)
    return parser


def runs_named(words: Sequence[str]) -> list[str]:
    """Return the runs and the sweeps in the runs directory that the words name, or the usual one."""
    from jobkit.run.runs import runs_dir_of, runs_in

    places = [Path(after) for option, after in pairwise(words) if option == "--runs-dir"]
    runs_dir = runs_dir_of(places[-1] if places else None)
    return [*(run.name for run in runs_in(runs_dir)), *(file.name for file in runs_dir.glob("*.sweep"))]
