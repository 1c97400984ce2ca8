"""jobkit.init(): a plain script gets the same context; tasks that would train apart are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.project import Project, events, logged_steps, status, step, wait_for

from jobkit.addresses import free_port
from jobkit.worker.startup import jobkit_snapshot

SCRIPT = """\
import time
import torch
import jobkit

ctx = jobkit.init(name="plain", params={"steps": 40}, runs_dir="runs")
model = ctx.parallelize(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
ctx.track(model=model, optimizer=optimizer)
for step in ctx.steps(ctx.params.steps):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    ctx.log({"train/loss": loss})
    time.sleep(SLEEP)
ctx.finish({"loss": loss.item()})
"""


def run_script(folder: Path, sleep: float, **environment: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT.replace("SLEEP", str(sleep)))
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, "train.py"], cwd=folder, env=env, text=True, stderr=subprocess.PIPE)


def test_a_plain_script_resumes_and_ends_with_the_uninterrupted_weights(tmp_path: Path) -> None:
    weights = []
    for folder, interrupted in ((tmp_path / "a", False), (tmp_path / "b", True)):
        folder.mkdir()
        if interrupted:
            process = run_script(folder, 0.05)
            wait_for("a run directory", lambda: list(folder.glob("runs/*/config.yaml")))  # noqa: B023
            (run,) = folder.glob("runs/plain-*")
            wait_for("some steps", lambda: step(run) >= 5, run)  # noqa: B023
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=600)
            assert process.returncode == 75
            assert status(run)["state"] == "interrupted"
        process = run_script(folder, 0.0)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        (run,) = folder.glob("runs/plain-*")
        assert status(run)["state"] == "finished"
        assert logged_steps(run) == list(range(40))
        weights.append((run / "final" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


SEES_AT_ONCE = "import jobkit.worker.disks\njobkit.worker.disks.LATE_SECONDS = 0.1  # no file server here\n"


def agents(folder: Path, sleep: float) -> list[subprocess.Popen[str]]:
    """torchrun as on two machines: each has a folder of its own, and no other disk."""
    port, started = free_port(), []
    for node in (0, 1):
        own = folder / f"node{node}"
        own.mkdir(exist_ok=True)
        (own / "train.py").write_text(SEES_AT_ONCE + SCRIPT.replace("SLEEP", str(sleep)))
        words = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *words, f"--master-port={port}", "train.py"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, cwd=own, env=env, text=True, stderr=subprocess.PIPE))
    return started


def test_two_machines_without_a_shared_disk_each_keep_a_copy_and_resume(tmp_path: Path) -> None:
    first = agents(tmp_path, 0.05)
    wait_for("a run", lambda: list(tmp_path.glob("node0/runs/*/config.yaml")) or first[0].poll() is not None)
    (run,) = tmp_path.glob("node0/runs/plain-*")
    wait_for("some steps", lambda: step(run) >= 5 or first[0].poll() is not None, run)
    first[0].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=600)[1] for process in first]
    assert status(run)["state"] == "interrupted", said
    second = agents(tmp_path, 0.0)
    said = [process.communicate(timeout=600)[1] for process in second]
    assert [process.returncode for process in second] == [0, 0], said
    stopped, resumed = status(run)["attempts"]
    assert resumed["first_step"] == stopped["last_step"] >= 5
    assert logged_steps(run) == list(range(40))
    for node in (0, 1):
        assert list(tmp_path.glob(f"node{node}/runs/plain-*/checkpoints/step_00000040/manifest.json"))


def test_ranks_that_name_different_yamls_are_refused(tmp_path: Path) -> None:
    for rank, precision in enumerate(("fp32", "bf16")):
        (tmp_path / f"of_rank_{rank}.yaml").write_text(f"name: plain\ntask: train:main\nprecision: {precision}\n")
    names = "import os, jobkit\njobkit.init(f'of_rank_{os.environ[\"RANK\"]}.yaml', runs_dir='runs')\n"
    (tmp_path / "train.py").write_text(names)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=600)
    assert done.returncode == 1
    assert "was given another precision" in done.stderr
    assert not list(tmp_path.glob("runs/*/status.json"))


def test_an_exception_in_a_plain_script_is_journalled_as_failed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("SLEEP", "0").replace("loss.backward()", "1 / 0"))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, text=True, capture_output=True, timeout=600)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    (run,) = tmp_path.glob("runs/plain-*")
    assert status(run)["state"] == "failed"
    assert "ZeroDivisionError" in status(run)["error"]


HELD = """\
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
total = torch.ones(1)
free = sys.getrefcount(total)
sys.setswitchinterval(1000)  # no thread gets Python's lock unless this one gives it away, as on a busy machine
held = False
while not held:
    dist.all_reduce(total, async_op=True)
    soon = time.monotonic() + 0.2
    while time.monotonic() < soon:  # the work is done, and its thread wants the lock to free the tensor
        pass
    held = sys.getrefcount(total) > free
END
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the states of threads are read from /proc")
@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(75)", 75), ("1 / 0", 1)])
def test_a_thread_that_still_frees_a_tensor_does_not_change_the_exit_code(tmp_path: Path, end: str, code: int) -> None:
    (tmp_path / "held.py").write_text(HELD.replace("END", end))
    # As in a `command:` of a job; a script with jobkit.init waits by itself.
    environment = {**os.environ, **jobkit_snapshot.environment(str(tmp_path), str(tmp_path / "code"), os.environ)}
    command = [sys.executable, "held.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=600)
    assert done.returncode == code, done.stderr


def test_the_last_thing_a_script_does_is_to_wait_for_pytorchs_threads(tmp_path: Path) -> None:
    told = "from jobkit.worker.startup import jobkit_torch_threads as threads\n"
    told += "threads._states = lambda: print('waits') or []\n"
    closes = "import jobkit.worker.script as script\nscript.ScriptEnd.run = lambda *_: print('ends')\n"
    script = SCRIPT.replace("import jobkit\n", f"import jobkit\n{told}{closes}").replace("SLEEP", "0")
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, text=True, capture_output=True, timeout=600)
    assert done.stdout.split()[-2:] == ["ends", "waits"], done.stderr


OWN_HOOK = "sys.excepthook = lambda kind, error, trace: print('shown by a hook of its own', file=sys.stderr)\n"
SHOWN = "sys.excepthook(ValueError, ValueError('no reason to end'), None)\n"


@pytest.mark.parametrize(
    ("inserted", "end", "code", "state"),
    [(OWN_HOOK, "1 / 0", 1, "failed"), (SHOWN, "loss.backward()", 0, "finished")],
    ids=["replaced", "called"],
)
def test_an_exception_hook_of_a_script_changes_nothing_about_how_it_ended(
    tmp_path: Path, inserted: str, end: str, code: int, state: str
) -> None:
    script = SCRIPT.replace("SLEEP", "0").replace("loss.backward()", end).replace("model =", f"{inserted}model =")
    (tmp_path / "train.py").write_text(f"import sys\n{script}")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, text=True, capture_output=True, timeout=600)
    assert done.returncode == code, done.stderr
    (run,) = tmp_path.glob("runs/plain-*")
    ends = [event["event"] for event in events(run) if event["event"] in ("failed", "interrupted", "finished")]
    assert ends == [state] and status(run)["state"] == state
    assert state == "failed" or logged_steps(run) == list(range(40))


WRITES_SLOWLY = """\
import time
from jobkit.checkpoint.storage import ChecksummedFile

write = ChecksummedFile.write

def write_slowly(self, data):
    time.sleep(0.05)
    write(self, data)

ChecksummedFile.write = write_slowly
"""


@pytest.mark.parametrize(
    ("end", "code", "state"), [("1 / 0", 1, "failed"), ("raise SystemExit", 0, "interrupted")], ids=["error", "exit"]
)
def test_a_checkpoint_under_way_when_a_script_ends_early_becomes_durable(
    tmp_path: Path, end: str, code: int, state: str
) -> None:
    # The last step comes right after a checkpoint was begun.
    script = SCRIPT.replace("SLEEP", "0").replace("loss.backward()", f"if step == 39: {end}\n    loss.backward()")
    (tmp_path / "train.py").write_text(WRITES_SLOWLY + script)
    assert subprocess.run([sys.executable, "train.py"], cwd=tmp_path, timeout=600).returncode == code
    (run,) = tmp_path.glob("runs/plain-*")
    assert ("checkpoint", 39) in [(event["event"], event.get("step")) for event in events(run)]
    assert (run / "checkpoints" / "step_00000039").exists()
    assert status(run)["state"] == state


CLOSES_ITS_CONNECTIONS_FIRST = """\
if ctx.rank == 1 and step == 3:
        import contextlib, os, socket
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                connection = socket.socket(fileno=os.dup(fd))
                connection.getpeername()  # not one that listens
                connection.shutdown(socket.SHUT_RDWR)
        while not (ctx.run_dir / "logs" / "1" / "error_0.json").exists():
            time.sleep(0.05)
        raise ValueError("the cause")
    loss.backward()"""


def test_a_rank_that_only_lost_its_connection_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("SLEEP", "0").replace("loss.backward()", CLOSES_ITS_CONNECTIONS_FIRST)
    )
    family = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env={**os.environ, **family, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=600)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1], said
    (run,) = tmp_path.glob("runs/plain-*")
    reports = [json.loads((run / "logs" / "1" / f"error_{rank}.json").read_text()) for rank in (0, 1)]
    assert reports[0]["time"] < reports[1]["time"] and "ValueError" not in reports[0]["error"]
    (failed,) = [event for event in events(run) if event["event"] == "failed"]
    assert failed["error"] == "rank 1: ValueError: the cause" and failed["failure"]["rank"] == 1
    assert status(run)["state"] == "failed"


def test_several_tasks_that_would_each_train_alone_are_an_error(tmp_path: Path) -> None:
    process = run_script(tmp_path, 0.0, OMPI_COMM_WORLD_SIZE="4")
    _, errors = process.communicate(timeout=600)
    assert process.returncode != 0 and "Traceback" not in errors and "OMPI_COMM_WORLD_SIZE=4" in errors
    assert not list(tmp_path.glob("runs/*"))


OWN_LOOP = """\
import torch
def train(ctx):
    model = ctx.parallelize(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel=zero1", "make it by ctx.optimizer"),
        ("precision=fp16", "use ctx.backward"),
        ("comm.local_sgd=2", "by ctx.update"),
    ],
)
def test_a_loop_that_would_not_do_what_the_yaml_asks_for_is_refused(tmp_path: Path, override: str, said: str) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(OWN_LOOP)
    done = project.jobkit("submit", "toy.yaml", "--local", "resources.nodes=1", "retry.crash=1", override, expect=1)
    assert said in done.stderr


def test_an_optimizer_that_would_be_saved_in_part_is_refused(tmp_path: Path) -> None:
    project = Project(tmp_path)
    own = "torch.distributed.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)"
    text = OWN_LOOP.replace("torch.optim.AdamW(model.parameters())", own)
    (project.path / "mytask.py").write_text("import torch.distributed.optim\n" + text)
    done = project.jobkit("submit", "toy.yaml", "--local", "resources.nodes=1", "retry.crash=1", expect=1)
    assert "of your own would be saved in part" in done.stderr


def test_a_mistake_in_a_script_is_told_in_a_line_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        'import jobkit\nctx = jobkit.init(params={}, runs_dir="runs", gpus=0)\nctx.batches([1])\n'
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, text=True, capture_output=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"error: {tmp_path}/train.py:3: ctx.batches belongs into `for epoch in ctx.epochs" in done.stderr


def test_another_script_of_the_same_name_is_another_run(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "JOBKIT_RUNS": str(tmp_path / "runs")}
    lines = "import jobkit\nctx = jobkit.init(params={}, gpus=0)\nfor _ in ctx.steps(2): pass\nctx.finish()\n"
    codes = []
    for folder, more in (("a", ""), ("b", "# other"), ("copy", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(lines + more)
        command = [sys.executable, f"{folder}/train.py"]
        done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True)
        codes.append(done.returncode)
        if folder == "b":
            assert f"is a run of {tmp_path}/a/train.py, and this is {tmp_path}/b/train.py" in done.stderr
    assert codes == [0, 1, 0]
