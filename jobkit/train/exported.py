"""The weights of a finished run as files: `<name>.safetensors`, and beside it what is no tensor, `<name>.extra.pt`."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobkit.errors import JobkitError
from jobkit.run.files import content_digest, fsync_dir, fsync_file
from jobkit.train.names import load_module_state, module_state

_TIED, _EXTRA, _LEFT_OUT = "tied", "extra", "left_out"
"""Keys of the file's metadata, each JSON: names that are another's tensor; names in the second file; names in none."""


def save_weights(
    folder: Path,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    others: Mapping[str, Any],
    left_out: Collection[str] = (),
) -> None:
    """Write folder/<name>.safetensors and, where there is anything for it, folder/<name>.extra.pt; whole or not at all.

    `tensors` are on the CPU; `tied` gives further names of some of them. `left_out` are names that the module has and
    the files do not.
    """
    from safetensors.torch import save_file  # not on the other ranks

    extra = {**others, **{key: one for key, one in tensors.items() if not _is_storable(one)}}
    stored = _apart({key: one for key, one in tensors.items() if key not in extra})
    about = {_TIED: dict(tied), _EXTRA: list(extra), _LEFT_OUT: list(left_out)}
    metadata = {"format": "pt", **{key: json.dumps(value) for key, value in about.items() if value}}
    file, beside = folder / f"{name}.safetensors", folder / f"{name}.extra.pt"
    folder.mkdir(exist_ok=True)

    def save(path: Path) -> None:
        save_file(stored, str(path), metadata=metadata)
        _sort_metadata(path)

    written = [_write(file, save)]
    if extra:
        written.append(_write(beside, lambda path: torch.save(extra, path)))
    for temporary, final in reversed(written):  # the one that names the other comes last
        temporary.replace(final)
    if not extra:
        beside.unlink(missing_ok=True)
    fsync_dir(folder)


def load_weights(module: nn.Module, path: Path | str, name: str = "model", *, trusted: bool = False) -> None:
    """Load what a finished run exported of the module that it tracked as `name`, into a module built as that one was.

    `path`: the run's directory, its `final` folder, or the file. Parameters that the run left out
    (`checkpoint.weights: trainable`) stay as they are. What is no tensor, as of `get_extra_state`, is unpickled: other
    objects than numbers, texts, containers and tensors only where the file is `trusted`, for such a file can run any
    code. Raises JobkitError for a file that is not there or does not fit.
    """
    from safetensors import SafetensorError, safe_open

    file = _find(Path(path), name)
    try:
        with safe_open(file, "pt") as opened:
            metadata, names = opened.metadata() or {}, opened.keys()
            about = {key: json.loads(metadata[key]) for key in (_TIED, _EXTRA, _LEFT_OUT) if key in metadata}
            state = {key: opened.get_tensor(key) for key in names}
    except (OSError, SafetensorError, ValueError) as error:
        raise JobkitError(f"{file} cannot be read as the weights of a finished run: {error}") from None
    if about.get(_EXTRA):
        state |= _load_extra(file.with_name(f"{file.stem}.extra.pt"), trusted)
    state |= {key: state[first] for key, first in about.get(_TIED, {}).items() if first in state}
    own = module_state(module)
    state |= {key: own[key] for key in about.get(_LEFT_OUT, ()) if key in own}
    try:
        load_module_state(module, state)
    except RuntimeError as error:
        raise JobkitError(f"{file} does not fit {type(module).__name__}: {error}") from None


def weights_digest(path: Path | str, name: str = "model") -> str:
    """64 hex digits of what `load_weights` loads, equal for equal weights: to tell what was made of which.

    Raises JobkitError for a file that is not there.
    """
    file = _find(Path(path), name)
    return content_digest(*(one for one in (file, file.with_name(f"{file.stem}.extra.pt")) if one.exists()))


def _load_extra(file: Path, trusted: bool) -> dict[str, Any]:
    try:
        extra: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=not trusted)
    except OSError as error:
        raise JobkitError(f"{file}, which belongs to the weights, cannot be read: {error.strerror}") from None
    except pickle.UnpicklingError:
        if trusted:
            raise
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        raise JobkitError(
            f"{file} holds objects that could run code when they are read ({', '.join(names)}): "
            "load_weights(..., trusted=True) if you know where it comes from"
        ) from None
    return extra


def _find(path: Path, name: str) -> Path:
    for file in (path, path / f"{name}.safetensors", path / "final" / f"{name}.safetensors"):
        if file.is_file():
            return file
    there = sorted({file.stem for folder in (path, path / "final") for file in folder.glob("*.safetensors")})
    has = f"it has {', '.join(there)}" if there else "has the run finished?"
    raise JobkitError(f"{path} has no exported weights of {name!r}: {has}")


def _write(final: Path, write: Callable[[Path], object]) -> tuple[Path, Path]:
    """Write what is to be `final` under a name beside it, durably: both names."""
    temporary = final.with_name(f".{final.name}.tmp")
    temporary.unlink(missing_ok=True)  # of an attempt that was killed: it may be one that nobody else can read
    temporary.touch()
    permissions = temporary.stat().st_mode & 0o777  # what the umask leaves
    write(temporary)
    temporary.chmod(permissions)  # safetensors makes a file that nobody else can read
    fsync_file(temporary)
    return temporary, final


def _is_storable(tensor: torch.Tensor) -> bool:
    """Whether safetensors has the tensor's dtype."""
    from safetensors.torch import save

    try:
        save({"": torch.empty(0, dtype=tensor.dtype)})
    except Exception:
        return False
    return True


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that share no memory, as safetensors demands: views of one buffer are written each for itself."""
    seen: set[int] = set()
    found = {}
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
        found[key] = tensor.clone() if storage in seen else tensor
        if storage:
            seen.add(storage)
    return found


def _sort_metadata(path: Path) -> None:
    """Give the metadata of a safetensors file one order: the library's differs from process to process."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(text) == length:  # else it is written in another way than JSON's shortest, and stays
            file.seek(8)
            file.write(text)
