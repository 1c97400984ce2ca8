"""Starting the daemons of a cluster, and finding them again from another process by the files in `pids/`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from .processes import ClusterError, Process, kill_until_none, wait_until


class Daemons:
    """The daemons of the cluster in `directory`; a node's slurmd has the node's name."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        self.dir = directory
        self.env = env
        self._children: list[subprocess.Popen[bytes]] = []  # to reap them

    def living(self) -> dict[str, Process]:
        """Return the living daemons by name."""
        living = {}
        for file in sorted(self.dir.glob("pids/*")):
            pid, started = map(int, file.read_text(encoding="utf-8").split() or (0, 0))
            if (process := Process.read(pid)) and process.started == started:
                living[file.name] = process
        return living

    def start(self, name: str, *command: str) -> None:
        """Start a daemon unless it lives."""
        if name in self.living():
            return
        with (self.dir / f"log/{name}.out").open("ab") as output:
            child = subprocess.Popen(
                command,
                cwd="/",
                env=self.env | {"MYSQL_UNIX_PORT": f"{self.dir}/run/database"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                umask=0o022,  # munged's socket and the spool directory are for all users
                start_new_session=True,  # Ctrl-C is for the user of the cluster
            )
        self._children.append(child)
        if process := Process.read(child.pid):
            (self.dir / "pids" / name).write_text(f"{process.pid} {process.started}", encoding="utf-8")

    def wait_for(self, name: str, ready: Callable[[], bool]) -> None:
        """Return when the daemon is ready; ClusterError if it ends."""
        wait_until(lambda: ready() or name not in self.living(), f"{name} to be ready")
        if name not in self.living():
            raise ClusterError(f"{name} has ended")

    def send(self, name: str, *signals: int) -> None:
        """Send signals to a daemon; nothing happens if it does not live."""
        if daemon := self.living().get(name):
            for number in signals:
                daemon.send(number)

    def end(self, name: str, *signals: int) -> None:
        """Send signals that end a daemon and return when it has ended."""
        self.send(name, *signals)
        wait_until(lambda: name not in self.living(), f"{name} to end")

    def kill_all(self) -> None:
        """Kill all daemons except this process, which may be the guard."""
        daemons = [daemon for daemon in self.living().values() if daemon.pid != os.getpid()]
        kill_until_none(lambda: [daemon for daemon in daemons if daemon.alive])
        for child in self._children:
            child.wait()
        self._children.clear()

    def log_tails(self) -> str:
        """Return the last lines that each daemon printed."""
        tails = (
            (file.name, file.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
            for file in sorted(self.dir.glob("log/*.out"))
        )
        return "".join(f"--- {name}\n" + "\n".join(lines) + "\n" for name, lines in tails if lines)
