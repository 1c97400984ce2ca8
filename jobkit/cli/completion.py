"""jobkit completion SHELL: the script by which a shell completes jobkit's verbs, options, config keys and run names."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jobkit.errors import EXIT_FINISHED, JobkitError

SHELLS = {
    "bash": 'eval "$(jobkit completion bash)"   in ~/.bashrc',
    "zsh": 'autoload -U compinit; compinit; eval "$(jobkit completion zsh)"   in ~/.zshrc',
    "fish": "jobkit completion fish | source   in ~/.config/fish/config.fish",
}
"""What to write where, by shell."""


NOT_SET_BY_KEY = ("params", "clusters", "start_from")
"""Top-level keys that are not completed: what is in them is the YAML's, or an option sets it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(SHELLS.values())
    parser.add_argument("shell", choices=list(SHELLS), metavar="bash|zsh|fish", help="which shell's script is printed")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["jobkit"], shell=arguments.shell))
    return EXIT_FINISHED


# Asked by the script, which runs jobkit with the line so far in the environment


def answer(parser: argparse.ArgumentParser) -> None:
    """Print what the word may become, and end the process."""
    import argcomplete

    nothing: Any = _no_words
    argcomplete.autocomplete(parser, always_complete_options=False, default_completer=nothing)


def words_so_far() -> list[str]:
    """The words behind `jobkit` on the line that is being completed, without the unfinished one."""
    from argcomplete.lexers import split_line

    words: list[str] = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    return words[1:]


def put_options_first(parser: argparse.ArgumentParser) -> None:
    """Change the line so that no option stands between words that are none: argparse takes none behind it then."""
    verb, *words = words_so_far()
    options, others, values, is_many = [], [], 0, False
    for word in words:
        if word.startswith("-"):
            nargs = getattr(parser._option_string_actions.get(word), "nargs", 0)
            values, is_many = 1 if nargs is None else 0, nargs in ("+", "*")
        if word.startswith("-") or values or is_many:
            values -= not word.startswith("-")
            options += [] if is_many else [word]
        else:
            others.append(word)
    if values > 0 or is_many:
        return  # it is the option's value that is being typed
    line, unfinished = os.environ["COMP_LINE"], ""
    if not line[: int(os.environ["COMP_POINT"])].endswith(" "):
        unfinished = line[: int(os.environ["COMP_POINT"])].split(" ")[-1]
    os.environ["COMP_LINE"] = f"{shlex.join(['jobkit', verb, *options, *others])} {unfinished}"
    os.environ["COMP_POINT"] = str(len(os.environ["COMP_LINE"]))


def runs(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Names of runs and of sweeps, and `latest`."""
    from jobkit.cli.arguments import runs_dir
    from jobkit.run.runs import all_runs

    folder = runs_dir(parsed_args)
    try:
        names = [run.name for run in all_runs(folder)]
    except JobkitError:
        return []
    sweeps = [f"{one.parent.name}/{one.name}" for one in folder.glob(".sweeps/*/*")]
    return [*names, *sweeps, "latest"]


def overrides(parsed_args: argparse.Namespace, prefix: str, **_: Any) -> list[str]:
    """`key=` for the config's keys and for the params of the YAML that stands before it on the line."""
    from jobkit.run.config import SECTIONS

    sections = {section: below for section, below in SECTIONS.items() if section not in NOT_SET_BY_KEY}
    keys = [f"{section}.{key}" for section, below in sections.items() for key in below]
    keys += [section for section, below in sections.items() if not below]
    keys += _params(words_so_far())
    plus = "+" if prefix.startswith("+") else ""
    return [f"{plus}{key}=" for key in keys]


def _params(words: Iterable[str]) -> list[str]:
    """The params of the YAML among the words, and those before which its stages stand."""
    values = _values(words)
    params, found = values.get("params"), list(_stages(values))
    own = list(_dotted(params if isinstance(params, Mapping) else {}, "params."))
    return [*own, *(f"{stage}.{key}" for stage in found for key in own)]


def _values(words: Iterable[str]) -> Mapping[str, Any]:
    """What the first YAML among the words has."""
    from jobkit.run.yamlfile import read_yaml

    for file in (Path(word) for word in words if word.endswith((".yaml", ".yml"))):
        try:
            return read_yaml(file)[0]
        except JobkitError:
            continue
    return {}


def _stages(values: Mapping[str, Any]) -> Iterable[str]:
    found = values.get("pipeline")
    return found if isinstance(found, Mapping) else ()


def stages(**_: Any) -> list[str]:
    """The stages of the YAML that stands before."""
    return list(_stages(_values(words_so_far())))


def states(prefix: str, **_: Any) -> list[str]:
    """States behind those that are there already."""
    from jobkit.run.status import State

    before = prefix[: prefix.rfind(",") + 1]
    return [f"{before}{state}" for state in State]


def _dotted(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def yaml_files(prefix: str, **_: Any) -> list[str]:
    """Folders and YAML files."""
    from argcomplete.completers import FilesCompleter

    return list(FilesCompleter(("yaml", "yml"))(prefix))


def folders(prefix: str, **_: Any) -> list[str]:
    """Folders."""
    from argcomplete.completers import DirectoriesCompleter

    return list(DirectoriesCompleter()(prefix))


def _no_words(**_: Any) -> list[str]:
    return []


COMPLETERS = {
    "experiment": yaml_files,
    "overrides": overrides,
    "sweep": overrides,
    "run_name": runs,
    "run_names": runs,
    "run_a": runs,
    "run_b": runs,
    "state": states,
    "stage": stages,
    "start_from": runs,
    "after": runs,
    "runs_dir": folders,
}
"""What completes an argument, by the name that its value has."""


def add_completers(parser: argparse.ArgumentParser) -> None:
    """Say to the shell's script what completes each argument."""
    for action in parser._actions:
        if action.dest in COMPLETERS:
            action.completer = COMPLETERS[action.dest]  # type: ignore[attr-defined]
