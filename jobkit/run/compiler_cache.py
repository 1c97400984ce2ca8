"""What torch.compile, Triton and CUDA have compiled: on the node's own disk, from and for the run directory.

A folder of this user's for each run, version of its code and of torch, and kind of processor. The first process of a
node fills it from the run directory, where supervisor/cache_keeper.py saves it. No torch: its import reads the
variables.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from jobkit.log import log
from jobkit.run.archive import DamagedArchive, unpack
from jobkit.run.files import foreign_owner, is_there
from jobkit.run.locks import NoLocks, lock_at
from jobkit.run.rundir import RunDir

FOLDER = "JOBKIT_CACHE"
"""Environment variable of a rank with the folder; not set where there is none."""

KEEP_DAYS = 7.0
"""How long the folder of a run that nothing has used stays on a node: longer than most runs wait in a queue."""

SEED_SECONDS = 120.0
"""How long a rank waits for the one of its node that fills the folder; after it, it compiles for itself."""

_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_USED = ".used"
"""A file in the folder: it has been filled, for torch's import makes a folder too. Every rank holds it."""


def folder_of(run: RunDir, code: str) -> Path | None:
    """Where the cache of a run's code is on this node; None where there is no torch, and nothing to cache."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    # Two runs directories may have a run of the same name.
    where = hashlib.sha256(os.fsencode(run.path)).hexdigest()[:8]
    return Path(tempfile.gettempdir(), f"jobkit-{os.getuid()}", f"{run.name}-{where}@{code}-{torch}-{_machine()}")


def version(folder: Path) -> str:
    """What the run directory's archive of a folder is named by: without the run."""
    return folder.name.rpartition("@")[2]


def variables(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which compilers find the folder, but for those that the user has set."""
    own = {name for name in environ if not _is_set_by_a_program(name, environ)}
    found = {"CUDA_CACHE_PATH": str(folder / "cuda")}
    if "TORCHINDUCTOR_CACHE_DIR" not in own:  # else Triton's is in there
        found["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        found["TRITON_CACHE_DIR"] = str(folder / "triton")
    if found.keys() <= own:
        return {}
    # A compiled header is 150 MB, lies elsewhere, and would be made again on each new node.
    found["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    return {FOLDER: str(folder)} | {name: value for name, value in found.items() if name not in own}


def _is_set_by_a_program(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a variable's value is that of a rank which we are started in, or torch's own: its import exports it."""
    value = environ[name]
    ours = environ.get(FOLDER)
    if ours is not None and value.startswith(ours):
        return True
    default = Path(value).name.startswith("torchinductor_") and Path(value).parent in {
        Path("/tmp"),
        Path(tempfile.gettempdir()),
    }
    return name == "TORCHINDUCTOR_CACHE_DIR" and default


def make_root(folder: Path) -> bool:
    """Make the folder that is this user's alone, in which `folder` is to be; False, and a line, where it cannot be."""
    root = folder.parent
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()  # anybody can make a folder, or a link, of this name in /tmp
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(f"{root} belongs to somebody else")
        if found.st_mode & 0o077:
            root.chmod(0o700)
    except OSError as error:
        log.warning("no folder for what is compiled: %s; the compilers use their own", error)
        return False
    return True


def use(run: RunDir) -> None:
    """In a rank, before torch is imported: fill the folder, unless a rank of this node has, and hold it for life.

    Where that cannot be, the variables go, and this rank compiles for itself.
    """
    if FOLDER not in os.environ:
        return
    folder = Path(os.environ[FOLDER])
    try:
        if make_root(folder):
            _fill_once(folder, run)
            return
    except (OSError, Timeout, NoLocks) as error:
        log.warning("%s cannot be used: %s; this rank compiles for itself", folder, error)
    for name in variables(folder, {}):
        if os.environ.get(name, "").startswith(str(folder)):
            del os.environ[name]


def _fill_once(folder: Path, run: RunDir) -> None:
    with _lock(folder.parent).acquire(timeout=SEED_SECONDS):
        if not (folder / _USED).exists():
            _fill(folder, run.compiled_archive(version(folder)))
            _remove_old(folder)
        else:
            _remove_torn(folder)
        os.utime(folder)
        hold(folder)


def hold(folder: Path) -> None:
    """Let nobody remove the folder while this process, or what it becomes, lives."""
    file = os.open(folder / _USED, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_SH)
    os.set_inheritable(file, True)  # a `command:` is exec'd


def _fill(folder: Path, archive: Path) -> None:
    """Make the folder, with what the archive has; whole, for another process may look at any time."""
    staging = Path(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=folder.parent))
    try:
        if is_there(archive):
            try:
                if owner := foreign_owner(archive, archive.parent.parent):
                    raise PermissionError(f"{archive} is not the run's owner's, but {owner}'s")
                unpack(archive, staging)
            except (DamagedArchive, OSError) as error:
                log.warning("what was compiled before is not used: %s", error)
                shutil.rmtree(staging)
                staging.mkdir(mode=0o700)
        (staging / _USED).touch()
        shutil.rmtree(folder, ignore_errors=True)  # of empty folders, which torch's import makes
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _remove_torn(folder: Path) -> None:
    """Remove shared objects that a killed linker has left in part; inductor would load them for ever after."""
    with contextlib.suppress(BlockingIOError), (folder / _USED).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else a living process may be writing one
        for path, size in _files(folder, torn=True):
            if path.suffix == ".so" and _is_torn(path, size):
                path.unlink(missing_ok=True)


def _is_torn(path: Path, size: int) -> bool:
    """Whether a shared object of Linux is shorter than its header says, which a linker completes at the end."""
    try:
        with path.open("rb") as file:
            header = file.read(64)
    except OSError:
        return False
    if sys.platform != "linux":
        return False
    if not header.strip(b"\0"):
        return True
    if not header.startswith(_ELF64_LITTLE_ENDIAN):
        return False
    if len(header) < 64:
        return True
    start: int = struct.unpack_from("<Q", header, 0x28)[0]  # of the table of sections, which is last
    entry, count = struct.unpack_from("<HH", header, 0x3A)
    return bool(start == 0 or size < start + entry * count)


def _remove_old(folder: Path) -> None:
    """Remove this user's folders that no process holds and no attempt has begun with for KEEP_DAYS."""
    oldest = time.time() - KEEP_DAYS * 86400
    for other in folder.parent.iterdir():
        with contextlib.suppress(OSError):
            if other != folder and other.is_dir() and other.stat().st_mtime < oldest:
                _remove(other)


def remove(folder: Path) -> None:
    """Remove a folder that nobody will need; not where a process holds it, or the disk does not let us."""
    with (
        contextlib.suppress(OSError, Timeout, NoLocks),
        _lock(folder.parent).acquire(timeout=1),
    ):  # held while a rank fills one
        _remove(folder)


def _remove(folder: Path) -> None:
    """With the lock. Raises BlockingIOError where a process holds the folder."""
    used = folder / _USED
    if used.exists():
        with used.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    shutil.rmtree(folder)


def _lock(root: Path) -> FileLock:
    """Held while a folder is filled or removed: one lock for all of them, for its file can never be removed."""
    return lock_at(root / "lock", elsewhere="let TMPDIR name another folder")


def files_in(folder: Path) -> dict[str, int]:
    """What the compilers have left in the folder, and its sizes in bytes: without what they are still writing."""
    return {str(file.relative_to(folder)): size for file, size in _files(folder)}


def _files(folder: Path, torn: bool = False) -> Iterator[tuple[Path, int]]:
    for where, subfolders, names in os.walk(folder):
        subfolders[:] = [one for one in subfolders if not one.startswith((".", "tmp.")) and one != "locks"]
        for name in names:
            if not name.startswith(".") and not name.endswith((".lock", ".tmp")):
                file = Path(where, name)
                with contextlib.suppress(OSError):  # it was a temporary one
                    found = file.lstat()
                    is_whole = torn or file.suffix != ".so" or not _is_torn(file, found.st_size)
                    if stat.S_ISREG(found.st_mode) and is_whole:
                        yield file, found.st_size


def _machine() -> str:
    """Names what machine code depends on: a compiler makes it for the very processor that it runs on."""
    flags = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    found = f"{platform.machine()} {sys.version_info[:2]} {flags}"
    return hashlib.sha256(found.encode()).hexdigest()[:8]
