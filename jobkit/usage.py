"""How a command of jobkit's reads its words and ends: usage lines as typed, mistakes in a line or two, exit codes.

    main = lambda: exit_code(lambda: verb.run(Parser(...).parse_args()))

The `jobkit` command and `python -m jobkit.submit` share it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jobkit.errors import EXIT_BAD_INPUT, JobkitError

if TYPE_CHECKING:
    from jobkit.run.records import Submitted

EXIT_INTERRUPTED = 130
"""Of a command that Ctrl-C has ended, as shells give it."""

EXIT_READER_GONE = 141
"""Of a command whose output nobody reads to its end (`jobkit list | head`), as shells give it."""


def program(verb: str = "") -> str:
    """Return how jobkit was typed: `jobkit list`, `python -m jobkit list` or `python -m jobkit.submit`."""
    typed = Path(sys.argv[0])
    if typed.name == "submit.py" and verb == "submit":
        return "python -m jobkit.submit"
    return f"{'jobkit' if typed.name == 'jobkit' else 'python -m jobkit'} {verb}".strip()


def to_type(verb: str, run: Path, *words: str) -> str:
    """Return a command about a run, as it can be typed next: `jobkit logs -f toy-11f5f19c`."""
    usual = Path(os.environ.get("JOBKIT_RUNS") or "runs").absolute()
    where = [] if run.parent == usual else ["--runs-dir", str(run.parent)]
    return f"{program(verb)} {shlex.join([*words, run.name, *where])}"


def to_continue(run: Path, submitted: Submitted | None) -> str:
    """Return the command that continues a run, or the next thing to do."""
    if submitted is not None and submitted.launcher is not None:
        return f"start it again by {submitted.launcher} in {submitted.folder}, as before"
    return to_type("resume", run)


def enter_folder(submitted: Submitted | None) -> None:
    """Go to the folder that a run was submitted from: relative paths of its config mean files there."""
    if submitted is None or not submitted.folder:
        return
    try:
        os.chdir(submitted.folder)
    except FileNotFoundError:
        note = f"{submitted.folder} is gone: relative paths of the config mean files in {Path.cwd()}"
        print(f"jobkit: {note}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """argparse's, except that a mistake takes a line or two, with the nearest option, and no page of usage.

    An option is typed whole: its beginning may be another option tomorrow.
    """

    _typed: Sequence[str] = ()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line: options may stand between the other words, and `--sort -loss` is an option's value."""
        self._typed = joined = list(words)
        if "--sort" in joined[:-1]:
            at = joined.index("--sort")
            joined[at : at + 2] = [f"--sort={joined[at + 1]}"]
        return self.parse_intermixed_args(joined)

    def error(self, message: str) -> NoReturn:
        message = message.removesuffix(", key=value")  # argparse counts words among the required that may be none
        unknown = message.partition("unrecognized arguments: ")[2]
        hints = [self._meant(*pair) for pair in re.findall(r"(?<!\S)--?([A-Za-z][\w.-]*)(?:[= ](?!-)(\S+))?", unknown)]
        said = "; ".join(filter(None, [message, *hints]))
        self.exit(EXIT_BAD_INPUT, f"error: {said}\n{self.prog} --help shows what it takes\n")

    def _meant(self, name: str, value: str) -> str:
        """The option that a word which is none is near to; else its value in the form key=value, where one is taken."""
        near = get_close_matches(f"--{name}", self._option_string_actions, n=1, cutoff=0.8)
        if near or all(action.metavar != "key=value" for action in self._actions):
            return f"did you mean {near[0]!r}?" if near else ""
        from jobkit.config.overrides import key_meant
        from jobkit.config.yamlfile import read_yaml

        key = name = name.replace("-", "_")
        if "." not in name:
            key = f"params.{name}"
            with suppress(StopIteration, JobkitError):
                values, _ = read_yaml(Path(next(word for word in self._typed if word.endswith((".yaml", ".yml")))))
                meant = key_meant(name, values)
                key = meant if meant and not isinstance(values.get(meant), dict) else key
        return f"a value is set by {key}={value or '...'}"


def show_examples(parser: argparse.ArgumentParser, examples: dict[str, str]) -> None:
    """End `--help` with examples: the words behind the verb, each with its effect."""
    lines = [f"  {parser.prog} {words}\n      {does}" for words, does in examples.items()]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["examples:", *lines])


def exit_code(command: Callable[[], int], interrupted: int = EXIT_INTERRUPTED) -> int:
    """Run a command and return its exit code, or that of the error or Ctrl-C that ended it, which takes a line."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115 - closed by the shell: `>&-`
    for stream in (sys.stdout, sys.stderr):  # a letter that the terminal's encoding lacks is printed as \u4f60
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command()
        sys.stdout.flush()
        return code
    except JobkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return interrupted
    except BrokenPipeError:
        return EXIT_READER_GONE
    except OSError as error:
        from jobkit.disk import explained

        print(f"error: {explained(error)}", file=sys.stderr)  # raises an error that is not a disk's: that is a bug
        return EXIT_BAD_INPUT
    finally:
        _drop_unwritten()


def _drop_unwritten() -> None:
    """Forget output that nobody can take: the interpreter's last flush of it would change the exit code to 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
