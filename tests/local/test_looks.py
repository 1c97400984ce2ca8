"""A file system that is away for some seconds: commands that wait for runs go on, and a sweep starts its runs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from harness.runs import Project, wait_until, with_params

AWAY_SECONDS = 3.0
"""Each of the commands looks several times meanwhile."""

STALE = """
import errno, os, pathlib
def look(event, arguments):
    path = os.fspath(arguments[0]) if event in ("open", "os.listdir", "os.scandir") and arguments[0] else ""
    if isinstance(path, str) and path.startswith({runs!r}) and {part!r} in path and os.path.exists({flag!r}):
        pathlib.Path({seen!r}, str(os.getpid())).touch()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
sys.addaudithook(look)

import time
def pause(seconds, sleep=time.sleep):
    pathlib.Path({paused!r}, str(os.getpid())).touch()
    sleep(seconds)
time.sleep = pause
"""
"""Lines of Python that let each look at a file of a run fail, as a file server that is started anew; and note each
process that pauses between its looks."""


class Server:
    """A file server that commands of a project depend on, and the runs themselves do not."""

    def __init__(self, project: Project, part: str = "/runs") -> None:
        self.flag, self.seen, self.paused = (project.folder / name for name in ("away", "seen", "paused"))
        self.seen.mkdir()
        self.paused.mkdir()
        paths = {"flag": str(self.flag), "seen": str(self.seen), "paused": str(self.paused)}
        project.begin_with("jobkit", STALE.format(**paths, runs=str(project.folder / "runs"), part=part))

    @contextmanager
    def away(self, *processes: subprocess.Popen[str]) -> Iterator[None]:
        """Be away within the block. First each of these has begun to wait for its run: a command that is still looking
        for its run is refused, and may be typed again."""
        for process in processes:
            wait_until(lambda it=process: it.poll() is not None or (self.paused / str(it.pid)).exists(), "a pause")  # type: ignore[misc]
        self.flag.touch()
        yield
        self.flag.unlink()

    def outlast(self, *processes: subprocess.Popen[str]) -> None:
        """Stay away until each of these has looked, and for some seconds more: none of them ends of it. Asked here, as
        one that sees the end of its run may end as soon as the server is back."""
        for process in processes:
            wait_until(lambda it=process: it.poll() is not None or (self.seen / str(it.pid)).exists(), "a failed look")  # type: ignore[misc]
        time.sleep(AWAY_SECONDS)
        assert {str(process.args): process.poll() for process in processes if process.poll() is not None} == {}


def test_commands_that_wait_for_a_run_go_on_while_the_disk_is_away(project: Project) -> None:
    server = Server(project)
    params = with_params({"steps": 10**6, "save_waits": True})
    submit = ["submit", str(project.yaml), "--local", *params]
    foreground = project.start(*submit)
    launch = project.only_run().wait_for_step(5)
    name = launch.run.name
    follow = project.start(*submit, "--follow")
    wait_until(lambda: "running, attempt 1" in str(follow.stdout and follow.stdout.readline()), "the run")
    verbs = [["wait", name], ["logs", "-f", name], ["preempt", name]]
    processes = {words[0]: project.start(*words) for words in verbs} | {"foreground": foreground, "follow": follow}
    watch = project.start("list", "--watch", "0.5")
    assert watch.stdout is not None and "STATE" in watch.stdout.readline()
    wait_until(lambda: launch.run.request("preempt"), "the preemption")
    with server.away(*processes.values(), watch):
        server.outlast(*processes.values(), watch)
    launch.end_save()
    assert processes.pop("preempt").wait() == 0
    assert launch.causes == ["preempted"]
    launch.wait_for_attempt(2).end_training().wait_until_over()
    assert {verb: process.wait() for verb, process in processes.items()} == dict.fromkeys(processes, 0)
    watch.kill()


def test_a_cancel_goes_on_while_the_disk_is_away(project: Project) -> None:
    server = Server(project)
    launch = project.submit("--local", "--detach", steps=10**6, save_waits=True).wait_for_step(5)
    cancel = project.start("cancel", launch.run.name)
    wait_until(lambda: launch.run.request("cancel"), "the request")
    with server.away(cancel):
        server.outlast(cancel)
    launch.end_save()
    assert cancel.wait() == 0
    assert launch.status.state == "cancelled"


@pytest.mark.parametrize("part", ["/runs", ".submit", ".probe"])
def test_a_sweep_starts_its_runs_after_the_disk_was_away(project: Project, part: str) -> None:
    """The looks at a run that ends fail, the lock of the next one, or the test whether its folder can be written."""
    server = Server(project, part)
    loop = project.start("submit", str(project.yaml), "--local", "params.steps=100000", "--sweep", "seed=0,1")
    first = project.only_run().wait_for_step(5)
    with server.away(loop):
        first.end_training().wait_until_over()
        server.outlast(loop)
        assert list(first.run.path.parent.glob("*-*/config.yaml")) == [first.run.config_file]
    second = project.only_run(first).wait_for_step(5)
    with server.away():
        loop.send_signal(signal.SIGINT)
        server.outlast()
    assert loop.wait() == 75
    assert (first.causes, second.causes) == (["finished"], ["stopped"])
