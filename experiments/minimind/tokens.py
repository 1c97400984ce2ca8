"""Text as numbers: a Hugging Face tokenizer.json, or plain bytes where there is none. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from jobkit.errors import InputError
from jobkit.run.command_line import to_install

BYTES = "bytes"


class Tokenizer(Protocol):
    """What the data and the samples need of a tokenizer."""

    vocabulary: int
    """The highest token and one more, special ones included."""
    begin: int
    """The token before every document."""
    end: int
    """The token after it."""
    fingerprint: str
    """Differs where the same text gives other tokens."""

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The tokens of each text, no special ones among them unless the text has their names in it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without the special ones; what is no valid text becomes U+FFFD."""
        ...


def open_tokenizer(name: str, begin_of_text: str, end_of_text: str, vocabulary: int) -> Tokenizer:
    """`bytes`, or a tokenizer.json with these two tokens, for a model that knows `vocabulary` tokens.

    Raises InputError for one that cannot be used.
    """
    tokenizer = ByteTokenizer() if name == BYTES else FileTokenizer(Path(name), begin_of_text, end_of_text)
    if tokenizer.vocabulary > vocabulary:
        raise InputError(f"{name} has {tokenizer.vocabulary} tokens, and params.model.vocabulary is {vocabulary}")
    return tokenizer


class ByteTokenizer:
    """A token a byte of UTF-8, and two for the ends of a text."""

    vocabulary = 258
    begin = 256
    end = 257
    fingerprint = BYTES

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode() for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json, read by Hugging Face's `tokenizers`."""

    def __init__(self, file: Path, begin_of_text: str, end_of_text: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise InputError(
                f"{file} is read by the package `tokenizers`, which is not installed: {to_install('tokenizers')}"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # what the library raises for a wrong file is a plain Exception
            raise InputError(f"{file}: not a tokenizer.json: {' '.join(str(error).split())}") from None
        ends = []
        for key, token in (("begin_of_text", begin_of_text), ("end_of_text", end_of_text)):
            ends.append(self._tokenizer.token_to_id(token))
            if ends[-1] is None:
                raise InputError(f"{file}: no token {token!r}, which params.{key} names")
        self.begin, self.end = ends
        self._tokenizer.no_truncation()  # a tokenizer.json may hold either, of whoever used it last
        self._tokenizer.no_padding()
        self.vocabulary = 1 + max(self._tokenizer.get_vocab().values())  # there may be gaps between the ids
        self.fingerprint = hashlib.sha256(file.read_bytes()).hexdigest() + repr((begin_of_text, end_of_text))

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens))
