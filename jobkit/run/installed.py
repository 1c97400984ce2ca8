"""Which files are Python's own and its packages', and which are the user's code."""

from __future__ import annotations

import os
import sysconfig
from functools import lru_cache
from pathlib import Path

PACKAGES = ("site-packages", "dist-packages")
"""Names of the folders of installed packages: of an environment, of a user (`pip install --user`), of Debian."""

_FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
_STANDARD_LIBRARY = tuple({one + os.sep for folder in _FOLDERS for one in (folder, os.path.realpath(folder))})


@lru_cache(maxsize=8192)
def is_installed(file: str) -> bool:
    """Whether a file or folder, by its whole path, is in the standard library or is an installed package's."""
    return file.startswith(_STANDARD_LIBRARY) or any(one in PACKAGES for one in Path(file).parts)
