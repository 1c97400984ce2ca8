"""A process that became a rank: its environment, its share of CPUs, its end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from harness.runs import wait_until

from jobkit.agent import processes
from jobkit.agent.children import send
from jobkit.config.schema import Resources
from jobkit.run.rundir import RunDir
from jobkit.wire.messages import RankPlace, StartRanks
from jobkit.wire.pages import Page, Phase
from jobkit.wire.signals import take_stop_signals
from jobkit.worker.cpus import cpu_set
from jobkit.worker.forked import become_rank, run_and_end
from jobkit.worker.rendezvous import environment_of

PLACE = RankPlace(rank=5, local_rank=1, local_world_size=4, node=1)
START = StartRanks(attempt=3, ranks=[PLACE], world_size=8, nodes=2, master_addr="10.0.0.1", master_port=29999)


def test_a_rank_finds_its_own_place_and_not_its_agents(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "toy")
    agent = {
        **{"HOME": "/home/a", "JOBKIT_JOB_ID": "12", "SLURM_JOB_ID": "12", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        **{"SLURM_STEP_NODELIST": "n[0-9]", "PMI_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,5"},
    }
    environment = environment_of(PLACE, START, run, Resources(cpus_per_task=3), agent)
    expected = {
        **{"HOME": "/home/a", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
        **{"GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29999", "JOBKIT_ATTEMPT": "3"},
        **{"JOBKIT_RUN": str(run.path), "JOBKIT_JOB_ID": "12", "SLURM_JOB_ID": "12", "SLURM_PROCID": "5"},
        **{"SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_GTIDS": "4,5,6,7"},
        **{"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_CPUS_PER_TASK": "3", "SUBMITIT_EXECUTOR": "jobkit"},
        **{"CUDA_VISIBLE_DEVICES": "4,5"},
    }
    assert {name: environment.get(name) for name in expected} == expected
    assert not {"PMI_RANK", "SLURM_STEP_NODELIST"} & set(environment)
    here = environment_of(PLACE, START, run, Resources(), {})
    assert not [name for name in here if name.startswith("SLURM_")]


SHARES = [
    (range(8), 8, 2, []),  # nobody has bound the process
    (range(2), 8, 4, []),  # too few
    ([0, 1, 4, 5], 8, 2, [[0, 4], [1, 5]]),  # 0 and 4 are threads of one core
]


@pytest.mark.parametrize(("allowed", "machine", "ranks", "shares"), SHARES)
def test_ranks_divide_the_cpus(allowed: list[int], machine: int, ranks: int, shares: list[list[int]]) -> None:
    for rank in range(ranks):
        assert cpu_set(allowed, machine, rank, ranks, lambda cpu: (cpu % 4, cpu)) == (shares[rank] if shares else [])


def forked(tmp_path: Path, program: str) -> tuple[int, RunDir]:
    """The exit code of a rank that runs a program, after it became one."""
    run = RunDir(tmp_path / "toy")
    page = Page.create()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # as the agent's
        become_rank(run, PLACE, START, page, {**os.environ, "MARK": "here"})
        sys.stdout = os.fdopen(1, "w", closefd=False)  # pytest has replaced it
        sys.stderr = os.fdopen(2, "w", closefd=False)
        run_and_end(lambda: exec(program, {}))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), run


def test_a_forked_process_is_a_program_of_its_own(tmp_path: Path) -> None:
    program = """
import os, signal, sys
assert os.getsid(0) == os.getpid() and os.environ["MARK"] == "here"
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert open("/proc/self/oom_score_adj").read().strip() == "300"
assert os.read(0, 1) == b""
os.fstat(int(os.environ["JOBKIT_PAGE"]))
print("to the log"); print("to the error log", file=sys.stderr)
"""
    code, run = forked(tmp_path, program)
    log = run.rank_log(3, 5, "err").read_text()
    assert (code, run.rank_log(3, 5).read_text(), log) == (0, "to the log\n", "to the error log\n")


ENDS = {
    "import sys; sys.exit(7)": 7,
    "import sys; sys.exit('words')": 1,
    "raise ValueError('x')": 1,
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()": 0,
}


@pytest.mark.parametrize(("program", "code"), ENDS.items())
def test_a_forked_process_ends_as_a_program_does(tmp_path: Path, program: str, code: int) -> None:
    ended, run = forked(tmp_path, program)
    assert ended == code
    assert ("late" in program) == ("late" in run.rank_log(3, 5).read_text())


def test_an_import_that_hangs_ends_the_agent_and_shows_where(tmp_path: Path) -> None:
    code, source = tmp_path / "toy" / "code", tmp_path / "hangs.py"
    code.mkdir(parents=True)
    source.write_text("import time; time.sleep(1000)")
    program = f"""
import os, sys
from jobkit.run.rundir import RunDir
from jobkit.config.schema import Config
from jobkit.agent import preload
os.environ[preload.PLAIN_RANKS] = "1"  # the import of torch would take longer
sys.path.insert(0, {str(tmp_path)!r})
run, config = RunDir({str(tmp_path / "toy")!r}), Config(name="toy", task="toy:train", preload=[])
preload.import_for_ranks(run, config)  # what does not hang: the limit below is for the rest alone
preload.IMPORT_SECONDS = 2.0
config.preload.append("hangs")
preload.import_for_ranks(run, config)
"""
    ended, run = forked(tmp_path, program)
    assert ended == 1
    assert "hangs.py" in run.rank_log(3, 5, "err").read_text()


def test_files_that_nobody_closed_are_whole(tmp_path: Path) -> None:
    out, at_exit = tmp_path / "out", tmp_path / "at_exit"
    program = f"""
import atexit, pathlib
file = open({str(out)!r}, "w"); file.write("all of it")
atexit.register(lambda: pathlib.Path({str(at_exit)!r}).touch())
"""
    assert forked(tmp_path, program)[0] == 0
    assert out.read_text() == "all of it"
    assert at_exit.exists()


def test_a_rank_dies_with_its_agent(tmp_path: Path) -> None:
    read, write = os.pipe()
    agent = os.fork()
    if agent == 0:
        rank = os.fork()
        if rank == 0:
            become_rank(RunDir(tmp_path / "toy"), PLACE, START, Page.create(), os.environ)
            os.write(write, b"%d" % os.getpid())
            signal.pause()
        signal.pause()
    rank = processes.identify(int(os.read(read, 100)))
    assert processes.lives(rank)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    try:
        wait_until(lambda: not processes.lives(rank), "the end of the rank")
    finally:
        send(rank[0], signal.SIGKILL)


@pytest.mark.parametrize("is_asked", [False, True], ids=["terminated by the rank", "a stop of all"])
def test_sigterm_in_a_process_that_a_rank_has_forked(is_asked: bool) -> None:
    """It ends as without jobkit, and the rank goes on: at the moment of its fork too, and where it waits in C."""
    page = Page.create()
    page.beat(1, Phase.STEPPING, 5)
    rank = os.fork()
    if rank == 0:
        take_stop_signals(page)
        if is_asked:
            page.ask_to_stop()
        codes = []
        for is_begun in (True, *[False] * 50):
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                signal.alarm(30)  # where SIGTERM is lost
                os.write(writing, b".")
                lock, wait = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
                wait(lock), wait(lock)
            if is_begun:
                os.read(reading, 1)
                time.sleep(0.5)  # until it waits
            os.kill(child, signal.SIGTERM)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            os.close(reading), os.close(writing)
            if codes[-1] != -signal.SIGTERM:
                break
        os._exit(0 if set(codes) == {-signal.SIGTERM} and page.stop_asked is is_asked else 1)
    assert os.waitpid(rank, 0)[1] == 0
