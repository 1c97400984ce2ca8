"""Build a byte-pair tokenizer from documents, as experiments/minimind.yaml reads it.

    python tools/train_tokenizer.py .../pretrain_t2t_mini.jsonl tokenizer.json --vocabulary 6400

learns the merges of a byte-level BPE (Hugging Face's `tokenizers`) from the texts of a .jsonl file, `{"text": ...}` a
line, and writes Hugging Face's tokenizer.json. Its first tokens are those with which minimind fills up, begins and ends
a text.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.minimind.documents import lines_of, text_of
from jobkit.errors import InputError
from jobkit.run.command_line import to_install
from jobkit.run.files import write_atomic

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens 0, 1 and 2, as in github.com/jingyaogong/minimind, trainer/train_tokenizer.py."""
SMALLEST = 256 + len(SPECIAL)
"""Each byte is a token, so that no text is unknown."""
SHOWN = 20
"""Broken lines named on the screen."""
LOOKED_AT = 1000
"""Lines from which the number of lines is estimated."""


@dataclass
class Documents:
    """About `wanted` texts of a file, spread evenly over it (0: all of them), read one after the other."""

    file: Path
    wanted: int
    bytes_read: int = 0
    taken: int = 0
    broken: list[str] = field(default_factory=list)
    """What is wrong with lines that are no documents."""

    def __iter__(self) -> Iterator[str]:
        every = self._every()
        with self.file.open("rb") as opened:
            for number, line in enumerate(lines_of(opened), start=1):
                self.bytes_read += len(line)
                if (number - 1) % every or line.isspace():
                    continue
                try:
                    text = text_of(line, f"{self.file}:{number}")
                except InputError as error:
                    self.broken.append(str(error))
                    continue
                self.taken += 1
                yield text

    def _every(self) -> int:
        with self.file.open("rb") as opened:
            sizes = [len(line) for line in islice(lines_of(opened), LOOKED_AT)]
        if not sizes or not self.wanted:
            return 1
        return max(1, round(self.file.stat().st_size / (sum(sizes) / len(sizes)) / self.wanted))


def train(documents: Documents, vocabulary: int, console: Console) -> str | None:
    """The tokenizer as JSON; None where there was no document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    failed: list[BaseException] = []

    def learn() -> None:
        try:
            tokenizer.train_from_iterator(documents, trainer)
        except BaseException as error:
            failed.append(error)

    # A thread: while it counts pairs the library hears of no Ctrl-C.
    thread = threading.Thread(target=learn, daemon=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("reading", total=documents.file.stat().st_size)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            is_read = documents.bytes_read >= documents.file.stat().st_size
            what = "learning merges" if is_read and thread.is_alive() else "reading"
            progress.update(bar, completed=documents.bytes_read, description=what)
    if failed:
        raise failed[0]
    return tokenizer.to_str(pretty=True) if documents.taken else None


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Build a byte-pair tokenizer, OUT, from the texts of a .jsonl file.",
        epilog="Exit codes: 0 done; 1 failed midway; 2 wrong input, as lines that are no documents, and nothing was "
        "written; 130 interrupted. OUT appears whole or not at all.",
    )
    parser.add_argument("data", type=Path, metavar="DATA", help='documents, {"text": ...} a line')
    parser.add_argument("output", type=Path, metavar="OUT", help="the tokenizer.json that is to be written")
    parser.add_argument(
        "--vocabulary", type=int, default=6400, help=f"tokens, {SMALLEST} or more (default: 6400, as minimind has)"
    )
    parser.add_argument(
        "--documents",
        type=int,
        default=100_000,
        help="learn from about so many, spread evenly over the file (default: 100000; 0: from all). What they have of "
        "different words is in memory at once",
    )
    arguments = parser.parse_args()
    for option, least in (("vocabulary", SMALLEST), ("documents", 0)):
        if (found := getattr(arguments, option)) < least:
            parser.error(f"--{option}: found {found}, expected {least} or more")
    return arguments


def refusal(data: Path, output: Path) -> str | None:
    """What keeps the program from beginning."""
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        return f"the package `tokenizers` is not installed: {to_install('tokenizers')}"
    try:
        with data.open("rb"):
            pass
    except OSError as error:
        return f"{data}: cannot be read: {error.strerror}"
    if output.exists():
        return f"{output}: is there already, and runs may read it; give another name"
    try:
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        return f"{output.parent}: cannot be written: {error.strerror}"
    return None


def main() -> int:
    """Exit code of the program."""
    arguments = parse_arguments()

    def fail(code: int, message: str) -> int:
        print(f"train_tokenizer: {message}", file=sys.stderr, flush=True)
        return code

    if problem := refusal(arguments.data, arguments.output):
        return fail(2, problem)
    documents = Documents(arguments.data, arguments.documents)
    try:
        made = train(documents, arguments.vocabulary, Console(stderr=True, highlight=False, soft_wrap=True))
        for line in documents.broken[:SHOWN]:
            print(f"broken: {line}", file=sys.stderr)
        if documents.broken and documents.taken:
            lines = f"{len(documents.broken):,} broken line(s) among those read"
            return fail(2, f"{lines}: mend or remove them, a training run would end there; nothing was written")
        if made is None:
            what = f", {len(documents.broken):,} broken line(s)" if documents.broken else ""
            return fail(2, f'{arguments.data}: no document in it{what}; expected {{"text": "..."}} a line')
        write_atomic(arguments.output, made)
    except KeyboardInterrupt:
        os._exit(fail(130, "interrupted; nothing was written"))  # the thread would be waited for
    except OSError as error:
        return fail(1, f"{error.filename or arguments.output}: {error.strerror or error}")
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(arguments.output)).get_vocab_size()
    fewer = f" ({arguments.vocabulary:,} asked for: no pair is left)" if tokens < arguments.vocabulary else ""
    print(f"{arguments.output}: {tokens:,} tokens{fewer}, from {documents.taken:,} documents")
    return 0


if __name__ == "__main__":
    sys.exit(main())
