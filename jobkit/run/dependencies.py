"""The runs that a run comes after (`after:`): whether they let it start. It is the runs that count, not their jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit.run.files import is_there, read_json, write_atomic
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status


@dataclass(frozen=True)
class Verdict:
    """Whether a run may start."""

    unfinished: tuple[tuple[RunDir, Status], ...] = ()
    """The runs that it waits for."""
    ends: str = ""
    """Why it never may; empty where it may still."""

    @property
    def text(self) -> str:
        """As in `digits-11f5f19c (running)`."""
        states = [f"probably {status.probably}" if status.probably else status.state for _, status in self.unfinished]
        return ", ".join(f"{run.name} ({state})" for (run, _), state in zip(self.unfinished, states, strict=True))

    @property
    def are_under_way(self) -> bool:
        """Whether all that it waits for go on by themselves, as far as their journals say."""
        return all(status.state.is_under_way for _, status in self.unfinished)


def runs_before(run: RunDir, after: Sequence[str]) -> list[RunDir]:
    """The runs of `after`: names in the same runs directory, or paths."""
    return [RunDir(run.path.parent / name) for name in after]


def verdict(run: RunDir, after: Sequence[str]) -> Verdict:
    """Whether `run`, which comes after some others, may start, as their journals say now.

    Once it has begun it needs nothing more of runs that were removed or cancelled.
    """
    unfinished = []
    has_begun = bool(after) and run.exists() and bool(run.status().attempts)
    for other in runs_before(run, after):
        if has_begun and (not other.exists() or other.status().state == State.CANCELLED):
            continue
        if not other.exists():
            return Verdict(ends=f"it comes after {other.name}, which is not there any more")
        status = other.status()
        if status.state == State.CANCELLED or status.cancel_requested:
            return Verdict(ends=f"it comes after {other.name}, which was cancelled")
        if status.state != State.FINISHED:
            unfinished.append((other, status))
    return Verdict(tuple(unfinished))


# Who comes after a run, so that whoever starts or ends that run can tell them


def _folder(run: RunDir) -> Path:
    return run.path / "dependents"


def note_dependent(run: RunDir, dependent: RunDir) -> None:
    """Write down that another run comes after this one. Raises OSError, as where this one is another user's."""
    folder = _folder(run)
    folder.mkdir(exist_ok=True)
    write_atomic(folder / dependent.name, f"{dependent.path}\n", durable=False)


def dependents(run: RunDir) -> Iterator[RunDir]:
    """The runs that have said so: beside this one, where the runs directory was moved or copied since."""
    folder = _folder(run)
    for file in sorted(folder.iterdir()) if is_there(folder) else ():
        for found in (RunDir(run.path.parent / file.name), RunDir(file.read_text(encoding="utf-8").strip())):
            if found.exists() and _comes_after(found, run):
                yield found
                break


def _comes_after(run: RunDir, other: RunDir) -> bool:
    status = read_json(run.status_file)
    after = status.get("after", ()) if isinstance(status, dict) else run.status().after
    return other.path.resolve() in {one.path.resolve() for one in runs_before(run, after)}
