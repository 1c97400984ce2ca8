"""The queue of this machine: a run that does not fit waits for its turn, whatever happens around it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.other_user import NOBODY, as_nobody, only_root, open_folder
from harness.processes import processes_of
from harness.project import Project, events, names, status, step, wait_for, weights

from jobkit.run.config import Config, Resources
from jobkit.supervisor import device_leases, queue, tickets
from jobkit.supervisor.device_leases import Leases
from jobkit.supervisor.line import Line
from jobkit.supervisor.lock_files import FOLDER
from jobkit.supervisor.needs import CPU_SLOTS, Need, need_of
from jobkit.supervisor.queue import Place, is_wanted, take_at_once
from jobkit.supervisor.tickets import Ticket, Want, in_order

A, B, C = Path("/runs/a-1"), Path("/runs/b-2"), Path("/runs/c-3")


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Two pretended GPUs and two CPU slots that nobody else on this machine has."""
    own = {"CUDA_VISIBLE_DEVICES": "4,5", FOLDER: str(tmp_path / "devices"), CPU_SLOTS: "2"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return own


def need(environ: dict[str, str], gpus: int, queues: bool = False) -> Need:
    resources = Resources(tasks_per_node=max(1, gpus), gpus_per_task=1 if gpus else 0)
    return need_of(Config(name="x", task="m:f", resources=resources), environ, queues=queues)


def looked(place: Place) -> Leases | None:
    """What it gets if it looks now, however short ago it did so."""
    place._look_at = 0.0
    return place.take()


def got(leases: Leases | None) -> tuple[str, ...]:
    assert leases is not None
    return leases.devices


# The order


def ticket(file: str, owner: int, priority: int = 0) -> Ticket:
    return Ticket(file, owner, float(file), (Want(1, "1 GPU", {"0": "cuda-0"}),), f"/runs/{file}", priority)


@pytest.mark.parametrize(
    ("waiting", "order"),
    [
        ([ticket("2", 7), ticket("1", 8)], ["1", "2"]),
        ([ticket("1", 7), ticket("2", 7, 5)], ["2", "1"]),
        ([ticket("1", 7), ticket("2", 8), ticket("3", 7, 5)], ["3", "2", "1"]),  # it takes its user's first place
        ([ticket("1", 7), ticket("2", 8, 999)], ["1", "2"]),  # a priority is worth nothing among users
        ([ticket("1", 7, -1), ticket("2", 7), ticket("3", 7, -1)], ["2", "1", "3"]),
    ],
)
def test_who_came_first_is_first_and_a_users_own_runs_are_in_the_order_of_their_priority(
    waiting: list[Ticket], order: list[str]
) -> None:
    assert [one.file for one in in_order(waiting)] == order


def test_who_came_first_gets_the_first_device_that_is_free(environ: dict[str, str]) -> None:
    held = device_leases.take(need(environ, 2))
    first, second = Place(need(environ, 1), A), Place(need(environ, 1), B)
    assert held is not None
    held.close()
    environ["CUDA_VISIBLE_DEVICES"] = "4"
    assert looked(second) is None, "one comes first"
    assert take_at_once(need(environ, 1)) is None, "and who has just come is behind both"
    assert got(looked(first)) == ("4",)
    assert got(looked(second)) == ("5",)
    assert Line().tickets == []


def test_a_run_that_needs_much_is_not_overtaken_and_one_that_needs_other_devices_is_not_waited_for(
    environ: dict[str, str],
) -> None:
    held = take_at_once(need(environ, 1))
    assert held is not None
    with Place(need(environ, 2), A), Place(need(environ, 1), B) as small:
        assert looked(small) is None, "one device is free, but the first one needs two"
        elsewhere = {**environ, "CUDA_VISIBLE_DEVICES": "6"}
        assert got(take_at_once(need(elsewhere, 1))) == ("6",)
    assert got(take_at_once(need(environ, 1))) == ("5",)


def test_a_run_without_queue_takes_cpu_slots_at_once_and_one_with_it_waits_for_them(environ: dict[str, str]) -> None:
    waiting = need(environ, 0, queues=True)
    used = [take_at_once(need(environ, 0)) for _ in range(3)]
    assert take_at_once(waiting) is None
    assert str(waiting.text) == "1 CPU slot"
    with Place(waiting, A) as place:
        assert looked(place) is None
        for leases in used:
            assert leases is not None
            leases.close()
        found = looked(place)
    assert found is not None and len(found.slots) == 1
    everything = Config(name="x", task="m:f", resources=Resources(tasks_per_node=64, cpus_per_task=8))
    assert need_of(everything, environ, queues=True).text == "2 CPU slots", "alone it can run"


@pytest.mark.parametrize("slots", ["0", "many", "-1", "99999"])
def test_a_number_of_slots_that_is_none_is_refused(environ: dict[str, str], slots: str) -> None:
    with pytest.raises(Exception, match=f"JOBKIT_CPU_SLOTS: found '{slots}', allowed: 1 to 4096"):
        need(environ | {CPU_SLOTS: slots}, 0)


# Processes

WAIT = """
import os, sys
from pathlib import Path
from jobkit.run.config import Config, Resources
from jobkit.supervisor.needs import need_of
from jobkit.supervisor.queue import Place
config = Config(name="x", task="m:f", resources=Resources(tasks_per_node=2, gpus_per_task=1))
place = Place(need_of(config, os.environ, queues=False), Path(sys.argv[1]))
print("waits", flush=True)
leases = place.wait(lambda: False)
print(*leases.devices, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def waiting(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that waits for both devices."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", WAIT, str(run)], **pipes)  # type: ignore[call-overload]
    try:
        assert process.stdout.readline() == "waits\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_killed_waiter_has_no_place_any_more_and_leaves_nothing_behind(environ: dict[str, str]) -> None:
    held = take_at_once(need(environ, 1))
    assert held is not None
    with waiting(A) as process, Place(need(environ, 1), B) as place:
        assert [one.run for one in Line().tickets] == [str(A), str(B)]
        assert looked(place) is None
        process.kill()
        process.wait()
        assert got(looked(place)) == ("5",)
    assert list(Path(environ[FOLDER]).glob(f"*{tickets.ENDING}")) == []


def test_a_stopped_process_at_the_head_of_the_line_blocks_nobody_and_keeps_its_place(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "PASS_SECONDS", 0.05)
    held = take_at_once(need(environ, 2))
    assert held is not None
    with waiting(A) as process, Place(need(environ, 2), B) as place:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert looked(place) is None
        time.sleep(0.1)
        assert looked(place) is None, "nothing is free: who is stopped keeps nobody from anything yet"
        held.close()
        assert looked(place) is None, "now it could start"
        time.sleep(0.1)
        leases = looked(place)
        assert got(leases) == ("4", "5"), "and does not"
        assert [one.run for one in Line().tickets] == [str(A)]
        process.send_signal(signal.SIGCONT)
        assert leases is not None
        leases.close()
        assert process.stdout is not None and process.stdout.readline() == "4 5\n"


def test_a_ticket_that_a_cleaner_has_removed_is_drawn_again(environ: dict[str, str]) -> None:
    held = take_at_once(need(environ, 2))
    with Place(need(environ, 1), A) as place:
        (file,) = Path(environ[FOLDER]).glob(f"*{tickets.ENDING}")
        file.unlink()
        assert looked(place) is None
        assert [one.run for one in Line().tickets] == [str(A)]
    assert held is not None


# Other users


@only_root
def test_another_users_files_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_folder() as folder:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
        monkeypatch.setenv(FOLDER, str(folder / "devices"))
        folder.chmod(0o777)
        devices, environ = folder / "devices", dict(os.environ)
        held = take_at_once(need(environ, 1))
        assert held is not None
        own = Place(need(environ, 1), A)
        (own_file,) = devices.glob(f"*{tickets.ENDING}")
        valid = json.loads(own_file.read_text())

        def attack() -> str:
            def put(name: str, text: str, since: float | None = None) -> None:
                file = devices / f"{name}{tickets.ENDING}"
                file.write_text(text)
                os.utime(file, (since or 0.0, since or 0.0))
                kept.append(os.open(file, os.O_RDONLY))
                tickets.fcntl.flock(kept[-1], tickets.fcntl.LOCK_EX)

            kept: list[int] = []
            put("0-early", json.dumps(valid | {"run": "/runs/x\x1b[2J", "priority": 1000}), since=1.0)
            put("0-future", json.dumps(valid), since=time.time() + 1e6)
            put("0-much", json.dumps(valid | {"wants": [{"count": 2, "text": "x", "locks": {"4": "cuda-4"}}]}))
            put("0-elsewhere", json.dumps(valid | {"wants": [{"count": 1, "text": "x", "locks": {"4": "../x"}}]}))
            put("0-nonsense", "{")
            put("0-number", "7")
            put("0-priority", json.dumps(valid | {"priority": 10**9}))
            put("0-long", json.dumps(valid) + " " * tickets.MAX_BYTES)
            os.mkfifo(devices / f"0-fifo{tickets.ENDING}")
            (devices / f"0-folder{tickets.ENDING}").mkdir()
            (devices / f"0-link{tickets.ENDING}").symlink_to(own_file)
            told = [Path(one.run).name for one in Line().tickets]
            for action in (own_file.unlink, lambda: own_file.write_text("")):
                with contextlib.suppress(PermissionError):
                    action()
                    told.append("harmed")
            return " ".join(told)

        assert as_nobody(attack) == "a-1 x\x1b[2J a-1", "what they may be is in the line, behind who came first"
        assert [(one.owner, one.priority) for one in Line().tickets] == [(0, 0)], "and nothing of it when they are gone"
        held.close()
        assert got(looked(own)) == ("4",)


@only_root
def test_two_users_wait_in_one_line_and_priority_is_each_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_folder() as folder:
        folder.chmod(0o777)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
        monkeypatch.setenv(FOLDER, str(folder / "devices"))
        environ = dict(os.environ)
        held = take_at_once(need(environ, 1))
        assert held is not None

        def in_line() -> list[tuple[int, int]]:
            with Place(need(environ, 1), B, 900):
                return [(one.place, one.ticket.owner) for one in Line().standings()]

        with Place(need(environ, 1), A):
            assert as_nobody(in_line) == [(1, 0), (2, NOBODY)]
        held.close()
        assert as_nobody(lambda: got(take_at_once(need(environ, 1)))) == ("4",)


# Runs

GATE = "while test ! -e $0; do sleep 0.05; done"


@pytest.fixture
def project(tmp_path: Path, environ: dict[str, str]) -> Iterator[Project]:
    """One pretended GPU, and commands that hold it until a file of their name is there."""
    made = Project(tmp_path / "project", environ | {"CUDA_VISIBLE_DEVICES": "4"})
    (made.path / "gate.yaml").write_text(
        f"name: gate\ncommand: [sh, -c, '{GATE}', '${{name}}']\nresources: {{gpus_per_task: 1}}\n"
    )
    yield made
    for run in made.runs:
        for process in processes_of(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def submit(project: Project, name: str, *words: str) -> Path:
    """A run in the background; returns its directory."""
    done = project.jobkit("submit", "gate.yaml", "--local", "--detach", f"name={name}", *words)
    return Path(done.stdout.split("run directory ")[1].strip())


def supervisor(run: Path) -> int:
    return int(status(run)["job_id"])


def test_three_runs_on_one_device_run_one_after_the_other_in_their_order(project: Project) -> None:
    first, second, third = (submit(project, name) for name in "abc")
    said = jobkit(project, "status", third.name).stdout
    assert "waiting for: 1 GPU, 2nd in line" in said
    shown = jobkit(project, "queue").stdout.splitlines()
    assert [line.split()[1] for line in shown] == [f"{second.name},", f"{third.name},"]
    assert f"1 GPU (4 is used by {first.name})" in shown[0]
    again = project.jobkit("submit", "gate.yaml", "--local", "--detach", "name=b", "--priority", "4")
    assert again.stdout.startswith("already queued") and "keeps --priority 0 (not 4)" in again.stderr
    assert " logs -f " in again.stderr and " cancel " in again.stderr, "what to type next"
    for run, name in ((first, "a"), (second, "b"), (third, "c")):
        wait_for("its start", lambda run=run: status(run)["state"] == "running", run)
        (project.path / name).touch()
        wait_for("its end", lambda run=run: status(run)["state"] == "finished", run)
    started = [event["time"] for run in (first, second, third) for event in events(run) if event["event"] == "started"]
    ended = [event["time"] for run in (first, second, third) for event in events(run) if event["event"] == "finished"]
    assert ended[0] < started[1] < ended[1] < started[2]
    assert names(first).count("waiting") == 0 and names(third).count("waiting") == 1


def test_a_waiting_run_is_cancelled_at_once(project: Project) -> None:
    submit(project, "a")
    second = submit(project, "b")
    done = jobkit(project, "cancel", second.name)
    assert "its ranks get" not in done.stderr
    assert status(second)["state"] == "cancelled" and status(second)["attempts"] == []
    wait_for("its end", lambda: processes_of(second) == [], second)
    assert Line(Path(project.env[FOLDER])).tickets == []


@pytest.mark.parametrize(
    ("number", "stays"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGHUP, True), (signal.SIGKILL, True)],
)
def test_ctrl_c_leaves_the_line_and_a_closed_terminal_does_not(
    project: Project, number: signal.Signals, stays: bool
) -> None:
    first = submit(project, "a")
    command = project.start("submit", "gate.yaml", "--local", "name=b")
    assert command.stderr is not None
    said = command.stderr.readline()
    assert said.startswith(f"queued: 1st in line for 1 GPU (4 is used by {first.name}); ") and "logs -f b-" in said
    (run,) = project.path.glob("runs/b-*")
    command.send_signal(number)
    said = command.communicate(timeout=60)[1]
    assert command.returncode == {signal.SIGHUP: 0, signal.SIGKILL: -signal.SIGKILL}.get(number, 75)
    if not stays:
        assert "leaving the line" in said and "name=b" in said, "and what to type"
        assert status(run)["state"] == "interrupted" and status(run)["waiting"] is None
        return
    (project.path / "a").touch()
    (project.path / "b").touch()
    wait_for("its end", lambda: status(run)["state"] == "finished", run)


def test_what_waited_before_a_reboot_is_listed_and_waits_again_in_the_old_order_by_one_command(
    project: Project,
) -> None:
    first = submit(project, "a")
    runs = [submit(project, name, "--priority", "3") for name in "bc"]
    for run in (*reversed(runs), first):  # the processes of all, as if the machine had been switched off
        for process in processes_of(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    wait_for("their end", lambda: not any(map(processes_of, (first, *runs))))
    (second, third) = runs
    said = jobkit(project, "queue")
    assert said.stdout.splitlines()[-2:] == [f"     {second.name}: 1 GPU", f"     {third.name}: 1 GPU"]
    assert "jobkit queue --resume" in said.stderr
    assert f"ran when their processes ended, and wait for nothing: {first.name}\n" in said.stdout
    assert f"jobkit resume {first.name}\n" in said.stderr
    assert "probably lost" in jobkit(project, "list").stdout
    blocked = submit(project, "d")
    project.jobkit("queue", "--resume")
    shown = json.loads(jobkit(project, "queue", "--json").stdout)
    assert [one["run"] for one in shown["waiting"]] == [second.name, third.name]
    assert [one["priority"] for one in shown["waiting"]] == [3, 3]
    assert shown["waited"] == []
    assert "nothing in" in jobkit(project, "queue", "--resume").stdout
    for name in "dbc":
        (project.path / name).touch()
    for run in (blocked, *runs):
        wait_for("its end", lambda run=run: status(run)["state"] == "finished", run)


def test_a_higher_priority_preempts_ones_own_run_which_continues_exactly(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    project = Project(tmp_path / "project", environ | {CPU_SLOTS: "1"})
    (project.path / "true.yaml").write_text("name: same\ncommand: ['true']\n")
    words = ("--local", "--queue", "resources.nodes=1", "resources.tasks_per_node=1", "params.steps=40")
    project.submit(*words, "name=undisturbed")
    project.slow_down(1)
    project.submit(*words, "--detach", "name=low")
    (low,) = project.path.glob("runs/low-*")
    wait_for("some steps", lambda: step(low) >= 3, low)
    project.jobkit("submit", "true.yaml", "--local", "--queue", "--detach")  # of the same priority: it waits
    project.jobkit("submit", "true.yaml", "--local", "--queue", "--priority", "1", "name=high")
    (high,), (same,) = project.path.glob("runs/high-*"), project.path.glob("runs/same-*")
    wait_for("its end", lambda: status(low)["state"] == "finished", low)
    assert [one["cause"] for one in status(low)["attempts"]] == ["preempted", "finished"]
    assert 3 <= status(low)["attempts"][0]["last_step"] < 40
    assert len(status(high)["attempts"]) == len(status(same)["attempts"]) == 1
    order = [run for _, run in sorted((status(run)["attempts"][-1]["started"], run) for run in (low, same, high))]
    assert order == [high, same, low], "the preempted one is behind those who waited"
    (undisturbed,) = project.path.glob("runs/undisturbed-*")
    assert weights(low) == weights(undisturbed)


def test_options_of_the_queue_are_refused_where_there_is_none(project: Project) -> None:
    for words, said in (
        (("--cluster", "slurm", "--queue"), "--queue: this is of the queue of this machine; add --local"),
        (("--cluster", "slurm", "--priority", "3"), "--priority 3: this is of the queue of this machine"),
        (("--local", "--priority", "1001"), "--priority: found 1001, allowed: -1000 to 1000"),
    ):
        done = jobkit(project, "submit", "gate.yaml", *words, expect=2)
        assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert project.runs == []


def test_nobody_wants_what_a_run_has_unless_they_wait_for_it(environ: dict[str, str]) -> None:
    has = need(environ, 1)
    held = take_at_once(need(environ, 2))
    assert not is_wanted(has)
    with Place(need({**environ, "CUDA_VISIBLE_DEVICES": "6"}, 1), A):
        assert not is_wanted(has)
        with Place(need(environ, 1), B):
            assert is_wanted(has)
    assert held is not None
