"""New whole lines of log files that processes still write to. `logs -f` and the foreground command read by it."""

from __future__ import annotations

from pathlib import Path

from jobkit.run.files import is_there


class Tail:
    """Remembers how far each file has been read.

    tail = Tail()
    tail.read(run.rank_log(1, 0))     # ["epoch 1", "epoch 2"]
    tail.read(run.rank_log(1, 0))     # []
    """

    def __init__(self) -> None:
        self._positions: dict[Path, int] = {}

    def read(self, file: Path, *, to_the_end: bool = False) -> list[str]:
        """Return the lines since the last call. The last line may still be without its end: it is left for later,
        so that no character is divided; with `to_the_end` it is returned too."""
        position = self._positions.get(file, 0)
        try:
            if not position and not is_there(file):
                return []
            with file.open("rb") as stream:
                stream.seek(position)
                data = stream.read()
        except OSError:  # not there yet, or the file system is away for a moment
            return []
        whole = len(data) if to_the_end else data.rfind(b"\n") + 1
        # A progress bar draws itself again and again in one line: its last state counts, and is read once.
        drawn = max(0, data.rfind(b"\r", 0, -1)) if not whole else 0
        self._positions[file] = position + max(whole, drawn)
        data = data[:whole]
        lines = data.decode(errors="replace").split("\n")
        return [line.rstrip("\r").rpartition("\r")[2] for line in (lines[:-1] if not lines[-1] else lines)]
