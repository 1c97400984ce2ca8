"""A mount whose file server never answers: a process that is killed while it looks at a file there stays, in state D.

    with dead_mount() as folder:
        subprocess.Popen(["cat", folder / "file"]).kill()    # lives until the end of the block

The kernel speaks FUSE to a program (`python dead_mount.py FOLDER`) that answers its first question alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

INIT = 26


@contextlib.contextmanager
def dead_mount() -> Iterator[Path]:
    """Return a folder, not within one that pytest looks at; skip the test where this user may mount nothing."""
    folder = tempfile.mkdtemp()
    program = subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    if program.stdout.readline() != "mounted\n":
        pytest.skip("this user may mount nothing with FUSE")
    try:
        yield Path(folder)
    finally:
        program.kill()  # the kernel's questions fail then, and processes in state D end
        program.wait()
        subprocess.run(["umount", "--lazy", folder], check=True)


def _serve(folder: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"dead", folder.encode(), b"fuse.dead", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")
    print("mounted", flush=True)
    while True:
        _, question, unique = struct.unpack_from("<IIQ", os.read(device, 1 << 20))
        if question == INIT:
            answer = struct.pack("<IIIIHHI", 7, 31, 65536, 0, 1, 1, 4096).ljust(64, b"\0")  # fuse_init_out
            os.write(device, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)


if __name__ == "__main__":
    _serve(sys.argv[1])
