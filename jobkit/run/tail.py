"""What is being added to log files while somebody reads them."""

from __future__ import annotations

from pathlib import Path

from jobkit.run.files import is_there


class Tail:
    """Remembers how far each file has been read."""

    def __init__(self) -> None:
        self._positions: dict[Path, int] = {}

    def read(self, file: Path, whole_lines: bool = False) -> str:
        """What the file holds beyond the last call; with `whole_lines` a line without its end is left for later."""
        position = self._positions.get(file, 0)
        try:
            if not position and not is_there(file):
                return ""
            with file.open("rb") as stream:
                stream.seek(position)
                data = stream.read()
        except OSError:  # not there yet, or its file system is away for a while
            return ""
        if whole_lines:
            data = data[: data.rfind(b"\n") + 1]
        self._positions[file] = position + len(data)
        return data.decode(errors="replace")
