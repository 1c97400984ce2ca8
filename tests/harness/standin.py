"""tests/standin_device, built: a device that jobkit knows by an entry point, and torch by a package."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from filelock import FileLock

FOLDER = Path(__file__).parents[1] / "standin_device"
BUILT = Path(__file__).parents[2] / "build" / "standin"


def environment() -> dict[str, str]:
    """Variables with which the package is installed for a process; skips the test where no compiler is."""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")])),
        "STANDIN_LIBRARY": str(_library()),
    }


def _library() -> Path:
    """The library of standin.cpp for this torch: built once, in about 15 s."""
    source, compiler = FOLDER / "standin.cpp", shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (apt-get install g++)")
    torch_folder = Path(torch.__file__).parent
    built_for = source.read_bytes() + f"{torch.__version__} {torch_folder}".encode()
    library = BUILT / f"{hashlib.sha256(built_for).hexdigest()[:16]}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILT / "lock"):  # of the processes of pytest-xdist
        if not library.exists():
            unfinished = library.with_suffix(".part")
            includes = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
            libraries = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
            command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", *includes, str(source), "-o", str(unfinished)]
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}"
            subprocess.run([*command, abi, *libraries], check=True)
            unfinished.rename(library)
    return library
