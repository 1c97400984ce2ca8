"""Who uses which device of this machine: two local runs share none unless they are asked to.

A device has a lock file in a folder of the machine. All users of the device hold a shared flock on it, which the kernel
releases when their last process is gone; a process that can lock it exclusively has it for itself. One process at a
time takes devices, under a lock of their own, so that of two that want several one gets all. Runs that jobkit did not
start on this machine are not seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import InputError
from jobkit.log import log
from jobkit.run.device_kinds import SHARE, DeviceKind, of_this_machine
from jobkit.run.processes import lives

LEASES = "JOBKIT_LEASES"
"""Environment variable of a local run's supervisor: which variable names its devices, and their open lock files."""

FOLDER = "JOBKIT_DEVICES_DIR"
"""Environment variable with the folder of the lock files, where /tmp/jobkit-devices is not the whole machine's."""

TAKING = "deciding.lock"
"""The lock file that is held while devices are taken."""

TAKING_SECONDS = 5.0
"""How long that lock is waited for: it is held for an instant, unless its holder, of whichever user, is stopped."""

FORMER_RANKS_SECONDS = 30.0
"""How long to wait for ranks of the same run whose supervisor was killed: they write a last checkpoint, as within
Slurm's KillWait, 30 s by default."""


@dataclass(frozen=True)
class Leases:
    """Devices that a run has, by the names that `variable` takes, and their open lock files."""

    variable: str = ""
    devices: tuple[str, ...] = ()
    files: tuple[int, ...] = ()

    @classmethod
    def inherited(cls, environ: Mapping[str, str]) -> Leases:
        """Those that the process which started this one took for it."""
        variable, _, files = environ.get(LEASES, "").partition(":")
        if not files:
            return cls()
        return cls(variable, tuple(environ[variable].split(",")), tuple(map(int, files.split(","))))

    @property
    def environment(self) -> dict[str, str]:
        """What a supervisor is started with, beside the open files."""
        if not self.devices:
            return {}
        files = ",".join(map(str, self.files))
        return {self.variable: ",".join(self.devices), LEASES: f"{self.variable}:{files}"}

    def of_rank(self, rank: int, per_node: int, each: int) -> tuple[dict[str, str], tuple[int, ...]]:
        """A rank's environment, and the open lock files of its own devices.

        It sees all devices of its node, as every program for several GPUs expects: LOCAL_RANK chooses among them, and
        NCCL sends from one to another directly. Its own are `each`, from LOCAL_RANK x `each` on.
        """
        if not self.devices:
            return {}, ()
        first = rank - rank % per_node
        of_node, own = slice(first * each, (first + per_node) * each), slice(rank * each, (rank + 1) * each)
        return {self.variable: ",".join(self.devices[of_node])}, self.files[own]

    def sign(self, run: Path, pid: int) -> None:
        """Write down who has the devices, for whoever wants them next."""
        for file in self.files:
            os.write(file, (json.dumps({"run": str(run), "pid": pid}) + "\n").encode())

    def close(self) -> None:
        """Leave the devices to the processes that were given the open files."""
        for file in self.files:
            os.close(file)


def take(device: str, count: int, run: Path, environ: Mapping[str, str]) -> Leases:
    """Devices for the local run of a directory: `count` free ones of those that `environ` allows.

    Args:
        device: the YAML's; for `cpu`, and where only the driver knows which devices there are, there are no leases.
        count: how many; with JOBKIT_SHARE_DEVICES=1 in `environ` used ones, too, where too few are free.

    Raises InputError, naming who has them and what to do.
    """
    kind, devices = of_this_machine(device, environ)
    if count == 0 or kind.visible is None or devices is None:
        return Leases()
    folder = Path(environ.get(FOLDER, "/tmp/jobkit-devices"))  # TMPDIR differs from user to user
    locks = [folder / re.sub(r"[^\w.-]", "_", name) for name in physical_names(kind, devices, environ)]
    started, said = time.monotonic(), False
    while True:
        try:
            files, holders = _take(locks, count, share=environ.get(SHARE) == "1")
        except OSError as error:
            raise InputError(f"{folder}: {error.strerror}; set {FOLDER} to a folder for all") from None
        if files:
            return Leases(kind.visible, tuple(devices[number] for number in files), tuple(files.values()))
        own = any(holder["run"] == str(run) for found in holders.values() for holder in found)
        if not own or time.monotonic() - started > FORMER_RANKS_SECONDS:
            raise InputError(_refusal(kind, count, devices, holders))
        if not said:
            print(f"waiting for the last ranks of {run.name} to leave their devices", file=sys.stderr)
            said = True
        time.sleep(0.2)


def _refusal(kind: DeviceKind, count: int, devices: Sequence[str], holders: Holders) -> str:
    used = []
    for number, found in holders.items():
        who = " and ".join(f"process {one['pid']} for {one['run']}" for one in found)
        used.append(f"{devices[number]} is used by {who or 'another run'}")
    return (
        f"resources: {count} {kind.name} device(s) are needed, and {len(devices) - len(used)} of the {len(devices)} "
        f"visible are free ({'; '.join(used)}): wait, let {kind.visible} name others, or set {SHARE}=1 to share them"
    )


# Names


def physical_names(kind: DeviceKind, devices: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """A name for each device that does not depend on how the environment numbers them: its UUID where that is told."""
    if kind.name != "cuda":
        return [f"{kind.name}-{device}" for device in devices]
    return _cuda_names(devices, _ask_driver(), by_bus=environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")


def _cuda_names(devices: Sequence[str], gpus: Sequence[tuple[str, str]], by_bus: bool) -> list[str]:
    """The UUIDs of CUDA's devices, given as numbers, as UUIDs or as the beginnings of UUIDs, which CUDA takes too.

    `gpus` are (UUID, model) in the order of the PCI bus. CUDA numbers devices so where it is asked to (`by_bus`), else
    by speed; on a machine with one model both are the same. A number whose device cannot be told, and a MIG instance,
    is its own name.
    """
    uuids = [uuid for uuid, _ in gpus]
    in_order = by_bus or len({model for _, model in gpus}) == 1
    names = []
    for device in devices:
        if device.isdigit():
            known = in_order and int(device) < len(uuids)
            names.append(uuids[int(device)] if known else f"cuda-{device}")
        else:
            matching = [uuid for uuid in uuids if uuid.startswith(device)]
            names.append(matching[0] if len(matching) == 1 else device)
    return names


def _ask_driver() -> list[tuple[str, str]]:
    """(UUID, model) of each NVIDIA GPU in the order of the PCI bus, hidden ones too; none without a driver."""
    import pynvml  # here: only a local run on NVIDIA's GPUs needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # its library is part of the driver
        return []
    try:
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [(pynvml.nvmlDeviceGetUUID(gpu), pynvml.nvmlDeviceGetName(gpu)) for gpu in gpus]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


# Lock files

Holders = Mapping[int, Sequence[Mapping[str, str]]]
"""By a device's number: {run, pid} of each user."""


def _take(locks: Sequence[Path], count: int, share: bool) -> tuple[dict[int, int], Holders]:
    """The open lock files of the devices that were taken, by number, or who has those that are not free."""
    taken: dict[int, int] = {}
    used = []
    with _taking(locks[0].parent):
        for number, lock in enumerate(locks):
            if len(taken) < count:
                file = _hold_alone(lock)
                if file is None:
                    used.append(number)
                else:
                    taken[number] = file
        for number in used if share else ():
            if len(taken) < count and (file := _join(locks[number])) is not None:
                taken[number] = file
        if len(taken) == count:
            return dict(sorted(taken.items())), {}
        for file in taken.values():
            os.close(file)
        return {}, {number: _holders(locks[number]) for number in used}


@contextlib.contextmanager
def _taking(folder: Path) -> Iterator[None]:
    """Nobody else on this machine takes a device meanwhile, unless who does stands still: then both go on."""
    if not folder.is_dir():
        _make(folder)
    file = _open(folder / TAKING)
    deadline = time.monotonic() + TAKING_SECONDS
    try:
        while not _lock(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                log.warning("%s is held by %s; devices are taken without it", folder / TAKING, _lock_holder(file))
                break
            time.sleep(0.02)
        yield
    finally:
        os.close(file)


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_holder(file: int) -> str:
    """Who holds a lock, as far as the system tells: `process 123 (python, T (stopped), of user eve)`."""
    inode = os.fstat(file).st_ino
    with contextlib.suppress(OSError, ValueError, KeyError):  # not Linux, or gone by now
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
                about = Path(f"/proc/{words[4]}/status").read_text().splitlines()
                known = dict(one.split(":\t", 1) for one in about if ":\t" in one)
                owner = pwd.getpwuid(int(known["Uid"].split()[0])).pw_name
                return f"process {words[4]} ({known['Name']}, {known['State']}, of user {owner})"
    return "a process that this one cannot see"


def _make(folder: Path) -> None:
    """The folder, everybody's whatever the umask is, as /tmp; it appears with all permissions."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    os.close(_open(temporary / TAKING))
    temporary.chmod(0o1777)
    try:
        temporary.rename(folder)
    except OSError:  # another process was quicker
        shutil.rmtree(temporary)
        if not folder.is_dir():
            raise


def _open(path: Path) -> int:
    """An open file that every user may lock and write."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        # Without O_CREAT: in a sticky folder Linux refuses that for somebody else's file (fs.protected_regular).
        return os.open(path, flags)
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, flags)
    os.fchmod(file, 0o666)
    return file


def _hold_alone(lock: Path) -> int | None:
    """The open lock file of a device that nobody had; None where somebody has it."""
    file = _open(lock)
    if _lock(file, fcntl.LOCK_EX):
        os.ftruncate(file, 0)  # what earlier users wrote
        if _lock(file, fcntl.LOCK_SH):  # for others to join; Linux exchanges the one for the other without a gap
            return file
    os.close(file)
    return None


def _join(lock: Path) -> int | None:
    """The open lock file of a device that is used; None where another process is just taking it for itself."""
    file = _open(lock)
    if _lock(file, fcntl.LOCK_SH):
        return file
    os.close(file)
    return None


def _holders(lock: Path) -> list[dict[str, str]]:
    """{run, pid} of those who signed the lock file and are still there, or of the last where none is."""
    signed = []
    for line in lock.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError):
            holder = json.loads(line)
            signed.append({"run": str(holder["run"]), "pid": str(int(holder["pid"]))})
    return [holder for holder in signed if lives(int(holder["pid"]))] or signed[-1:]
