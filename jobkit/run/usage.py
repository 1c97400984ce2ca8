"""How jobkit's commands read their words: usage lines as a person types them, and mistakes told in a line or two."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jobkit.errors import EXIT_BAD_INPUT, JobkitError, nearest

HELP_WIDTH = 78
"""Columns of what `--help` says besides the options."""

AXIS_FORMS = "v1,v2 or range(4), range(2,10,2), log(1e-4,1e-1,7)"
"""How the values of a sweep's axis are written. It stands here, where `--help` has it without importing what sweeps."""


def program(verb: str = "") -> str:
    """How jobkit was typed, for usage lines: `jobkit`, `python -m jobkit` or `python -m jobkit.submit`."""
    started = Path(sys.argv[0])
    if started.name == "submit.py" and verb == "submit":
        return "python -m jobkit.submit"
    typed = "jobkit" if started.name == "jobkit" else "python -m jobkit"
    return f"{typed} {verb}".strip()


READER_GONE = 141
"""The exit code of a command whose output nobody reads to its end, as shells give it: it may not have done all."""


def exit_code(command: Callable[[], int], interrupted: Callable[[], int]) -> int:
    """What a command ends with: its own code, or that of the error or Ctrl-C that ended it, told in a line."""
    code = READER_GONE
    _print_all_texts()
    try:
        try:
            code = command()
        except JobkitError as error:
            print(f"error: {error}", file=sys.stderr)
            code = error.exit_code
        except KeyboardInterrupt:
            code = interrupted()
        finally:
            if sys.stdout is not None:  # closed by the shell: `>&-`
                sys.stdout.flush()  # here: what fails when the interpreter ends is told as a bug of the program
    except BrokenPipeError:  # `jobkit list | head`
        _print_no_more()
    except OSError as error:
        from jobkit.run.disk_errors import in_a_line

        print(f"error: {in_a_line(error)}", file=sys.stderr)
        _print_no_more()
        return EXIT_BAD_INPUT
    return code


def _print_all_texts() -> None:
    """Let no text be too much for the terminal's encoding: a letter that this lacks is printed as `\\u4f60`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or stream.encoding.lower() != "utf-8"):
            stream.reconfigure(errors="backslashreplace")


def _print_no_more() -> None:
    """Let the interpreter end without a second failure to print what is still to be printed."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_examples(parser: argparse.ArgumentParser, *examples: str, text: str = "") -> None:
    """End `--help` with a text and what to type behind the verb, each with some blanks before what it does."""
    pairs = [re.split(r" {2,}", one) for one in examples]
    lines = [f"  # {does}\n  {parser.prog} {typed}" for typed, does in pairs]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(parser.description or "", HELP_WIDTH)
    parser.epilog = "\n".join([textwrap.fill(text, HELP_WIDTH), "", "Examples:", *lines]).strip()


def joined(words: Sequence[str]) -> list[str]:
    """The words of a command line with `--sort -accuracy` as one: argparse takes such a value for an option."""
    found: list[str] = []
    for word in words:
        if found[-1:] == ["--sort"] and word.startswith("-") and not word.startswith("--"):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


class Parser(argparse.ArgumentParser):
    """argparse's, except that a mistake is told as all others are, with the nearest option, and without a page of
    usage. An option is typed whole: what is cut off may be another one tomorrow."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False} | options)

    @property
    def options(self) -> list[str]:
        """All that it takes, as they are typed."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        message = message.replace(", key=value", "")  # argparse asks for what may be left out, too
        self.exit(EXIT_BAD_INPUT, f"error: {message}{self._meant(message)}\n{self.prog} --help shows what it takes\n")

    def _meant(self, message: str) -> str:
        if "; " in message:  # it says it already
            return ""
        if message.endswith("required: EXP.yaml"):
            return ", before --sweep: that takes all the words behind it" if "--sweep" in sys.argv else ""
        unknown = re.match(r"unrecognized arguments: .*?(--?[\w-]+)", message)
        if unknown and unknown[1] in ("-m", "--multirun") and "--sweep" in self.options:  # Hydra's
            return "; did you mean '--sweep'?"
        return nearest(unknown[1], self.options) if unknown else ""
