"""A folder's files in one file, with a checksum: what comes out of it is what went in, or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from jobkit.run.files import replacing

DIGEST_BYTES = hashlib.sha256().digest_size
"""Of the checksum at the end of the file, behind what tar reads."""

CHUNK_BYTES = 1 << 20
"""Read at a time for the checksum."""


class DamagedArchive(ValueError):
    """The file is not as it was written."""


def pack(folder: Path, names: Iterable[str], archive: Path) -> None:
    """Put files of `folder`, by their names in it, into `archive`, durably; one that is gone by now is left out.

    Raises OSError.
    """
    with replacing(archive) as file:
        summing = _Summing(file)
        with tarfile.open(fileobj=summing, mode="w|") as tar:  # type: ignore[call-overload]
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    tar.add(folder / name, name, recursive=False)
        file.write(summing.sum.digest())


def unpack(archive: Path, folder: Path) -> None:
    """Put the files of an archive into `folder`; none of them comes to be outside of it.

    Raises DamagedArchive, also in a Python before 3.10.12, and OSError for a file that cannot be read or written.
    """
    if not hasattr(tarfile, "data_filter"):
        raise DamagedArchive(f"{archive}: this Python is too old to unpack it safely")
    with archive.open("rb") as file:
        _verify(file, archive)
        try:
            with tarfile.open(fileobj=file) as tar:
                tar.extractall(folder, filter="data")
        except tarfile.TarError as error:
            raise DamagedArchive(f"{archive}: {error}") from error


def contents(archive: Path) -> dict[str, int]:
    """The files of an archive and their sizes in bytes; none where it cannot be read. The checksum is not looked at."""
    try:
        with tarfile.open(archive, "r:") as tar:
            return {member.name: member.size for member in tar}
    except (OSError, tarfile.TarError):
        return {}


def _verify(file: BinaryIO, archive: Path) -> None:
    left = file.seek(0, os.SEEK_END) - DIGEST_BYTES
    file.seek(0)
    found = hashlib.sha256()
    while left > 0 and (data := file.read(min(left, CHUNK_BYTES))):
        found.update(data)
        left -= len(data)
    if left < 0 or file.read() != found.digest():
        raise DamagedArchive(f"{archive}: the checksum is another one")
    file.seek(0)


class _Summing:
    """A file that is written through, and summed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sum = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sum.update(data)
        return self._file.write(data)
