"""An agent, spoken to by a supervisor of the test over a real socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from harness.nvml import Nvml, gpu
from harness.runs import PATIENCE, wait_until
from submitit.core.utils import DelayedSubmission

from jobkit import start
from jobkit.agent import processes
from jobkit.agent.devices import Devices
from jobkit.run import records
from jobkit.run.records import Contact, Lease
from jobkit.run.rundir import RunDir
from jobkit.wire.messages import (
    Ack,
    Hello,
    Leave,
    Lines,
    Message,
    NotReady,
    NotStarted,
    RankExited,
    RankPlace,
    Ready,
    Signal,
    Signalled,
    Silent,
    StartRanks,
    Welcome,
    encode,
)
from jobkit.worker.main import Worker

M = TypeVar("M")
JOB = "local-test-1"

TASK = """
import os, signal, subprocess, time
from jobkit.errors import Stopped
from jobkit.mirror import Mirror
from jobkit.wire.pages import Phase

def train(rank):
    for step in range(rank.params["steps"]):
        rank.beat(step)
        if step == 0:  # once: a reader may see a file empty that is written again
            (rank.run.path / f"pid_{rank.rank}").write_text(str(os.getpid()))
        rank.report(step=step)
        if rank.stop_asked:
            rank.beat(step, Phase.SAVING)
            (rank.run.path / "saves").touch()
            time.sleep(rank.params.get("save_seconds", 0))
            raise Stopped
        if rank.params.get("leaves") and step == 3:
            rank.beat(step, Phase.OUTSIDE)
            os._exit(0)
        if rank.params.get("fails") and step == 3:
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            if rank.params.get("mirrors"):
                mirror = Mirror(rank.run, "mlflow", print)
                mirror.keep_running()
                os.kill(mirror._process.pid, signal.SIGSTOP)  # as if it were busy with its service
                (rank.run.path / "copier").write_text(str(mirror._process.pid))
            raise ValueError("at step 3")
        time.sleep(1000 if rank.params.get("hangs") and step == 3 else 0.02)
    return {"steps": step + 1, "port": int(os.environ["MASTER_PORT"])}
"""

# A program that saves when it gets SIGTERM, within a shell that would go on with its next line.
PROGRAM = """
import os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
def save(number, frame):
    time.sleep(0.3)
    (out / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(out / "pid_0").write_text(str(os.getpid()))
time.sleep(1000)
"""


class Supervisor:
    """The other end of an agent's connection, and the agent itself."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._listen()
        self.start_agent()

    def start_agent(self) -> None:
        environment = {**os.environ, "JOBKIT_JOB_ID": JOB, "PLAIN_RANKS": "1"}
        words = start.words("jobkit.agent.agent", str(self.run.path))
        self.agent = subprocess.Popen(words, env=environment, cwd=self.run.path.parent, start_new_session=True)
        self.accept()

    def _listen(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(PATIENCE)
        port = self.server.getsockname()[1]
        contact = Contact(addresses=["127.0.0.1"], port=port, secret="s", writer="w")
        records.write(self.run.contact_file, contact, mode=0o600)

    def accept(self) -> Hello:
        self.connection, _ = self.server.accept()
        self.lines, self.messages = Lines(), list[Message]()
        hello = self.expect(Hello)
        assert (hello.secret, hello.job_id, hello.node) == ("s", JOB, "local")
        self.send(Welcome())
        return hello

    def send(self, message: Message) -> None:
        self.connection.sendall(encode(message))

    def expect(self, kind: type[M], test: Callable[[M], bool] = lambda message: True) -> M:
        """The next message of a kind; others before it are dropped."""
        deadline = time.monotonic() + PATIENCE
        while True:
            while self.messages:
                message = self.messages.pop(0)
                assert not isinstance(message, NotStarted), message
                if isinstance(message, kind) and test(message):
                    return message
            # An agent may say others again and again.
            self.connection.settimeout(max(0.01, deadline - time.monotonic()))
            data = self.connection.recv(65536)
            assert data, f"the agent is gone; expected {kind.__name__}"
            self.messages += self.lines.feed(data)

    def ends(self, count: int) -> dict[int, RankExited]:
        exits = (self.expect(RankExited) for _ in range(count))
        return {exited.rank: exited for exited in exits}

    def go_away(self) -> None:
        self.connection.close()
        self.server.close()

    def come_back(self) -> Hello:
        self._listen()  # at another port, which the agent reads: the last one may be another program's by now
        return self.accept()

    def start(self, attempt: int, ranks: int, **fields: Any) -> None:
        self.run.logs(attempt).mkdir(parents=True)
        for file in self.run.path.glob("pid_*"):
            file.unlink()
        records.write(self.run.lease_file, Lease(attempt=attempt, writer="w", token="t", job_id=JOB))
        places = [RankPlace(rank=rank, local_rank=rank, local_world_size=ranks, node=0) for rank in range(ranks)]
        values = {"world_size": ranks, "nodes": 1, "master_addr": "127.0.0.1", "master_port": 29999, **fields}
        self.send(StartRanks(attempt=attempt, ranks=places, **values))

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: (report := self.run.progress()) is not None and (report.step or 0) >= step, f"step {step}")

    def pid(self, rank: int) -> int:
        """The process of a rank that has begun its loop."""
        return number_in(self.run.path / f"pid_{rank}")


def number_in(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text() != "", str(file))
    return int(file.read_text())


Make = Callable[..., Supervisor]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Supervisor] = []

    def supervisor(**config: Any) -> Supervisor:
        run = RunDir(tmp_path / "runs" / "toy-00000000")
        code = tmp_path / "code"
        for folder in (code, run.submitit):
            folder.mkdir(parents=True)
        (code / "toy_task.py").write_text(TASK)
        (code / "exits.py").write_text("import sys; sys.exit(0)")
        (code / "program.py").write_text(PROGRAM)
        (code / "run.sh").write_text(f"python {code}/program.py $1\ntouch $1/next_line\n")
        run.code.symlink_to(code)
        program = {} if "command" in config else {"task": "toy_task:train", "params": {"steps": 100000}}
        run.config_file.write_text(yaml.safe_dump({"name": "toy", **program, **config}))
        DelayedSubmission(Worker(str(run.path))).dump(run.pickle_file)
        made.append(Supervisor(run))
        return made[-1]

    yield supervisor
    for item in made:
        item.agent.kill()
        item.agent.wait()


def test_a_rank_dies_and_lives_again(make: Make) -> None:
    supervisor = make()
    first = supervisor.expect(Ready)
    supervisor.start(1, 2)
    supervisor.wait_for_step(3)
    os.kill(supervisor.pid(1), signal.SIGKILL)
    exited = supervisor.expect(RankExited)
    assert (exited.attempt, exited.rank, exited.code) == (1, 1, -signal.SIGKILL)
    assert exited.step >= 0
    supervisor.send(Signal(attempt=1, name="KILL"))
    assert supervisor.expect(RankExited).rank == 0
    again = supervisor.expect(Ready)
    assert again.port != first.port
    supervisor.start(2, 2)
    pids = [supervisor.pid(rank) for rank in range(2)]
    supervisor.send(Signal(attempt=1, name="KILL"))  # of another attempt: not for these
    supervisor.send(Signal(attempt=2, name="STOP"))
    assert {item.code for item in supervisor.ends(2).values()} == {75}
    assert [end.kind for end in supervisor.run.ends(2)] == ["stopped", "stopped"]
    supervisor.send(Leave())
    assert supervisor.agent.wait(PATIENCE) == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # noqa: PTH110


def test_the_first_failure_brings_the_word_of_its_device(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml(tmp_path, gpu(), gpu(), gpu(ecc=7))
    nvml.wait_for_words()
    for name, value in {**nvml.environment, "XDG_STATE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    supervisor = make(device="cuda", resources={"tasks_per_node": 2, "gpus_per_task": 1})
    supervisor.expect(Ready)
    words = [("cuda:1 on node7: 1 uncorrected ECC error", is_sick) for is_sick in (True, False)]
    for attempt, expected in enumerate(words, 1):  # after the second death the device says nothing new
        supervisor.start(attempt, 2)
        nvml.wait_for_look(1)
        nvml.write(gpu(), gpu(ecc=1), gpu(ecc=7))  # the last one is not this run's
        os.kill(supervisor.pid(1), signal.SIGKILL)
        exited = supervisor.expect(RankExited)
        assert (exited.rank, exited.device, exited.device_is_sick) == (1, *expected)
        supervisor.send(Signal(attempt=attempt, name="KILL"))
        assert supervisor.expect(RankExited).device == ""
        supervisor.expect(Ready)
    supervisor.start(3, 2)
    supervisor.pid(1)
    supervisor.send(Signal(attempt=3, name="STOP"))
    assert {(item.code, item.device) for item in supervisor.ends(2).values()} == {(75, "")}
    supervisor.send(Leave())
    assert supervisor.agent.wait(PATIENCE) == 0


def test_a_driver_that_hangs_delays_no_other_attempt(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml(tmp_path, gpu())
    for name, value in {**nvml.environment, "XDG_STATE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    supervisor = make(device="cuda", resources={"tasks_per_node": 1, "gpus_per_task": 1})
    supervisor.expect(Ready)
    supervisor.start(1, 1)
    nvml.wait_for_look(0)
    nvml.write(gpu(ecc=1, hangs=8))
    os.kill(supervisor.pid(0), signal.SIGKILL)
    exited = supervisor.expect(RankExited)
    assert (exited.code, exited.device) == (-signal.SIGKILL, "")
    supervisor.expect(Ready)


def test_an_agent_says_why_it_is_not_ready(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each import, and again and again while another run has the device."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    holder = Devices(RunDir(tmp_path / "holder"), "cuda", ["7"], 1, devices_per_rank=1)
    assert holder.take()
    supervisor = make(device="cuda", resources={"gpus_per_task": 1}, preload=["this"])
    said = [supervisor.expect(NotReady).why for _ in range(3)]
    assert said == ["it imports jobkit and torch", "it imports this", "its imports are done"]
    assert {supervisor.expect(NotReady).why for _ in range(3)} == {"it looks for free devices"}
    holder.close()
    supervisor.expect(Ready)


def test_ranks_finish_with_a_result_and_the_port_is_free_for_them(make: Make) -> None:
    supervisor = make(params={"steps": 2})
    port = supervisor.expect(Ready).port
    with pytest.raises(OSError), socket.socket() as other:
        other.bind(("", port))  # without SO_REUSEADDR, as another agent does
    with socket.create_server(("", port)):  # with it, as torch's store does
        supervisor.start(1, 2, master_port=port)
        assert {item.code for item in supervisor.ends(2).values()} == {0}
    ends = supervisor.run.ends(1)
    assert [(end.kind, end.result) for end in ends] == [("finished", {"steps": 2, "port": port}), ("finished", None)]


def test_ranks_train_on_while_the_supervisor_is_away(make: Make) -> None:
    supervisor = make()
    supervisor.expect(Ready)
    supervisor.start(1, 2)
    supervisor.wait_for_step(2)
    os.kill(supervisor.pid(1), signal.SIGKILL)
    serial = supervisor.expect(RankExited).serial
    with supervisor.run.alive_lock():  # job.sh lives: without it the ranks end 10 s later
        supervisor.go_away()
        step = supervisor.run.progress().step
        supervisor.wait_for_step(step + 5)
        hello = supervisor.come_back()
    assert (hello.attempt, hello.alive) == (1, [0])
    exited = supervisor.expect(RankExited)  # nobody has acknowledged it
    assert (exited.serial, exited.rank) == (serial, 1)
    supervisor.send(Ack(serial=serial))
    supervisor.send(Signal(attempt=1, name="KILL"))
    last = supervisor.expect(RankExited)
    supervisor.send(Ack(serial=last.serial))
    supervisor.expect(Ready)
    supervisor.go_away()
    hello = supervisor.come_back()
    assert (hello.attempt, hello.alive) == (None, [])
    supervisor.expect(Ready)


def test_a_program_that_outlived_its_agent_is_ended_by_the_next(make: Make) -> None:
    """The kernel kills the shell with the agent, and nobody the program that the shell has started."""
    supervisor = make(command=["bash", "run.sh", "${run_dir}/outputs"])
    supervisor.expect(Ready)
    supervisor.start(1, 1)
    program = processes.identify(number_in(supervisor.run.outputs / "pid_0"))
    supervisor.agent.kill()
    supervisor.agent.wait()
    assert processes.lives(program)
    supervisor.start_agent()
    supervisor.expect(Ready)
    assert not processes.lives(program)


def test_a_stop_that_came_before_the_fork_is_not_lost(make: Make) -> None:
    supervisor = make()
    supervisor.expect(Ready)
    supervisor.agent.send_signal(signal.SIGTERM)
    signalled = supervisor.expect(Signalled)
    assert signalled.signal == "TERM"
    supervisor.start(1, 2)
    assert {item.code for item in supervisor.ends(2).values()} <= {75, -signal.SIGTERM}
    supervisor.send(Ack(serial=signalled.serial))
    supervisor.expect(Ready)
    supervisor.start(2, 1)  # the signal was for the attempt before
    supervisor.wait_for_step(3)
    supervisor.agent.send_signal(signal.SIGUSR2)
    assert supervisor.expect(Signalled).signal == "USR2"
    assert supervisor.expect(RankExited).code == 75


def test_nothing_of_a_failed_attempt_is_left_when_the_next_may_begin(make: Make) -> None:
    supervisor = make(params={"steps": 100, "fails": True})
    supervisor.expect(Ready)
    supervisor.start(1, 1)
    exited = supervisor.expect(RankExited)
    (end,) = supervisor.run.ends(1)
    assert (exited.code, end.kind, end.error, end.step) == (1, "failed", "ValueError: at step 3", 3)
    assert "toy_task.py" in (end.traceback or "")
    supervisor.expect(Ready)
    assert processes.children(supervisor.agent.pid) == []


@pytest.mark.parametrize("leaves", [False, True])
def test_a_copier_of_curves_ends_by_itself(make: Make, leaves: bool) -> None:
    """MLflow cannot read a folder in which a process was killed while it made a run."""
    supervisor = make(params={"steps": 100, "fails": True, "mirrors": True})
    supervisor.expect(Ready)
    supervisor.start(1, 1)
    supervisor.expect(RankExited)
    copier = processes.identify(number_in(supervisor.run.path / "copier"))
    if leaves:
        supervisor.send(Leave())
        with pytest.raises(subprocess.TimeoutExpired):
            supervisor.agent.wait(0.5)
    else:
        supervisor.expect(Ready)
    assert processes.lives(copier)
    os.kill(copier[0], signal.SIGCONT)
    wait_until(lambda: not processes.lives(copier), "the copier's end")


def test_a_copier_of_curves_outlives_its_agent(make: Make) -> None:
    supervisor = make(params={"steps": 100, "fails": True, "mirrors": True})
    supervisor.expect(Ready)
    supervisor.start(1, 1)
    supervisor.expect(RankExited)
    copier = processes.identify(number_in(supervisor.run.path / "copier"))
    supervisor.agent.kill()
    supervisor.agent.wait()
    supervisor.start_agent()
    supervisor.expect(Ready)
    assert processes.lives(copier)
    os.kill(copier[0], signal.SIGCONT)


def test_a_rank_that_hangs_is_silent_and_shows_its_stacks(make: Make) -> None:
    supervisor = make(params={"steps": 100, "hangs": True}, watchdog="1s")
    supervisor.expect(Ready)
    supervisor.start(1, 1)
    silent = supervisor.expect(Silent, lambda silent: silent.step == 3)  # on a busy machine a step takes a second, too
    assert silent.rank == 0
    assert silent.seconds > 1.0
    supervisor.send(Signal(attempt=1, name="STACKS"))
    log = supervisor.run.rank_log(1, 0, "err")
    wait_until(lambda: "toy_task.py" in log.read_text(), "the stacks")
    supervisor.send(Signal(attempt=1, name="KILL", unless_saving=True))
    assert supervisor.expect(RankExited).code == -signal.SIGKILL


def test_an_exit_with_0_outside_a_step_is_no_end(make: Make) -> None:
    supervisor = make(params={"steps": 100, "leaves": True})
    supervisor.expect(Ready)
    supervisor.start(1, 1)
    exited = supervisor.expect(RankExited)
    assert (exited.code, exited.is_done) == (0, False)


def test_a_rank_that_saves_is_not_killed_with_those_that_do_not(make: Make) -> None:
    supervisor = make(params={"steps": 100_000, "save_seconds": 2})
    supervisor.expect(Ready)
    supervisor.start(1, 1)
    supervisor.wait_for_step(3)
    supervisor.send(Signal(attempt=1, name="STOP"))
    wait_until((supervisor.run.path / "saves").exists, "a save")
    supervisor.send(Signal(attempt=1, name="KILL", unless_saving=True))
    assert supervisor.expect(RankExited).code == 75


@pytest.mark.parametrize("config", [{"preload": ["exits"]}, {"task": "exits:train"}])
def test_an_import_that_exits_is_the_end_of_the_rank_and_not_of_the_agent(make: Make, config: dict[str, Any]) -> None:
    supervisor = make(**config)
    supervisor.expect(Ready)
    supervisor.start(1, 1)
    assert supervisor.expect(RankExited).code == 1
    (end,) = supervisor.run.ends(1)
    assert (end.kind, end.final) == ("failed", True) and "exits" in str(end.error)


@pytest.mark.parametrize("how", ["stop", "shell alone"])
def test_the_program_of_a_shell_saves_and_the_shell_does_not_go_on(make: Make, how: str) -> None:
    supervisor = make(command=["bash", "run.sh", "${run_dir}/outputs"])
    outputs = supervisor.run.outputs
    supervisor.expect(Ready)
    supervisor.start(1, 1)
    number_in(outputs / "pid_0")
    if how == "stop":
        supervisor.send(Signal(attempt=1, name="STOP"))
    else:
        (shell,) = processes.children(supervisor.agent.pid)
        os.kill(shell, signal.SIGTERM)  # as Slurm may
    assert supervisor.expect(RankExited).code in (-signal.SIGTERM, 0)
    assert (outputs / "saved").exists()
    assert not (outputs / "next_line").exists()
