"""The sweeps of a runs directory: which runs belong to one."""

from __future__ import annotations

from pathlib import Path

from jobkit.run.files import read_json

FOLDER = ".sweeps"
"""A folder in the runs directory: `.sweeps/<name>/s<N>/sweep.json` for each sweep."""


def runs_of(runs_dir: Path, sweep: str) -> list[str] | None:
    """The names of the runs of a sweep, as `digits/s1`, in its own order; None where there is no such sweep."""
    record = read_json(runs_dir / FOLDER / sweep / "sweep.json", fresh=True)
    return list(record["runs"]) if isinstance(record, dict) and isinstance(record.get("runs"), list) else None
