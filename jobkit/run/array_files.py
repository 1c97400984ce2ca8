"""What arrays a file of weights or data holds, by its headers alone: for a `check:`, which imports no torch."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

Shape = tuple[int, ...]

_ITEM_BYTES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1,
    "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
"""By torch's name of a storage, without `Storage`."""

_ZIP = b"PK\x03\x04"
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files of torch.save begin that are no zip files: torch's before 1.6."""

_LONGEST_HEADER = 100_000_000
"""Bytes: safetensors takes no longer one either."""


def shapes_in(path: Path) -> dict[str, Shape]:
    """The shapes of the arrays, by name, in a file of safetensors, numpy.savez or torch.save.

    A dot is between the keys of a mapping and of one within it; what is no array is left out. Raises ValueError for a
    file that is none of these, is shorter than its headers say, or holds no arrays by name.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(_OLD_TORCH))
            file.seek(0)
            if begin.startswith(_ZIP):
                found = _of_zip(file)
            elif begin == _OLD_TORCH:
                found = _of_old_torch(file)
            elif begin[8:9] == b"{":
                found = _of_safetensors(file)
            else:
                raise ValueError("no file of safetensors, numpy.savez or torch.save")
    except OSError:
        raise
    except zipfile.BadZipFile:
        raise ValueError(f"{path}: torn: its end is missing") from None
    except Exception as error:  # whatever its reader finds wrong with it
        reason = str(error).partition("\n")[0] if type(error) is ValueError else f"torn or damaged ({error!r})"
        raise ValueError(f"{path}: {reason}") from None
    if not found:
        raise ValueError(f"{path}: no arrays by name in it")
    return found


def product(shape: Shape) -> str:
    """A shape as people write it."""
    return " x ".join(map(str, shape)) or "one number"


def _check_size(file: IO[bytes], least: int) -> None:
    if (found := os.fstat(file.fileno()).st_size) < least:
        raise ValueError(f"torn: {found:,} bytes of {least:,}")


def _of_safetensors(file: IO[bytes]) -> dict[str, Shape]:
    """8 bytes with the length of a JSON, which says where an array is in the rest."""
    length = int.from_bytes(file.read(8), "little")
    if length > _LONGEST_HEADER:
        raise ValueError("no file of safetensors")
    _check_size(file, 8 + length)
    try:
        header = json.loads(file.read(length))
        arrays = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(entry["shape"]) for name, entry in arrays.items()}
        ends = [entry["data_offsets"][1] for entry in arrays.values()]
    except (ValueError, AttributeError, LookupError, TypeError):
        raise ValueError("no file of safetensors") from None
    _check_size(file, 8 + length + max(ends, default=0))
    return shapes


def _of_zip(file: IO[bytes]) -> dict[str, Shape]:
    """numpy.savez's has a .npy file for an array; torch.save's a pickle, and the tensors' values in files beside it."""
    with zipfile.ZipFile(file) as archive:  # the list of what is in it is at its end: a torn one has none
        names = archive.namelist()
        if any(name.endswith("/constants.pkl") for name in names):
            raise ValueError("a program of TorchScript, no weights")
        for name in names:
            if name.endswith("/data.pkl"):
                with archive.open(name) as pickled:
                    return dict(_shapes(_Unpickler(pickled).load()))
        found = {}
        for name in names:
            if name.endswith(".npy"):
                with archive.open(name) as array:
                    found[name.removesuffix(".npy")] = _of_npy(array)
        return found


def _of_npy(file: IO[bytes]) -> Shape:
    """6 letters, the version in 2 bytes, the length of a header in 2 or 4, and that: a dict as Python writes it."""
    is_first_version = file.read(8)[6] == 1
    length = int.from_bytes(file.read(2 if is_first_version else 4), "little")
    return tuple(ast.literal_eval(file.read(length).decode("latin1").strip())["shape"])


def _of_old_torch(file: IO[bytes]) -> dict[str, Shape]:
    """Five pickles, the fourth of which has the tensors, and the fifth the keys of their storages; then of each storage
    the number of its values in 8 bytes, and those."""
    for _ in range(3):
        pickles = _Unpickler(file)
        pickles.load()
    pickles = _Unpickler(file)
    found = dict(_shapes(pickles.load()))
    for key in _Unpickler(file).load():
        if key not in pickles.item_bytes:
            break  # of a kind that is not known here, and how long it is neither
        file.seek(int.from_bytes(file.read(8), "little") * pickles.item_bytes[key], os.SEEK_CUR)
        _check_size(file, file.tell())
    return found


def _shapes(value: Any, prefix: str = "") -> Iterator[tuple[str, Shape]]:
    if not isinstance(value, Mapping):
        found = "one array" if isinstance(value, _Array) else f"a {type(value).__name__}"
        raise ValueError(f"{found} in it, expected arrays by name, as of a state_dict()")
    for key, one in value.items():
        if isinstance(one, _Array):
            yield f"{prefix}{key}", one.shape
        elif isinstance(one, Mapping):
            yield from _shapes(one, f"{prefix}{key}.")


class _Array:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape


class _Other:
    """Stands for any object that is no array; takes what pickle gives it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _Other:
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Makes arrays without values of torch's tensors. It imports nothing that the file names."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.item_bytes: dict[str, int] = {}
        """By the key of a storage."""

    def persistent_load(self, pid: Any) -> Any:
        """Of ("storage", its class, its key, ...) the size is kept; ("module", a class, its source) is the class."""
        what, kind, key, *_ = pid
        if what == "module":
            return kind
        if (item_bytes := _ITEM_BYTES.get(kind.__name__.removesuffix("Storage"))) is not None:
            self.item_bytes[key] = item_bytes
        return None

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and re.fullmatch(r"_rebuild_tensor(_v\d)?", name):
            return lambda storage, offset, shape, *_: _Array(tuple(shape))
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda array, *_: array
        return type(name, (_Other,), {})
