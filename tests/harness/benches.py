"""Run a bench of tools/bench/ in its shortest form, and read its table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BENCHES = Path(__file__).parents[2] / "tools" / "bench"
ROW = re.compile(r"^(.*\S) +(\S+) +(\S+) +(\S+) (?:s|us|times)\b", re.MULTILINE)


def table(folder: Path, bench: str, *parts: str) -> dict[str, list[float]]:
    """Return the rows of a bench by name: the least, the median and the most."""
    words = [sys.executable, str(BENCHES / f"{bench}.py"), *parts, "--quick"]
    done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return {name: list(map(float, values)) for name, *values in ROW.findall(done.stdout)}
