"""Text as numbers: a Hugging Face tokenizer.json, or plain bytes where there is none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

BYTES = "bytes"


class Tokenizer(Protocol):
    """What the data and the samples need of a tokenizer."""

    vocabulary: int
    """Number of tokens, special ones included."""
    end: int
    """The token after every document, and before the first."""
    fingerprint: str
    """Differs where the same text gives other tokens."""

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The tokens of each text, no special ones among them."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without the special ones; what is no valid text becomes U+FFFD."""
        ...


def open_tokenizer(name: str, end_of_text: str) -> Tokenizer:
    """`bytes`, or a tokenizer.json whose token `end_of_text` ends a document."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(Path(name), end_of_text)


class ByteTokenizer:
    """A token a byte of UTF-8, and one for the end of a text."""

    vocabulary = 257
    end = 256
    fingerprint = BYTES

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode() for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json, read by Hugging Face's `tokenizers`; ValueError where it has no token `end_of_text`."""

    def __init__(self, file: Path, end_of_text: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ModuleNotFoundError(
                f"{file} is read by the package `tokenizers`, which is not installed: pip install tokenizers"
            ) from None
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        end = self._tokenizer.token_to_id(end_of_text)
        if end is None:
            raise ValueError(f"{file}: no token {end_of_text!r}: params.end_of_text names the one that ends a document")
        self.end: int = end
        self.vocabulary: int = self._tokenizer.get_vocab_size()
        self.fingerprint = hashlib.sha256(file.read_bytes()).hexdigest() + end_of_text

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens))
