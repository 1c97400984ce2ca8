"""A folder's files in one file, with a checksum: what comes out of it is what went in, or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
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
        with tarfile.open(fileobj=summing, mode="w|", dereference=True) as tar:  # type: ignore[call-overload]
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    tar.add(folder / name, name, recursive=False)
        file.write(summing.sum.digest())


def unpack(archive: Path, folder: Path) -> None:
    """Put the files of an archive into `folder`; none of them comes to be outside of it.

    Raises DamagedArchive, and OSError for a file that cannot be read or written.
    """
    with archive.open("rb") as file:
        _verify(file, archive)
        try:
            with tarfile.open(fileobj=file) as tar:
                for member in tar:
                    _unpack(tar, member, folder)
        except (tarfile.TarError, DamagedArchive) as error:
            raise DamagedArchive(f"{archive}: {error}") from error


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    # Not tarfile's extraction filters: Debian 12's Python 3.11.2 does not have them.
    name = PurePosixPath(member.name)
    data = tar.extractfile(member) if member.isreg() else None
    if data is None or name.is_absolute() or ".." in name.parts:
        raise DamagedArchive(f"{member.name} is not a file in its folder")
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with data, target.open("wb") as file:
        shutil.copyfileobj(data, file)
    target.chmod(member.mode & 0o777)


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
