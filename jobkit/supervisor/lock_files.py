"""Lock files that all users of a machine share: a folder of them, who holds one, and who has signed it.

A user of a device holds a shared flock on its file, which the kernel releases when the user's last process is gone; a
process that can lock it exclusively has it for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jobkit.log import log
from jobkit.run.processes import lives

FOLDER = "JOBKIT_DEVICES_DIR"
"""Environment variable with the folder of the lock files, where /tmp/jobkit-devices is not the whole machine's."""

TAKING = "deciding.lock"
"""The lock file that is held while devices are taken."""

TAKING_SECONDS = 5.0
"""How long that lock is waited for: it is held for an instant, unless its holder, of whichever user, is stopped."""

SIGNATURE_BYTES = 65536
"""How much of a lock file is read: any user may write into it."""


def folder(environ: Mapping[str, str]) -> Path:
    """Where this machine's lock files are: not below TMPDIR, which differs from user to user."""
    return Path(environ.get(FOLDER, "/tmp/jobkit-devices"))


def make(path: Path) -> None:
    """The folder, unless it is there: everybody's whatever the umask is, as /tmp; it appears with all permissions."""
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    os.close(open_for_all(temporary / TAKING))
    temporary.chmod(0o1777)
    try:
        temporary.rename(path)
    except OSError:  # another process was quicker
        shutil.rmtree(temporary)
        if not path.is_dir():
            raise


def open_for_all(path: Path) -> int:
    """An open file that every user may lock and write."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(FileNotFoundError):
        # Without O_CREAT: in a sticky folder Linux refuses that for somebody else's file (fs.protected_regular).
        return os.open(path, flags)
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, flags)
    os.fchmod(file, 0o666)
    return file


@contextlib.contextmanager
def taking(path: Path) -> Iterator[None]:
    """Nobody else on this machine takes a device meanwhile, unless who does stands still: then both go on."""
    make(path)
    file = open_for_all(path / TAKING)
    deadline = time.monotonic() + TAKING_SECONDS
    try:
        while not try_lock(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                log.warning("%s is held by %s; devices are taken without it", path / TAKING, _lock_holder(file))
                break
            time.sleep(0.02)
        yield
    finally:
        os.close(file)


def try_lock(file: int, kind: int) -> bool:
    """Lock an open file, unless others' locks keep it from that."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold_alone(lock: Path) -> int | None:
    """The open lock file of a device that nobody had; None where somebody has it."""
    file = open_for_all(lock)
    if try_lock(file, fcntl.LOCK_EX):
        os.ftruncate(file, 0)  # what earlier users wrote
        if try_lock(file, fcntl.LOCK_SH):  # for others to join; Linux exchanges the one for the other without a gap
            return file
    os.close(file)
    return None


def join(lock: Path) -> int | None:
    """The open lock file of a device that is used; None where another process is just taking it for itself."""
    file = open_for_all(lock)
    if try_lock(file, fcntl.LOCK_SH):
        return file
    os.close(file)
    return None


def is_free(lock: Path) -> bool:
    """Whether nobody has a device. Nothing is written."""
    try:
        file = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:  # it is no lock file of ours
        return False
    try:
        return try_lock(file, fcntl.LOCK_EX)
    finally:
        os.close(file)


@dataclass(frozen=True)
class Holder:
    """Who has signed a lock file: anybody may write there, so it is to be shown, and believed for nothing else."""

    run: str
    """The path of its run."""
    pid: int

    @property
    def name(self) -> str:
        """The run's name, without what a terminal would take for a command."""
        return re.sub(r"[^\w.-]", "?", Path(self.run).name)


def sign(file: int, holder: Holder) -> None:
    """Write down who has a device, for whoever wants it next. Raises OSError."""
    os.write(file, (json.dumps({"run": holder.run, "pid": holder.pid}) + "\n").encode())


def holders(lock: Path) -> list[Holder]:
    """Those who signed the lock file and are still there, or the last where none is."""
    signed = []
    for line in _text(lock).splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            holder = json.loads(line)
            signed.append(Holder(str(holder["run"]), int(holder["pid"])))
    return [holder for holder in signed if lives(holder.pid)] or signed[-1:]


def _text(lock: Path) -> str:
    try:
        file = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        return os.read(file, SIGNATURE_BYTES).decode(errors="replace")
    except OSError:  # it is a folder, or has no end
        return ""
    finally:
        os.close(file)


def _lock_holder(file: int) -> str:
    """Who holds a lock, as far as the system tells: `process 123 (python, T (stopped), of user eve)`."""
    inode = os.fstat(file).st_ino
    with contextlib.suppress(OSError, ValueError, KeyError):  # not Linux, or gone by now
        for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
                about = Path(f"/proc/{words[4]}/status").read_text(encoding="utf-8", errors="replace").splitlines()
                known = dict(one.split(":\t", 1) for one in about if ":\t" in one)
                owner = pwd.getpwuid(int(known["Uid"].split()[0])).pw_name
                return f"process {words[4]} ({known['Name']}, {known['State']}, of user {owner})"
    return "a process that this one cannot see"
