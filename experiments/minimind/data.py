"""Documents in a .jsonl file, as packed sequences of tokens.

    text.jsonl                          {"text": ...} a line
    text.jsonl.tokens/<fingerprint>/    training.bin, held_out.bin: tokens uint32 [n], one document after the other;
                                        corpus.json: what pack() says of them

The tokens are made once, in one pass, and read through memmap. Of equal documents the first counts. A document's text
alone decides whether it is held out, so no training document is also a held-out one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import Dataset

import jobkit

IGNORED = -100
"""The target that cross_entropy leaves out, where a sequence is filled up."""


class Bytes:
    """A token a byte of UTF-8, and two for the ends of a document."""

    vocabulary, begin, end, name = 258, 256, 257, "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class Tokenizer:
    """A tokenizer.json, read by Hugging Face's `tokenizers`; `ends` are its tokens before and after a document."""

    def __init__(self, file: Path, ends: Sequence[str]) -> None:
        from tokenizers import Tokenizer as Model  # here, as bytes need no such package

        self._model = Model.from_file(str(file))
        self._model.no_truncation()  # the file may hold options of its last user
        self._model.no_padding()
        self.begin, self.end = (self._model.token_to_id(token) for token in ends)
        if self.begin is None or self.end is None:
            raise jobkit.UsageError(f"params.ends: found {' and '.join(ends)}, and {file} does not have both")
        self.vocabulary = 1 + max(self._model.get_vocab().values())
        self.name = hashlib.sha256(file.read_bytes()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._model.decode(tokens)


def open_tokenizer(p: DictConfig) -> Bytes | Tokenizer:
    """The tokenizer of a recipe. Raises UsageError where the model has too small a vocabulary for it."""
    tokenizer = Bytes() if p.tokenizer == "bytes" else Tokenizer(Path(p.tokenizer), p.ends)
    if (least := tokenizer.vocabulary) > (size := p.model.vocabulary):
        raise jobkit.UsageError(
            f"params.model.vocabulary: found {size}, expected {least} or more, as {p.tokenizer} has"
        )
    return tokenizer


class Packed(Dataset):
    """(tokens int64 [length], the token after each of them [length]): each token but the first is a target once.

    The last sequence is filled up with IGNORED where `is_whole`, else left out.
    """

    def __init__(self, file: Path, length: int, is_whole: bool) -> None:
        self.file, self.length, self.is_whole = file, length, is_whole
        self.tokens = np.memmap(file, np.uint32, "r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1 + (self.length - 1) * self.is_whole) // self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[i * self.length : (i + 1) * self.length + 1].astype(np.int64)
        filled = np.full(self.length + 1, IGNORED)
        filled[: len(window)] = window
        return torch.from_numpy(filled[:-1].clip(0)), torch.from_numpy(filled[1:])

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, (self.file, self.length, self.is_whole)  # a memmap would be sent to a worker as an array


def pack(file: Path, tokenizer: Bytes | Tokenizer, held_out: float) -> Path:
    """The folder with a file's tokens, which is made unless it is there. One process calls it at a time.

    About the part `held_out` of the documents is held out. Raises UsageError, which names file and line.
    """
    if not file.exists():
        raise jobkit.UsageError(f"params.data: there is no file {file}")
    state = (file.stat().st_size, file.stat().st_mtime_ns, tokenizer.name, tokenizer.begin, tokenizer.end, held_out)
    folder = file.with_name(f"{file.name}.tokens") / hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    if folder.exists():
        return folder
    temporary = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.mkdir(parents=True)
    seen: set[int] = set()
    sha256, documents, held_out_bytes = hashlib.sha256(), {"training": 0, "held_out": 0}, 0
    files = {part: (temporary / f"{part}.bin").open("wb") for part in documents}
    for text in texts(file):
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        if digest not in seen:
            seen.add(digest)
            sha256.update(len(text).to_bytes(8, "little") + text)
            part = "held_out" if digest < held_out * 2**64 else "training"
            documents[part] += 1
            held_out_bytes += len(text) * (part == "held_out")
            tokens = [tokenizer.begin, *tokenizer.encode(text.decode()), tokenizer.end]
            files[part].write(np.array(tokens, np.uint32).tobytes())
    for part, opened in files.items():
        opened.close()
        if not documents[part]:
            raise jobkit.UsageError(f"params.held_out: with {held_out} no document of {file} is for {part}")
    facts = {"documents": documents, "held_out_bytes": held_out_bytes, "sha256": sha256.hexdigest()}
    (temporary / "corpus.json").write_text(json.dumps(facts), encoding="utf-8")
    temporary.rename(folder)
    return folder


def texts(file: Path) -> Iterator[bytes]:
    """The text of each line in UTF-8. Raises UsageError for a line that has none."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)["text"].encode()
            except (ValueError, KeyError, TypeError, AttributeError):
                text = line[:60].decode(errors="replace").strip()
                raise jobkit.UsageError(f'{file}:{number}: found {text}, expected {{"text": "..."}}') from None


def write_topics(file: Path) -> None:
    """The small data set: each paragraph of Python's help texts a document. One process calls it at a time."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    paragraphs = [paragraph for topic in topics.values() for paragraph in re.split(r"\n\s*\n", topic)]
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs if text.strip()))
    temporary.rename(file)
