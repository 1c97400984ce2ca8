"""Devices of this machine: a local run has its own, and says who has those that it may not have."""

from __future__ import annotations

import fcntl
import getpass
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.processes import ranks_of
from harness.project import Project, status, wait_for

from jobkit.log import log
from jobkit.run.config import Config, Resources
from jobkit.run.device_kinds import KINDS, SHARE
from jobkit.supervisor import device_leases, lock_files
from jobkit.supervisor.device_leases import LEASES, Leases, used_by
from jobkit.supervisor.lock_files import FOLDER, TAKING
from jobkit.supervisor.needs import CPU_SLOTS, Need, need_of, physical_names

A, B, C = Path("/runs/a-1"), Path("/runs/b-2"), Path("/runs/c-3")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": "4,5", FOLDER: str(tmp_path / "devices")}


def need(environ: dict[str, str], count: int, device: str = "auto") -> Need:
    """Of a run with a rank for each of so many devices."""
    resources = Resources(tasks_per_node=count or 1, gpus_per_task=1 if count else 0)
    return need_of(Config(name="x", task="m:f", device=device, resources=resources), environ, queues=False)


def take(environ: dict[str, str], count: int, device: str = "auto") -> Leases | None:
    return device_leases.take(need(environ, count, device))


def signed(environ: dict[str, str], count: int, run: Path, pid: int = os.getpid(), device: str = "auto") -> Leases:
    leases = take(environ, count, device)
    assert leases is not None
    leases.sign(run, pid)
    return leases


def refusal(environ: dict[str, str], count: int) -> str:
    """Who has the devices that keep a run from starting."""
    assert take(environ, count) is None
    pool = need(environ, count).pools[0]
    return used_by(dict(zip(pool.names, pool.locks, strict=True)))


def test_two_runs_get_different_devices_of_those_that_are_visible(environ: dict[str, str]) -> None:
    first, second = signed(environ, 1, A), signed(environ, 1, B)
    assert (first.devices, second.devices) == (("4",), ("5",))
    first.close()
    assert signed(environ, 1, C).devices == ("4",)


def test_who_gets_none_is_told_who_has_them(environ: dict[str, str]) -> None:
    signed(environ, 1, A)
    assert refusal(environ, 2) == "4 is used by a-1"
    assert signed(environ, 1, B).devices == ("5",), "who gets too little keeps nothing"


def test_what_others_have_written_into_a_lock_file_does_nothing_to_a_terminal(environ: dict[str, str]) -> None:
    signed(environ, 2, Path("/runs/a\x1b[2J-1\n"))
    assert refusal(environ, 1) == "4 is used by a??2J-1?, 5 by a??2J-1?"


def test_who_asks_to_share_gets_the_free_ones_first_and_then_used_ones(environ: dict[str, str]) -> None:
    signed(environ, 1, A)
    sharing = environ | {SHARE: "1"}
    assert signed(sharing, 1, B).devices == ("5",)
    assert signed(sharing, 2, C).devices == ("4", "5")
    assert refusal(environ, 1) == "4 is used by a-1 and c-3, 5 by b-2 and c-3"


def test_a_shared_device_is_not_free_before_the_last_of_its_users_is_gone(environ: dict[str, str]) -> None:
    environ["CUDA_VISIBLE_DEVICES"] = "4"
    first, second = signed(environ, 1, A), signed(environ | {SHARE: "1"}, 1, B)
    first.close()
    assert refusal(environ, 1) == "4 is used by a-1 and b-2"
    second.close()
    assert signed(environ, 1, C).devices == ("4",)


@pytest.mark.parametrize("value", ["GPU-8932f937,MIG-GPU-8932f937/1/0", "MIG-41b5,MIG-70ae"])
def test_devices_may_be_named_by_uuid(environ: dict[str, str], value: str) -> None:
    environ["CUDA_VISIBLE_DEVICES"] = value
    first, second = value.split(",")
    assert signed(environ, 1, A).devices == (first,)
    assert signed(environ, 1, B).devices == (second,)
    assert refusal(environ, 1)


def test_a_run_on_the_cpu_takes_no_device_and_counts_as_a_user_of_cores(environ: dict[str, str]) -> None:
    environ[CPU_SLOTS] = "3"
    for device, count, slots in (("auto", 0, 1), ("cpu", 2, 2), ("mps", 1, 1), ("xpu", 1, 1)):
        leases = signed(environ, count, A, device=device)
        assert (leases.devices, len(leases.slots)) == ((), slots)
        assert leases.visible == {} and leases.of_rank(0, 1, 1) == ({}, ())
    used = sorted(file.name for file in Path(environ[FOLDER]).glob("cpu-*") if not lock_files.is_free(file))
    assert used == ["cpu-0", "cpu-1", "cpu-2"], "it waits for nobody, but takes free ones first"


def test_a_folder_that_cannot_be_does_not_keep_a_run_from_the_cpu(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "devices").write_text("a file")
    assert take(environ, 0) == Leases()


def test_other_kinds_of_devices_have_their_own_variable_and_locks(environ: dict[str, str]) -> None:
    environ["ASCEND_RT_VISIBLE_DEVICES"] = "4,5,6"
    signed(environ, 2, A)
    npus = signed(environ, 3, B, device="npu")
    assert npus.visible == {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}
    assert npus.of_rank(2, 3, 1)[0] == {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}


def test_every_user_of_the_machine_may_use_the_folder_and_none_may_remove_the_others_locks(
    environ: dict[str, str],
) -> None:
    before = os.umask(0o077)
    try:
        signed(environ, 2, A)
    finally:
        os.umask(before)
    folder = Path(environ[FOLDER])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o666}


# Processes

NEED = """
import os, sys, time
from pathlib import Path
from jobkit.run.config import Config, Resources
from jobkit.supervisor import device_leases, lock_files
from jobkit.supervisor.needs import need_of
resources = Resources(tasks_per_node=int(sys.argv[1]), gpus_per_task=1)
need = need_of(Config(name="x", task="m:f", resources=resources), os.environ, queues=False)
"""

HOLD = f"""{NEED}
leases = device_leases.take(need)
leases.sign(Path(sys.argv[2]), os.getpid())
print(*leases.devices, flush=True)
time.sleep(float(sys.argv[3]))
"""

TAKE_AT_ONCE = f"""{NEED}
lock_files.TAKING_SECONDS = 0.0
print("ready", flush=True)
sys.stdin.readline()
while (leases := device_leases.take(need)) is None:  # one that finds all taken for an instant tries again
    pass
print(*leases.devices, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holders(environ: dict[str, str]) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def hold(
    holders: list[subprocess.Popen[str]], environ: dict[str, str], count: int, run: Path, seconds: float = 600
) -> tuple[subprocess.Popen[str], list[str]]:
    """A process of its own that takes devices and stays, and which it got."""
    command = [sys.executable, "-c", HOLD, str(count), str(run), str(seconds)]
    process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True)
    holders.append(process)
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def test_the_kernel_takes_a_device_back_from_a_process_that_is_killed(
    holders: list[subprocess.Popen[str]], environ: dict[str, str]
) -> None:
    process, devices = hold(holders, environ, 2, A)
    assert devices == ["4", "5"]
    assert refusal(environ, 1) == "4 is used by a-1, 5 by a-1"
    process.kill()
    process.wait()
    assert signed(environ, 2, B).devices == ("4", "5")


def test_a_device_belongs_to_those_who_were_given_its_open_lock(environ: dict[str, str]) -> None:
    leases = signed(environ, 1, A)
    child = subprocess.Popen(["sleep", "600"], pass_fds=leases.files)
    try:
        leases.sign(B, child.pid)
        leases.close()
        assert "b-2" in refusal(environ, 2)
    finally:
        child.kill()
        child.wait()
    assert signed(environ, 2, B).devices == ("4", "5")


def test_two_processes_that_take_devices_at_the_same_time_never_get_the_same(
    holders: list[subprocess.Popen[str]], environ: dict[str, str]
) -> None:
    environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
    command = [sys.executable, "-c", HOLD, "1", str(A), "600"]
    for _ in range(4):
        holders.append(subprocess.Popen(command, env=os.environ | environ, stdout=subprocess.PIPE, text=True))
    got = [process.stdout.readline().strip() for process in holders if process.stdout is not None]
    assert sorted(got) == ["0", "1", "2", "3"]


def test_a_stopped_process_that_holds_the_lock_of_all_takers_is_named_and_not_waited_for_for_ever(
    holders: list[subprocess.Popen[str]],
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(lock_files, "TAKING_SECONDS", 0.1)
    monkeypatch.setattr(log, "propagate", True)
    signed(environ, 1, A)
    other = subprocess.Popen(
        ["flock", f"{environ[FOLDER]}/{TAKING}", "--command", "echo held; kill -STOP $PPID"],
        stdout=subprocess.PIPE,
        text=True,
    )
    holders.append(other)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    os.waitid(os.P_PID, other.pid, os.WSTOPPED)
    assert signed(environ, 1, B).devices == ("5",)
    (said,) = caplog.messages
    assert f"process {other.pid} (flock, T (stopped), of user {getpass.getuser()})" in said
    assert refusal(environ, 1), "nobody gets one that is taken"


def test_without_that_lock_two_processes_never_get_the_same_device_either(
    holders: list[subprocess.Popen[str]], environ: dict[str, str]
) -> None:
    environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
    signed(environ, 1, A).close()
    with (Path(environ[FOLDER]) / TAKING).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = [sys.executable, "-c", TAKE_AT_ONCE, "1"]
        start = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | environ}
        for _ in range(3):
            holders.append(subprocess.Popen(command, **start))  # type: ignore[call-overload]
        for process in holders:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in holders:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        got = [process.stdout.readline().strip() for process in holders if process.stdout is not None]
    assert len(set(got)) == len(got) and set(got) <= {"0", "1", "2", "3"}


# From the submission to the ranks


def test_a_supervisor_shows_each_rank_its_nodes_devices_and_lends_it_the_locks_of_its_own(
    environ: dict[str, str],
) -> None:
    environ["CUDA_VISIBLE_DEVICES"] = "2,3,4,5"
    leases = signed(environ, 4, A)
    inherited = Leases.inherited(environ | leases.environment)
    assert inherited == leases and inherited is not None
    assert inherited.visible == {"CUDA_VISIBLE_DEVICES": "2,3,4,5"}

    def shown(per_node: int, each: int) -> list[str]:
        return [inherited.of_rank(rank, per_node, each)[0]["CUDA_VISIBLE_DEVICES"] for rank in range(4 // each)]

    assert shown(per_node=4, each=1) == ["2,3,4,5"] * 4
    assert shown(per_node=2, each=1) == ["2,3", "2,3", "4,5", "4,5"]
    assert shown(per_node=2, each=2) == ["2,3,4,5"] * 2
    assert shown(per_node=1, each=2) == ["2,3", "4,5"]
    assert (*inherited.of_rank(0, 2, 2)[1], *inherited.of_rank(1, 2, 2)[1]) == leases.files
    assert Leases.inherited({"CUDA_VISIBLE_DEVICES": "2,3"}) is None


# There is no such device here, so each rank fails, but after it has imported the task.
TELL = """
import os
from pathlib import Path

seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "JOBKIT_LEASES")}
Path(f"seen_{os.environ['JOBKIT_PROCID']}").write_text(str(seen))


def train(ctx):
    raise AssertionError("there is a device")
"""


def test_the_ranks_of_a_local_run_see_their_nodes_devices_in_the_order_that_the_user_chose(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    project = Project(tmp_path / "project", environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    (project.path / "mytask.py").write_text(TELL)
    gpus = ["resources.gpus_per_task=1", "resources.tasks_per_node=1", "retry.crash=0"]
    done = project.submit("--local", *gpus, expect=1)
    for rank, device in ((0, "4"), (1, "5")):
        seen = (project.path / f"seen_{rank}").read_text()
        expected = {"CUDA_VISIBLE_DEVICES": device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "JOBKIT_LEASES": None}
        assert seen == str(expected)
    assert "1 cuda device(s) and sees 0" in done.stderr
    (run,) = project.runs
    assert status(run)["state"] == "failed"
    assert signed(environ, 2, A).devices == ("4", "5"), "the end of the run gives them back"


def test_every_rank_of_a_command_sees_all_devices_of_its_node_and_its_local_rank_is_one_of_them(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    project = Project(tmp_path / "project", environ | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    tell = 'echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES > seen_${JOBKIT_ATTEMPT}_$RANK; test "$JOBKIT_ATTEMPT" = 2\n'
    (project.path / "tell.sh").write_text(tell)
    (project.path / "toy.yaml").write_text("name: toy\ncommand: [sh, tell.sh]\n")
    project.submit("--local", "resources.tasks_per_node=auto", "resources.gpus_per_task=1")
    for attempt in (1, 2):  # the second is started in place
        seen = [(project.path / f"seen_{attempt}_{rank}").read_text().split() for rank in range(4)]
        assert seen == [[str(rank), "4,5,6,7"] for rank in range(4)]


def test_a_folder_that_cannot_be_is_named_with_the_variable_that_moves_it(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    (tmp_path / "devices").write_text("a file")
    project = Project(tmp_path / "project", environ)
    gpus = ["resources.gpus_per_task=1", "resources.tasks_per_node=1", "retry.crash=0"]
    done = project.submit("--local", *gpus, expect=2)
    assert str(tmp_path / "devices") in done.stderr and "JOBKIT_DEVICES_DIR" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert project.runs == []


def ranks(run: Path) -> list[int]:
    """The processes of a run's ranks, by rank."""
    return [process.pid for _, process in sorted(ranks_of(run, 1).items())]


def test_a_killed_supervisors_devices_are_free_when_its_ranks_are_gone(tmp_path: Path, environ: dict[str, str]) -> None:
    project = Project(tmp_path / "project", environ)
    # Ranks that are about to choose their device, and let nobody keep them from it.
    (project.path / "mytask.py").write_text("import time\ntime.sleep(600)\ndef train(ctx): pass\n")
    gpus = ["resources.gpus_per_task=1", "resources.nodes=1", "retry.crash=0"]
    supervisor = int(project.submit("--local", "--detach", *gpus).stdout.split()[1])
    (run,) = project.runs
    wait_for("both ranks", lambda: len(ranks(run)) == 2, run)
    first, second = ranks(run)
    try:
        os.kill(supervisor, signal.SIGKILL)
        assert refusal(environ, 1) == f"4 is used by {run.name}, 5 by {run.name}"
        os.killpg(first, signal.SIGKILL)
        wait_for("its device", lambda: first not in ranks(run), run)
        assert signed(environ, 1, A).devices == ("4",)
        assert refusal(environ, 1)
    finally:
        for rank in ranks(run):
            os.killpg(rank, signal.SIGKILL)
    wait_for("the other device", lambda: second not in ranks(run), run)
    assert signed(environ, 1, B).devices == ("5",)


# Which device a name means


class Driver:
    """Stands in for pynvml, and for GPUs that this machine does not have."""

    class NVMLError(Exception):
        """What NVML raises."""

    def __init__(self, *gpus: tuple[str, str], broken: str = "") -> None:
        self.gpus = gpus
        self.broken = broken
        self.users = 0

    def _answer(self, name: str) -> None:
        if name == self.broken:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:
        self._answer("init")
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        self._answer("uuid")
        return self.gpus[handle][0]

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.gpus[handle][1]


TWO_ALIKE = (("GPU-aa11", "NVIDIA H100"), ("GPU-bb22", "NVIDIA H100"))
TWO_MODELS = (("GPU-aa11", "Quadro P620"), ("GPU-bb22", "NVIDIA H100"))


@pytest.mark.parametrize(
    ("devices", "driver", "by_bus", "names"),
    [
        (["0", "1"], Driver(*TWO_ALIKE), False, ["GPU-aa11", "GPU-bb22"]),
        (["1", "GPU-aa11"], Driver(*TWO_ALIKE), False, ["GPU-bb22", "GPU-aa11"]),
        (["GPU-bb"], Driver(*TWO_ALIKE), False, ["GPU-bb22"]),  # CUDA takes the beginning of a UUID
        (["GPU-"], Driver(*TWO_ALIKE), False, ["GPU-"]),  # if there is but one with it
        (["0"], Driver(*TWO_MODELS), True, ["GPU-aa11"]),
        (["0"], Driver(*TWO_MODELS), False, ["cuda-0"]),  # the faster one, which NVML does not tell
        (["7"], Driver(*TWO_ALIKE), True, ["cuda-7"]),
        (["MIG-41b5"], Driver(*TWO_ALIKE), False, ["MIG-41b5"]),
        (["4", "GPU-cc"], Driver(*TWO_ALIKE, broken="init"), False, ["cuda-4", "GPU-cc"]),  # no driver
        (["0"], Driver(*TWO_ALIKE, broken="uuid"), True, ["cuda-0"]),  # a GPU that has fallen off the bus
    ],
)
def test_a_device_has_one_name_however_it_is_numbered(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], driver: Driver, by_bus: bool, names: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
    cuda = next(kind for kind in KINDS if kind.name == "cuda")
    assert physical_names(cuda, devices, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if by_bus else {}) == names
    assert driver.users == 0


def test_what_stands_in_for_nvml_has_its_names() -> None:
    import pynvml

    own = [name for name in dir(Driver) if name.lower().startswith("nvml")]
    assert all(hasattr(pynvml, name) for name in own)


def test_the_variable_of_a_supervisor_is_not_one_of_the_users(environ: dict[str, str]) -> None:
    assert set(signed(environ, 1, A).environment) == {LEASES}


def test_a_full_disk_of_the_locks_does_not_lose_a_run_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = []

    def full(leases: Leases, run: Path, pid: int) -> None:
        signed.append(pid)
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")

    monkeypatch.setattr(Leases, "sign", full)
    project = Project(tmp_path)
    jobkit(project, "submit", "toy.yaml", "--local", "--detach", "resources.nodes=1", "params.steps=2")
    (run,) = project.runs
    wait_for("the end", lambda: status(run).get("state") == "finished", run)
    assert signed == [int(status(run)["job_id"])]
