"""Documents in a .jsonl file, and a copy of their tokens beside it.

    text.jsonl                          the documents
    text.jsonl.tokens/<fingerprint>/    training.bin, training.starts, held_out.bin, held_out.starts, corpus.json

A .bin file is the tokens of documents, each document once, between the tokens of its begin and its end; .starts says
where each begins, and where the last ends. They are read through memmap: their size does not matter for memory, nor
does that of the .jsonl, which is read in one pass. The copy's name is a fingerprint of what it was made from, so one
that no longer fits is never opened; a new one is made beside it, because a running job may still read the old one.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.minimind.documents import digest_of, documents, draw_of, tokens_of
from experiments.minimind.tokens import Tokenizer
from jobkit.errors import InputError, UsageError
from jobkit.train.prepared import prepare_folder

CHUNK = 1024
"""Documents that the tokenizer is given at a time."""
LOOK_SECONDS = 5.0
"""Between two looks at whether a copy grows."""
IGNORED = -100
"""The target that cross_entropy leaves out: there is no token."""
FORM = "begin, tokens, end; starts; whole documents"
"""What the files of a copy hold: one of another form is not opened."""


@dataclass(frozen=True)
class Corpus:
    """A copy of the tokens, and what corpus.json says about it."""

    folder: Path
    dtype: str
    documents: int
    """Different ones, those held out included."""
    held_out: int
    """Documents for validation."""
    held_out_bytes: int
    """Their length as UTF-8."""
    sha256: str
    """Of all documents, in order."""
    tokenizer: str
    """Which tokenizer made the tokens: a digest."""

    def state_dict(self) -> dict[str, str]:
        """What a checkpoint says of the data, for a run that goes on."""
        return {"documents": self.sha256, "tokens (of another tokenizer)": self.tokenizer}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Raise UsageError where a run was trained on other documents, or on tokens of another tokenizer."""
        for what, found in self.state_dict().items():
            if state[what] != found:
                raise UsageError(f"the run was trained on other {what}")

    def training(self, length: int, packed: bool) -> Samples:
        """The training documents in samples of `length` tokens.

        `packed`: windows of all documents one after the other; the few tokens at the end that fill none are left out.
        Else a document each: its end is cut off, or the sample filled up.
        """
        return Windows(self._part("training"), length, pad=False) if packed else Cut(self._part("training"), length)

    def validation(self, length: int, packed: bool) -> Samples:
        """The held-out documents, all of their tokens; else as `training`: a long one goes on in the next sample."""
        part = self._part("held_out")
        return Windows(part, length, pad=True) if packed else Cut(part, length, goes_on=True)

    def _part(self, name: str) -> Part:
        return Part(self.folder, name, self.dtype)


class Part:
    """The training or the held-out documents of a copy."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self._made_of = folder, name, dtype
        self.tokens = np.memmap(folder / f"{name}.bin", dtype, "r")
        self.starts = np.memmap(folder / f"{name}.starts", "uint64", "r")

    def __reduce__(self) -> tuple[type[Part], tuple[Path, str, str]]:
        # A memmap would be sent to a data loader's worker as a whole array.
        return Part, self._made_of


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """(tokens int64 [length - 1], the token after each of them [length - 1]) of all documents one after the other.

    Each token but the first is a target once. Where the last window is filled up, its targets there are IGNORED.
    """

    def __init__(self, part: Part, length: int, pad: bool) -> None:
        self._part, self._step, self._pad = part, length - 1, pad
        self.targets = len(part.tokens) - 1
        """How many tokens are a target."""

    def __len__(self) -> int:
        return (self.targets + (self._step - 1 if self._pad else 0)) // self._step

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start = i * self._step
        return _filled_up(self._part.tokens[start : start + self._step + 1], self._step)


class Cut(Dataset[tuple[Tensor, Tensor]]):
    """As Windows, but a document each: begin, at most `length - 2` tokens, end, as in minimind's PretrainDataset.

    With `goes_on` what is cut off is in samples of its own, and the end comes after the last: so each token of each
    document is a target once.
    """

    def __init__(self, part: Part, length: int, goes_on: bool = False) -> None:
        self._part, self._room, self._goes_on = part, length - 2, goes_on
        if goes_on:
            sizes = np.diff(part.starts).astype(np.int64) - 2
            self._firsts = np.concatenate([[0], np.cumsum(np.maximum(1, -(-sizes // self._room)))])
            self.targets = int(sizes.sum()) + len(sizes)

    def __len__(self) -> int:
        return int(self._firsts[-1]) if self._goes_on else len(self._part.starts) - 1

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        document, piece = i, 0
        if self._goes_on:
            document = int(np.searchsorted(self._firsts, i, side="right")) - 1
            piece = i - int(self._firsts[document])
        start, stop = (int(self._part.starts[document + one]) for one in (0, 1))
        begin, tokens, end = np.split(self._part.tokens[start:stop], [1, -1])
        first = piece * self._room
        goes_on = self._goes_on and first + self._room < len(tokens)
        found = [begin, tokens[first : first + self._room], *([] if goes_on else [end])]
        return _filled_up(np.concatenate(found), self._room + 1)


Samples = Windows | Cut


def _filled_up(found: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """At most `length + 1` tokens as `length` tokens and their targets."""
    window = torch.from_numpy(found.astype(np.int64))
    missing = length + 1 - len(window)
    tokens, target = window[:-1], window[1:]
    if missing:
        tokens = torch.nn.functional.pad(tokens, (0, missing))
        target = torch.nn.functional.pad(target, (0, missing), value=IGNORED)
    return tokens, target


def open_corpus(file: Path, tokenizer: Tokenizer, held_out: float, beat: Callable[[], None] = lambda: None) -> Corpus:
    """The copy of a .jsonl file's tokens, which the first process to come makes while the others wait.

    About the part `held_out` of the documents is for validation: which ones depends on their texts alone.
    `beat` is called again and again, from a thread, while the copy grows: 10 GB may take an hour.
    Raises InputError naming file and line of one that is not `{"text": ...}`.
    """
    state = file.stat()
    made_from = (FORM, state.st_size, state.st_mtime_ns, tokenizer.fingerprint, held_out)
    folder = tokens_of(file) / hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]

    def pack(temporary: Path) -> None:
        print(f"packing {file} into {folder}, once", flush=True)
        facts = _write_tokens(file, tokenizer, held_out, temporary)
        (temporary / "corpus.json").write_text(json.dumps(facts), encoding="utf-8")

    with _beating(folder.parent, beat):
        prepare_folder(folder, pack)
    return Corpus(folder, **json.loads((folder / "corpus.json").read_text(encoding="utf-8")))


@contextmanager
def _beating(folder: Path, beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` whenever what is being written into the folder has grown.

    jobkit watches rank 0, and it may be another rank, or another run, that writes while rank 0 waits.
    """
    ended = threading.Event()

    def look() -> None:
        before = -1
        while not ended.wait(LOOK_SECONDS):
            with suppress(OSError):  # a file that has just been given its name
                size = sum(file.stat().st_size for file in folder.glob(".*.tmp/*"))
                if size != before:
                    before = size
                    beat()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Writer:
    """Writes the documents of one part."""

    def __init__(self, tokens: BinaryIO, starts: BinaryIO, tokenizer: Tokenizer, dtype: str) -> None:
        self._tokens, self._starts, self._tokenizer, self._dtype = tokens, starts, tokenizer, dtype
        self._end = 0
        self._note_start()

    def add(self, tokens: Sequence[int]) -> None:
        document = np.array([self._tokenizer.begin, *tokens, self._tokenizer.end], self._dtype)
        self._tokens.write(document.tobytes())
        self._end += len(document)
        self._note_start()

    def _note_start(self) -> None:
        self._starts.write(np.uint64(self._end).tobytes())


def _write_tokens(file: Path, tokenizer: Tokenizer, held_out: float, folder: Path) -> dict[str, str | int]:
    """Write the files of both parts and return what belongs into corpus.json."""
    dtype = "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32"
    kept = kept_out = kept_out_bytes = 0
    sha256 = hashlib.sha256()
    with ExitStack() as files:

        def writer(part: str) -> _Writer:
            opened = [files.enter_context((folder / f"{part}.{kind}").open("wb")) for kind in ("bin", "starts")]
            return _Writer(opened[0], opened[1], tokenizer, dtype)

        training, validation = writer("training"), writer("held_out")
        texts = _distinct(documents(file))
        while chunk := list(islice(texts, CHUNK)):
            for (text, draw), tokens in zip(chunk, tokenizer.encode([text for text, _ in chunk]), strict=True):
                (validation if draw < held_out else training).add(tokens)
                data = text.encode()
                sha256.update(len(data).to_bytes(8, "little") + data)
                kept += 1
                if draw < held_out:
                    kept_out += 1
                    kept_out_bytes += len(data)
    if kept_out in (0, kept):
        raise InputError(
            f"{file}: with held_out {held_out}, {kept_out} of {kept} documents are for validation: "
            "change params.held_out"
        )
    return {
        "dtype": dtype,
        "documents": kept,
        "held_out": kept_out,
        "held_out_bytes": kept_out_bytes,
        "sha256": sha256.hexdigest(),
        "tokenizer": hashlib.sha256(tokenizer.fingerprint.encode()).hexdigest(),
    }


def _distinct(texts: Iterator[str]) -> Iterator[tuple[str, float]]:
    """Each text where it occurs first, with a number in [0, 1) that is the same for equal texts, and random else."""
    seen = sqlite3.connect("")  # a temporary file: a set of many millions of digests would not be constant memory
    seen.execute("PRAGMA journal_mode = OFF")
    seen.execute("PRAGMA cache_size = -65536")  # 64 MiB
    seen.execute("CREATE TABLE seen (digest INTEGER PRIMARY KEY)")
    for text in texts:
        digest = digest_of(text)
        if seen.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount:
            yield text, draw_of(text)
    seen.close()
