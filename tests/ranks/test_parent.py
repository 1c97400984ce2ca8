"""Processes that the parent starts are what a program started by itself would be."""

from __future__ import annotations

import atexit
import gzip
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.project import wait_for

from jobkit.supervisor.parents import PARENT, TASK_MODULES, WARM_PARENT, Child, Parent, ParentError

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path])}
ENVIRONMENT.pop(WARM_PARENT, None)


WATCHED = ("torch", "torch._dynamo", "threaded", "wave", "sqlite3")
"""Modules that a process says it has imported."""


# What the forked processes run


def look(file: str) -> None:
    """Write down what this process sees of itself."""
    found = {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "cwd": os.getcwd(),  # noqa: PTH109
        "environment": dict(os.environ),
        "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in open_files()),  # noqa: PTH115
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "main": threading.current_thread() is threading.main_thread(),
        "ignored": [signal.getsignal(one) is signal.SIG_IGN for one in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)],
        "imported": [name for name in WATCHED if name in sys.modules],
        "path": sys.path[:2],
    }
    Path(file).write_text(json.dumps(found))


def open_files() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            os.fstat(int(name))
        except OSError:  # the listing's own
            continue
        found.append(int(name))
    return found


def end(how: str) -> None:
    atexit.register(lambda: print("at exit", flush=True))
    print("out")
    if how == "error":
        raise ValueError("broken")
    if how.isdigit():
        raise SystemExit(int(how))
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    if how == "words":
        sys.exit("last words")
    if how == "thread":
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread done", flush=True))).start()


KEPT: list[Any] = []


def write(file: str) -> None:
    """Write to files that nobody closes: one that a module has, and one of a frame that is part of a circle."""
    KEPT.append(Path(f"{file}.kept").open("w"))  # noqa: SIM115
    KEPT[0].write("all of it")
    circle: list[Any] = [gzip.open(f"{file}.gz", "wt")]  # noqa: SIM115
    circle.append(circle)
    circle[0].write("all of it")


def wait_for_signal(file: str) -> None:
    """Say that it runs, and end with 75 at a SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
    Path(file).write_text(str(os.getpid()))
    while True:
        time.sleep(10)


def wait_for_notice(shell: str) -> None:
    """Become a shell that runs this line."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    os.execv("/bin/bash", ["bash", "-c", shell])


SAVES = """\
import os, signal, sys, time
from pathlib import Path

def save(number, frame):
    Path("told").write_text(signal.Signals(number).name)
    while not Path("go").exists():
        time.sleep(0.02)
    Path("saved").touch()
    sys.exit(75)

for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, save)
Path("new").write_text(str(os.getpid()))
Path("new").rename("ready")
while True:
    time.sleep(10)
"""

TRAINS = """\
import os, time
from pathlib import Path

Path("new").write_text(str(os.getpid()))
Path("new").rename("ready")
time.sleep(600)
"""


def wrap(program: str) -> None:
    """Become a shell that waits for a program and something that reads it, and has more to do after that."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.execv("/bin/sh", ["sh", "-c", '"$0" -c "$1" | cat; sleep 600; touch on', sys.executable, program])


def become(file: str) -> None:
    os.execv("/bin/sh", ["sh", "-c", f"readlink /proc/$$/fd/* >{file}; exit 4"])


class Forks:
    """A client, and forks whose output goes to files of a folder."""

    def __init__(self, client: Parent, folder: Path) -> None:
        self.client, self.folder = client, folder

    def fork(self, function: str, *arguments: str, files: tuple[int, ...] = (), **variables: str) -> Child:
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            return self.client.fork(
                (f"ranks.test_parent:{function}", list(arguments)),
                [out.fileno(), err.fileno(), *files],
                environment=ENVIRONMENT | variables,
                cwd=str(self.folder),
            )

    def returncode(self, child: Child) -> int:
        wait_for(f"the end of {child}", lambda: self.client.poll(child) is not None)
        code = self.client.poll(child)
        assert code is not None
        return code

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()


@contextmanager
def started(preload: tuple[str, ...] = (), **variables: str) -> Iterator[Parent]:
    client = Parent.start(ENVIRONMENT | variables, preload)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(scope="module")
def client() -> Iterator[Parent]:
    with started() as one:
        yield one


@pytest.fixture
def forks(client: Parent, tmp_path: Path) -> Forks:
    return Forks(client, tmp_path)


def lives(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("how", "code"),
    [("return", 0), ("75", 75), ("error", 1), ("words", 1), ("SIGKILL", -9), ("SIGSEGV", -11), ("thread", 0)],
)
def test_a_rank_ends_as_a_program_does(forks: Forks, how: str, code: int) -> None:
    assert forks.returncode(forks.fork("end", how)) == code
    assert ("Traceback" in forks.text("err") and "ValueError: broken" in forks.text("err")) == (how == "error")
    assert ("last words" in forks.text("err")) == (how == "words")
    if code >= 0:
        printed = ["out", "thread done", "at exit"] if how == "thread" else ["out", "at exit"]
        assert forks.text("out").splitlines() == printed


def test_what_a_rank_has_written_is_in_files_that_it_did_not_close(forks: Forks) -> None:
    assert forks.returncode(forks.fork("write", "file")) == 0, forks.text("err")
    assert forks.text("file.kept") == "all of it"
    assert gzip.decompress((forks.folder / "file.gz").read_bytes()) == b"all of it"


def test_a_rank_has_an_environment_a_folder_a_session_and_files_of_its_own(forks: Forks) -> None:
    with (forks.folder / "lock").open("w") as lock:
        rank = forks.fork("look", "seen.json", files=(lock.fileno(),), JOBKIT_PROCID="3")
    assert forks.returncode(rank) == 0, forks.text("err")
    seen = json.loads(forks.text("seen.json"))
    assert seen["pid"] == seen["session"] == rank.pid
    assert seen["cwd"] == str(forks.folder)
    assert seen["cwd"] not in seen["path"], "its files must not hide modules of jobkit's before there is the snapshot"
    parent = seen["environment"].pop(PARENT)
    assert seen["environment"] == ENVIRONMENT | {"JOBKIT_PROCID": "3"}
    assert seen["main"]
    assert seen["threads"] == 1
    assert seen["ignored"] == [True] * 3
    names = sorted(["/dev/null", *(str(forks.folder / name) for name in ("err", "lock", "out"))])
    assert seen["files"] == names, f"nothing of the parent's, {parent}, is open"


def test_the_files_of_a_rank_outlive_an_exec(forks: Forks) -> None:
    with (forks.folder / "lock").open("w") as lock:
        rank = forks.fork("become", "seen", files=(lock.fileno(),))
    assert forks.returncode(rank) == 4
    assert str(forks.folder / "lock") in forks.text("seen").splitlines()


def test_signals_reach_a_rank_and_its_end_is_told(forks: Forks) -> None:
    rank = forks.fork("wait_for_signal", "ready")
    wait_for("a rank with a handler", (forks.folder / "ready").exists)
    assert forks.client.poll(rank) is None
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGTERM)
    assert forks.returncode(rank) == 75


def test_an_environment_of_a_megabyte_arrives(forks: Forks) -> None:
    variables = {f"LARGE_{number}": "x" * 100_000 for number in range(10)}
    assert forks.returncode(forks.fork("look", "seen.json", **variables)) == 0
    assert json.loads(forks.text("seen.json"))["environment"]["LARGE_9"] == "x" * 100_000


def test_many_ranks_end_at_once_and_each_end_is_told(forks: Forks) -> None:
    ranks = [forks.fork("end", str(number)) for number in range(20)]
    assert [forks.returncode(rank) for rank in ranks] == list(range(20))


@pytest.mark.parametrize("how", ["told", "killed"])
def test_a_rank_has_not_ended_while_what_its_shell_waited_for_saves(forks: Forks, how: str) -> None:
    rank = forks.fork("wrap", SAVES)
    wait_for("a program with a handler", (forks.folder / "ready").exists)
    assert rank.pid is not None
    if how == "told":
        forks.client.signal("TERM", [rank])
    else:
        os.kill(rank.pid, signal.SIGTERM)  # as Slurm does, where it signals all processes of a step
    wait_for("the program to be told", (forks.folder / "told").exists)
    if how == "killed":
        wait_for("the end of the shell", lambda: not lives(rank.pid))
    assert forks.client.poll(rank) is None
    (forks.folder / "go").touch()
    assert forks.returncode(rank) == -signal.SIGTERM
    assert (forks.folder / "saved").exists()


def test_what_saves_too_long_is_killed_with_its_rank(forks: Forks) -> None:
    rank = forks.fork("wrap", SAVES)
    wait_for("a program with a handler", (forks.folder / "ready").exists)
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGTERM)
    wait_for("the program to be told", (forks.folder / "told").exists)
    forks.client.signal("KILL", [rank])
    assert forks.returncode(rank) == -signal.SIGTERM
    wait_for("the end of the program", lambda: not lives(int(forks.text("ready"))))


@pytest.mark.parametrize("program", [SAVES, TRAINS])
def test_what_a_shell_has_started_ends_when_the_parent_has_died(tmp_path: Path, program: str) -> None:
    with started() as client:
        forks = Forks(client, tmp_path)
        rank = forks.fork("wrap", program)
        wait_for("the program", (tmp_path / "ready").exists)
        assert client.process is not None
        client.process.kill()
        if program == SAVES:
            wait_for("the program to be told", (tmp_path / "told").exists)
            wait_for("the end of the shell", lambda: not lives(rank.pid))
            assert forks.client.poll(rank) is None, "it has not ended while it saves"
            (tmp_path / "go").touch()
        assert forks.returncode(rank) == -signal.SIGKILL
        assert (tmp_path / "saved").exists() == (program == SAVES)
        assert not lives(int(forks.text("ready")))


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_ranks_get_sigterm_when_their_parent_ends(tmp_path: Path, how: str) -> None:
    client = Parent.start(ENVIRONMENT)
    forks = Forks(client, tmp_path)
    rank = forks.fork("wait_for_signal", "ready")
    wait_for("a rank with a handler", (tmp_path / "ready").exists)
    if how == "closed":
        client.close()
        wait_for("the rank to be gone", lambda: not lives(rank.pid))
        return
    assert client.process is not None
    client.process.kill()
    assert forks.returncode(rank) == -signal.SIGKILL, "nobody knows how it ended"
    assert not lives(rank.pid)
    with pytest.raises(ParentError, match="ended with exit code -9"):
        forks.fork("end", "0")
    client.close()


def test_a_module_that_cannot_be_imported_is_an_error_of_the_first_fork(tmp_path: Path) -> None:
    with started(("no_such_module",)) as client, pytest.raises(ParentError, match="exit code 1"):
        Forks(client, tmp_path).fork("end", "0")


def test_a_parent_whose_import_hangs_is_not_ready_and_can_be_ended(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)\n")
    path = f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    with started(("hangs",), PYTHONPATH=path) as client, started() as other:
        wait_for("a parent without such a module", other.is_ready)
        assert not client.is_ready()
        client.kill()
    with started(("no_such_module",)) as client, pytest.raises(ParentError, match="exit code 1"):
        wait_for("an error", client.is_ready)


def test_the_modules_of_a_task_start_no_thread_and_touch_no_device(tmp_path: Path) -> None:
    # As where a user's shell does not say how many threads to use: OpenBLAS would start one for each core.
    with started(TASK_MODULES, OMP_NUM_THREADS="4") as client:
        forks = Forks(client, tmp_path)
        assert forks.returncode(forks.fork("look", "seen.json")) == 0, forks.text("err")
        seen = json.loads(forks.text("seen.json"))
        assert seen["imported"] == ["torch", "torch._dynamo"]
        assert client.process is not None
        assert len(list(Path(f"/proc/{client.process.pid}/task").iterdir())) == 1
        opened = [str(file.readlink()) for file in Path(f"/proc/{client.process.pid}/fd").iterdir()]
        assert not [name for name in opened if name.startswith("/dev/") and name != "/dev/null"]


def test_after_a_module_that_starts_a_thread_each_rank_is_a_new_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    path = f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    with started(("json", "threaded", "wave"), PYTHONPATH=path) as client:
        forks = Forks(client, tmp_path)
        assert forks.returncode(forks.fork("look", "seen.json")) == 0, forks.text("err")
        assert forks.returncode(forks.fork("end", "3")) == 3
    seen = json.loads(forks.text("seen.json"))
    assert (seen["threads"], "threaded" in seen["imported"], seen["ignored"]) == (1, False, [True] * 3)
    assert caplog.text.count("ranks start as new processes") == 1
    assert "importing threaded has started a thread" in caplog.text


def test_a_warm_parent_serves_each_client_by_one_of_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with ExitStack() as stack:
        warm = stack.enter_context(started(("wave",)))
        warm.listen(path)
        clients = [stack.enter_context(started(**{WARM_PARENT: path, "WHOSE": str(number)})) for number in range(2)]
        assert [client.process for client in clients] == [None, None]
        for number, client in enumerate(clients):
            folder = tmp_path / str(number)
            folder.mkdir()
            forks = Forks(client, folder)
            assert forks.returncode(forks.fork("end", str(number + 3))) == number + 3
        other = stack.enter_context(started(**{WARM_PARENT: path, "OMP_NUM_THREADS": "2"}))
        assert other.process is not None, "libraries that were imported for one thread are no good for two"
        gone = stack.enter_context(started(**{WARM_PARENT: f"{path}.gone"}))
        assert gone.process is not None

        folder = tmp_path / "left"
        folder.mkdir()
        rank = Forks(clients[0], folder).fork("wait_for_signal", "ready")
        wait_for("a rank with a handler", (folder / "ready").exists)
        clients[0].close()
        wait_for("the rank to be gone with its client", lambda: not lives(rank.pid))


def test_what_ranks_have_imported_is_imported_before_the_next_fork_but_for_what_starts_a_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(thread)
    (tmp_path / "deadly.py").write_text("raise SystemExit('no')\n")
    (tmp_path / "placed").mkdir()  # as Lightning's rank_zero_only: wrong in a parent
    (tmp_path / "placed/__init__.py").write_text("import os\n\nRANK = os.environ.get('LOCAL_RANK', '0')\n")
    (tmp_path / "placed/more.py").write_text("from . import RANK\n")
    (tmp_path / "innocent.py").write_text("import placed\n")
    (tmp_path / "copying.py").write_text("import os\n\nRANK = os.environ.copy().get('LOCAL_RANK', '0')\n")
    (tmp_path / "locked.py").write_text("import multiprocessing\n\nLOCK = multiprocessing.Lock()\n")
    (tmp_path / "deaf.py").write_text("import signal\n\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n")
    (tmp_path / "writing.py").write_text(f"LOG = open({str(tmp_path / 'writing.log')!r}, 'w')\n")
    path = f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    with started(PYTHONPATH=path) as client:
        forks = Forks(client, tmp_path)
        bad = ["deadly", "placed", "placed.more", "innocent", "locked", "deaf", "writing", "copying"]
        client.preload(["wave", "threaded", *bad, "no_such_module", "sqlite3"])
        client.preload(["wave"])  # again, as after each look
        wait_for("the trial", lambda: client.update() or "no_such_module" in caplog.text)
        assert forks.returncode(forks.fork("look", "seen.json")) == 0, forks.text("err")
        assert client.process is not None
        assert len(list(Path(f"/proc/{client.process.pid}/task").iterdir())) == 1
    seen = json.loads(forks.text("seen.json"))
    assert seen["imported"] == ["wave", "sqlite3"]
    assert "only in each rank, because it starts a thread: threaded" in caplog.text
    assert "because it cannot be imported (SystemExit: no): deadly" in caplog.text
    assert "because it reads LOCAL_RANK, which differs from rank to rank: placed, placed.more, innocent" in caplog.text
    assert "because it copies the environment, which differs from rank to rank: copying" in caplog.text
    assert "because it makes a lock of multiprocessing, which all ranks would share: locked" in caplog.text
    assert "because it installs a signal handler: deaf" in caplog.text
    assert "writing.log open: writing" in caplog.text


def test_a_notice_ends_nothing_that_does_not_catch_it(tmp_path: Path) -> None:
    catches = "trap 'exit 3' USR2; touch ready; until [ -e end ]; do sleep 0.1; done"
    hidden = f'setsid bash -c "{catches}"; [ $? = 3 ] && touch told; until [ -e end ]; do sleep 0.1; done'
    with started() as client:
        forks = Forks(client, tmp_path)
        plain = forks.fork("wait_for_notice", "until [ -e end ]; do sleep 0.1; done")
        client.signal("USR2", [plain])  # nobody catches it
        catching = forks.fork("wait_for_notice", hidden)
        wait_for("the trap", (tmp_path / "ready").exists)
        assert client.told is None  # else what it does from here on would count as told
        client.signal("USR2", [plain, catching])
        wait_for("what its shell has started", (tmp_path / "told").exists)
        (tmp_path / "end").touch()
        assert (forks.returncode(plain), forks.returncode(catching)) == (0, 0)
        assert client.told == signal.SIGUSR2
