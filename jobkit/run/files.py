"""The one way to write a file: whole or not at all, and on the disk before anything refers to it.

write_json(run.status_file, {"step": 3})     a reader sees the old file or the new one, never a part

Every process that leaves a file for another one writes by it.
"""

from __future__ import annotations

import json
import math
import os
import pwd
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOR_OWNER = 0o600


def write_atomic(path: Path, data: bytes | str, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace `path` with `data`, by a temporary file beside it.

    Args:
        durable: False skips the fsync: for files that are only a view of something durable, like a progress report
        mode: permissions, less the umask, from the first instant on
    """
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)  # a killed process of the same pid may have left it, with other permissions
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)  # after the fsync: else a crash may leave the new name with no content
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:  # the fsync of the file does not reach its name
        sync_folder(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace `path` with a value as indented JSON; NaN and infinity, which JSON does not have, become null."""
    write_atomic(path, f"{json_text(value)}\n", durable=durable, mode=mode)


def json_text(value: Any, indent: int | None = 1) -> str:
    """A value as JSON for files and for programs: NaN and infinity become null."""
    return json.dumps(_without_nan(value), indent=indent, allow_nan=False)


def as_plain(value: Any) -> Any:
    """A result of a training function as JSON's values: tensors and arrays as numbers, other objects in words."""
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):  # also a list of ctx.params
        return [as_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return as_plain(value.tolist())
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of nested mappings: `params.lr`, 0.1; nothing for any other value."""
    for name, item in values.items() if isinstance(values, dict) else ():
        if isinstance(item, dict):  # not Mapping: of an ABC the question takes longer
            yield from leaves(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def sync_folder(folder: Path) -> None:
    """Return when the disk has the names in a folder: a rename is an entry of its folder."""
    sync_file(folder)


def sync_file(file: Path) -> None:
    """Return when the disk has the bytes of a file that a library wrote."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_link(path: Path, target: Path) -> None:
    """Make `path` a relative symbolic link to `target`, in the place of whatever is there; not durable by itself."""
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, path.parent))
    temporary.replace(path)


def _temporary(path: Path) -> Path:
    """A name beside `path`. Two hosts of a cluster may share a pid, and two threads a process: it holds all three."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}.tmp")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value


# Reading


def read_json(path: Path, *, fresh: bool = False) -> Any:
    """The value of a JSON file, or None if there is no such file or it is not whole; `fresh`: see `read_fresh`."""
    try:
        return json.loads(read_fresh(path) if fresh else path.read_bytes())
    except (OSError, ValueError):
        return None


def is_there(path: Path) -> bool:
    """Return whether a file or folder exists, even if another host has made it a moment ago.

    NFS remembers for 30 to 60 s that a name did not exist, unless its folder is read again.
    """
    if path.exists():
        return True
    _read_again(path.parent)
    return path.exists()


def read_fresh(path: Path) -> bytes:
    """The content of a file that another host may have made a moment ago, as for `is_there`. Raises OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        _read_again(path.parent)
        return path.read_bytes()


def _read_again(folder: Path) -> None:
    """Make NFS ask the server for the entries of a folder; the folder itself may be as new."""
    try:
        with os.scandir(folder) as entries:
            next(entries, None)
    except FileNotFoundError:
        if folder.parent != folder:
            _read_again(folder.parent)
    except OSError:  # the read that follows says why
        return


def foreign_owner(path: Path, folder: Path | None = None) -> str | None:
    """The owner's name of a file that belongs neither to this user nor to the owner of `folder`; else None.

    For files that run code when they are read: anybody else who may write in the folder could have put it there.
    Raises OSError.
    """
    owner = path.stat().st_uid
    is_known = owner == os.geteuid() or (folder is not None and owner == folder.stat().st_uid)
    return None if is_known else user_name(owner)


def user_name(user: int | None = None) -> str:
    """Return the name of a user, as Slurm knows it: of this process's, or of an id."""
    user = os.getuid() if user is None else user
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:  # a user that this machine does not know
        return str(user)
