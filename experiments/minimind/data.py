"""Documents in a .jsonl file, `{"text": ...}` a line, and a packed copy of their tokens beside it.

    text.jsonl                          the documents
    text.jsonl.tokens/<fingerprint>/    training.bin, held_out.bin, corpus.json

A .bin file is the tokens of documents, each document once, with the end-of-text token before the first and after every
one. It is read through memmap: its size does not matter for memory, nor does that of the .jsonl, which is packed in one
pass. The copy's name is a fingerprint of what it was made from, so one that no longer fits is never opened; a new one
is made beside it, because a running job may still read the old one.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.minimind.tokens import Tokenizer
from jobkit.train.prepared import prepare_folder

CHUNK = 1024
"""Documents that the tokenizer is given at a time."""
IGNORED = -100
"""The target that cross_entropy leaves out: there is no token."""


@dataclass(frozen=True)
class Corpus:
    """A packed copy, and what corpus.json says about it."""

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

    def training(self, length: int) -> Windows:
        """The training tokens in windows of `length`; the few at the end that fill none are left out."""
        return Windows(self.folder / "training.bin", self.dtype, length, pad=False)

    def validation(self, length: int) -> Windows:
        """The held-out tokens, all of them: the last window is filled up."""
        return Windows(self.folder / "held_out.bin", self.dtype, length, pad=True)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """(tokens int64 [length], the token after each of them [length]); each token but the first is a target once.

    Where the last window is filled up, its targets there are IGNORED.
    """

    def __init__(self, file: Path, dtype: str, length: int, pad: bool) -> None:
        self.file, self.dtype, self.length, self.pad = file, dtype, length, pad
        self.tokens = np.memmap(file, dtype, "r")
        self.targets = len(self.tokens) - 1

    def __len__(self) -> int:
        return (self.targets + (self.length - 1 if self.pad else 0)) // self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start = i * self.length
        window = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        missing = self.length + 1 - len(window)
        tokens, target = window[:-1], window[1:]
        if missing:
            tokens = torch.nn.functional.pad(tokens, (0, missing))
            target = torch.nn.functional.pad(target, (0, missing), value=IGNORED)
        return tokens, target

    def __reduce__(self) -> tuple[type[Windows], tuple[Path, str, int, bool]]:
        # A memmap would be sent to a data loader's worker as a whole array.
        return Windows, (self.file, self.dtype, self.length, self.pad)


def open_corpus(file: Path, tokenizer: Tokenizer, held_out: float) -> Corpus:
    """The packed copy of a .jsonl file, which the first process to come makes while the others wait.

    About the part `held_out` of the documents is for validation: which ones depends on their texts alone.
    Raises ValueError naming file and line of one that is not `{"text": ...}`.
    """
    state = file.stat()
    made_from = (state.st_size, state.st_mtime_ns, tokenizer.fingerprint, held_out)
    folder = file.with_name(file.name + ".tokens") / hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]

    def pack(temporary: Path) -> None:
        print(f"packing {file} into {folder}, once", flush=True)
        facts = _write_tokens(file, tokenizer, held_out, temporary)
        (temporary / "corpus.json").write_text(json.dumps(facts))

    prepare_folder(folder, pack)
    return Corpus(folder, **json.loads((folder / "corpus.json").read_text()))


def documents(file: Path) -> Iterator[str]:
    """The text of each line; empty lines count as none."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)["text"]
                text.encode()  # half of a surrogate pair is text for JSON, but not for UTF-8
            except (ValueError, KeyError, TypeError, AttributeError):
                found = line[:60].decode(errors="replace").strip()
                raise ValueError(f'{file}:{number}: expected {{"text": "..."}}, found {found}') from None
            yield text


def _write_tokens(file: Path, tokenizer: Tokenizer, held_out: float, folder: Path) -> dict[str, str | int]:
    """Write the .bin files and return what belongs into corpus.json."""
    dtype = "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32"
    kept = kept_out = kept_out_bytes = 0
    sha256 = hashlib.sha256()
    with (folder / "training.bin").open("wb") as training, (folder / "held_out.bin").open("wb") as validation:
        for opened in (training, validation):
            opened.write(np.array([tokenizer.end], dtype).tobytes())
        texts = _distinct(documents(file))
        while chunk := list(islice(texts, CHUNK)):
            for (text, draw), tokens in zip(chunk, tokenizer.encode([text for text, _ in chunk]), strict=True):
                part = validation if draw < held_out else training
                part.write(np.array([*tokens, tokenizer.end], dtype).tobytes())
                data = text.encode()
                sha256.update(len(data).to_bytes(8, "little") + data)
                kept += 1
                if draw < held_out:
                    kept_out += 1
                    kept_out_bytes += len(data)
    if kept_out in (0, kept):
        raise ValueError(f"{file}: with held_out {held_out}, {kept_out} of {kept} documents are for validation")
    return {
        "dtype": dtype,
        "documents": kept,
        "held_out": kept_out,
        "held_out_bytes": kept_out_bytes,
        "sha256": sha256.hexdigest(),
    }


def _distinct(texts: Iterator[str]) -> Iterator[tuple[str, float]]:
    """Each text where it occurs first, with a number in [0, 1) that is the same for equal texts, and random else."""
    seen = sqlite3.connect("")  # a temporary file: a set of many millions of digests would not be constant memory
    seen.execute("PRAGMA journal_mode = OFF")
    seen.execute("PRAGMA cache_size = -65536")  # 64 MiB
    seen.execute("CREATE TABLE seen (digest INTEGER PRIMARY KEY)")
    for text in texts:
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
        if seen.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount:
            yield text, digest / 2**63
    seen.close()
