"""Mistakes and accidents within a training function: nothing is lost, and the reason is named."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from harness.runs import Launch, Project, wait_until
from harness.small_disk import SmallDisk
from harness.training import points

from jobkit.wire.pages import Phase

TASK = """\
import signal
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training_task import mark

X = torch.linspace(0, 1, 64)[:, None]

def parts(ctx, width=4):
    model = ctx.parallelize(nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1)))
    optimizer = ctx.optimizer(model, torch.optim.AdamW)
    loader = ctx.loader(TensorDataset(X, X), global_batch_size=8)
    return model, optimizer, loader

def swallows(ctx):
    model, optimizer, loader = parts(ctx)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    try:
        for step in ctx.steps(100_000):
            ctx.log({"x": step})
            time.sleep(0.02)
    finally:
        return {"swallowed": True}

def breaks(ctx):
    model, optimizer, loader = parts(ctx)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(1000):
        ctx.log({"x": step})
        if step == 5:
            break
    return {"step": ctx.step}

def nan(ctx):
    model, optimizer, loader = parts(ctx)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(1000):
        x, y = next(loader)
        if step == 7 and ctx.rank == 1:
            x = x * float("nan")
        loss = ctx.backward(model, (x, y), nn.functional.mse_loss)
        ctx.update(optimizer)

def untracked(ctx):
    model, optimizer, loader = parts(ctx)
    ctx.track(model=model, loader=loader)
    for step in ctx.steps(10): pass

def other_optimizer(ctx):
    model, _, loader = parts(ctx)
    ctx._parallelizer.optimizers.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, loader=loader)
    for step in ctx.steps(10):
        ctx.backward(model, next(loader), nn.functional.mse_loss)
        optimizer.step()

def raises(ctx):
    model, optimizer, loader = parts(ctx)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(1000):
        assert step < 6

def nothing(ctx):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in ctx.steps(10):
        model(X).sum().backward()
        optimizer.step()

def a_loader(ctx):
    ctx.track(loader=torch.utils.data.DataLoader(X))

def a_float(ctx):
    ctx.track(best=0.5)

def lazy(ctx):
    ctx.track(model=ctx.parallelize(nn.LazyLinear(1)))

def exits(ctx):
    raise SystemExit(0)

def not_parallel(ctx):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ctx.loader(TensorDataset(X, X.sin()), global_batch_size=8)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(10, every={dict: 5}):
        x, y = next(loader)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

def zipped(ctx):
    model = ctx.parallelize(nn.Linear(1, 1))
    loader = torch.utils.data.DataLoader(X, batch_size=8)
    for epoch in ctx.epochs(2, model=model):
        for batch in ctx.batches(loader):
            break
        for batches in zip(ctx.batches(loader), ctx.batches(loader)): pass

def cycle(ctx):
    model = ctx.parallelize(nn.Linear(1, 1))
    loader = torch.utils.data.DataLoader(X, batch_size=8)
    def batches():
        for epoch in ctx.epochs(2, model=model):
            yield from ctx.batches(loader)
    endless = batches()
    for step in range(100):
        next(endless)

def two_loops(ctx):
    model, optimizer, loader = parts(ctx)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(2): pass
    for step in ctx.steps(4): pass

def second_edition(ctx):
    model, optimizer, loader = parts(ctx)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(2):
        x, y = next(loader)
        ctx.backward(model, x, nn.functional.mse_loss, y)

def no_loss(ctx):
    model, optimizer, loader = parts(ctx)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(2):
        ctx.backward(model, next(loader), 0.5)

def unknown_option(ctx):
    ctx.steps(2, evry={dict: 1})

def handles(ctx):
    mark(ctx)
    model = ctx.parallelize(nn.Linear(1, 1))
    ctx.track(model=model)
    called = ctx.run_dir / f"called-{ctx.attempt}"
    signal.signal(signal.SIGTERM, lambda *_: open(called, "a").write("x"))
    try:
        for step in ctx.steps(100_000):
            time.sleep(0.02)
    finally:
        while ctx.attempt < 3 and not called.exists():  # the agent sets the flag first: a quick save may be over before
            time.sleep(0.02)

def big(ctx):
    mark(ctx)
    model = ctx.parallelize(nn.Linear(700, 700))
    ctx.track(model=model)
    for step in ctx.steps(ctx.params.steps):
        time.sleep(0.02)
    return {"step": ctx.step}
"""
YAML = "name: faults\ntask: faults_task:{task}\nparams: {{steps: 60}}\nresources: {{tasks_per_node: {ranks}}}\n"


def run(folder: Path, task: str, ranks: int = 1, more: str = "", *words: str) -> Launch:
    made = Project(folder, yaml=YAML.format(task=task, ranks=ranks) + more, plain=False)
    write(made)
    return made.submit("--local", "--detach", *words)


def write(made: Project) -> None:
    made.write("faults_task.py", TASK)
    shutil.copy(Path(__file__).parents[1] / "harness" / "training_task.py", made.folder)


def test_a_stop_that_is_swallowed_is_a_stop(tmp_path: Path) -> None:
    launch = run(tmp_path, "swallows").wait_for_step(20)
    launch.project.jobkit("cancel", "-y", str(launch.run.path))
    launch.wait_until_over()
    assert launch.status.state == "cancelled"
    assert launch.ends[0].durable_step == launch.ends[0].last_step


def test_a_break_leaves_a_step_that_is_done(tmp_path: Path) -> None:
    launch = run(tmp_path, "breaks").wait_until_over()
    assert launch.status.result == {"step": 6}
    assert launch.run.durable_step() == launch.ends[0].last_step == 6
    assert points(launch, "x") == list(range(6))


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(tmp_path: Path) -> None:
    launch = run(tmp_path, "nan", 2, "checkpoint: {every: 1, memory: off}\n").wait_until_over()
    ended = launch.ends[-1]
    assert (launch.status.state, len(launch.ends)) == ("failed", 1)
    assert "step 7" in str(ended.error)
    assert ended.samples is not None
    assert launch.run.durable_step() == 7  # of the steps 0 to 6


def test_an_error_is_of_the_step_in_which_it_was_raised(tmp_path: Path) -> None:
    launch = run(tmp_path, "raises", 1, "retry: {crash: 0}\n").wait_until_over()
    assert (launch.ends[0].step, launch.ends[0].last_step) == (6, 6)


def test_an_interface_of_the_users_shell_that_is_not_here_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    launch = run(tmp_path, "breaks", 2).wait_until_over()
    assert (launch.status.state, len(launch.ends)) == ("failed", 1)
    assert "GLOO_SOCKET_IFNAME=nosuch0" in str(launch.ends[0].error)


MISTAKES = {
    "untracked": "the optimizer of ctx.optimizer is not tracked",
    "other_optimizer": "changes the tracked model and is not tracked",
    "nothing": "nothing is tracked",
    "a_loader": "ctx.batches(loader)",
    "a_float": "ctx.values(best=...)",
    "lazy": "model.weight has no values yet",
    "exits": "the training function called sys.exit",
    "two_loops": "one loop",
    "zipped": "ctx.batches(a, b)",
    "second_edition": "ctx.backward(model, (x, y), loss)",
    "no_loss": "a float as loss",
    "cycle": "next() asked for another batch",
    "unknown_option": "it is ctx.steps(total, every=None)",
}


@pytest.mark.parametrize("task", MISTAKES)
def test_a_mistake_is_one_line_and_is_not_retried(tmp_path: Path, task: str) -> None:
    launch = run(tmp_path, task).wait_until_over()
    ended = launch.ends[-1]
    assert (launch.status.state, len(launch.ends), ended.final) == ("failed", 1, True)
    assert MISTAKES[task] in str(ended.error)
    assert ended.traceback is None
    assert "Traceback" not in launch.run.rank_log(1, 0, "err").read_text()


def test_handlers_of_the_task_and_of_an_import_keep_no_signal_from_the_run(tmp_path: Path) -> None:
    made = Project(tmp_path, yaml=YAML.format(task="handles", ranks=1) + "preload: [grabs]\n", plain=False)
    write(made)
    made.write("grabs.py", "import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\n")
    launch = made.submit("--local", "--detach").wait_for_step(5)
    os.kill(launch.agent_pid(), signal.SIGTERM)
    launch.wait_for_attempt(2).wait_until(lambda me: me.step > launch.ends[0].last_step, "steps")
    os.kill(launch.rank_pid(0), signal.SIGTERM)
    launch.wait_until(lambda me: len(me.ends) == 2, "the rank to save")
    for end in launch.ends:
        assert end.durable_step == end.last_step
        assert (launch.run.path / f"called-{end.attempt}").read_text() == "x", "the agent passes it on, once"
    launch.project.jobkit("cancel", "-y", launch.run.name)


def test_a_model_that_each_rank_trains_alone_is_refused(tmp_path: Path) -> None:
    launch = run(tmp_path, "not_parallel", 2, "checkpoint: {every: 1, memory: 1}\n").wait_until_over()
    assert (launch.status.state, len(launch.ends)) == ("failed", 1)
    assert "comes from ctx.parallelize" in str(launch.ends[0].error)


def test_on_a_full_disk_the_oldest_checkpoint_gives_way_and_training_goes_on(tmp_path: Path) -> None:
    with SmallDisk(
        tmp_path / "disk", megabytes=9
    ):  # a checkpoint has 2 MB: with four of them, and `final/`, it is full
        more = "checkpoint: {every: 10, memory: off, keep: 5}\n"
        launch = run(tmp_path / "project", "big", 1, more, "--runs-dir", str(tmp_path / "disk/runs")).wait_until_over()
        assert launch.status.state == "finished"
        steps = sorted(int(path.name[5:]) for path in launch.run.checkpoints.glob("step_*"))
        assert steps[-1] == 60
        assert len(steps) < 5
        progress = launch.run.progress()
        assert progress is not None
        assert any("gave way" in warning for warning in progress.warnings)


FULL = "checkpoint: {every: 25, memory: off, keep: 1}\n"


def test_training_waits_for_room_after_three_missed_checkpoints_and_goes_on(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "disk", megabytes=9) as disk:
        words = ("--runs-dir", str(tmp_path / "disk/runs"), "params.steps=400")
        launch = run(tmp_path / "project", "big", 3, FULL, *words)
        launch.wait_until(lambda me: me.run.durable_step(), "the first checkpoint")
        pages = [launch.page(rank) for rank in range(3)]
        disk.fill()
        for page in pages:
            wait_until(lambda page=page: page.read().phase is Phase.SAVING, "a rank to wait")
        saved = launch.run.durable_step() or 0
        assert {page.read().step for page in pages} == {saved + 75}, "two missed, and the third is waited for"
        disk.empty()
        launch.wait_until_over()
        assert (launch.status.state, launch.causes, launch.status.result) == ("finished", ["finished"], {"step": 400})
        assert launch.run.durable_step() == 400


def test_a_job_gives_up_a_state_that_the_disk_does_not_take(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", yaml=YAML.format(task="big", ranks=3) + FULL, plain=False)
    write(project)
    for module in ("jobkit.supervisor.main", "jobkit.agent.agent"):
        project.begin_with(module, "from jobkit import disk\ndisk.FULL_DISK_SECONDS = 2.0\n")
    with SmallDisk(tmp_path / "disk", megabytes=9) as disk:
        words = ("--local", "--detach", "--runs-dir", str(tmp_path / "disk/runs"), "params.steps=100000")
        launch = project.submit(*words, "--notify", "echo $JOBKIT_STATE >>told")
        launch.wait_until(lambda me: me.run.durable_step(), "the first checkpoint")
        disk.fill()
        wait_until(lambda: not launch.run.alive_lock().is_held(), "the end of the job")
        assert (launch.status.state, launch.causes) == ("interrupted", ["disk"]), "its journal had room for a line"
        assert (project.folder / "told").read_text() == "interrupted\n"
        saved = launch.run.durable_step() or 0
        disk.empty()
        launch = project.submit(*words)
        launch.wait_for_step(saved + 30)
        assert (len(launch.status.attempts), launch.status.state) == (2, "running")
        progress = launch.run.progress()
        assert progress is not None and progress.first_step == saved
        project.jobkit("cancel", "-y", "--no-grace", str(launch.run.path))


def test_an_error_of_the_writers_thread_ends_the_rank(tmp_path: Path) -> None:
    project = Project(tmp_path, yaml=YAML.format(task="broken", ranks=1) + "retry: {crash: 1}\n", plain=False)
    write(project)
    project.write(
        "faults_task.py",
        TASK
        + """
def broken(ctx):
    def publish(*_):
        raise RuntimeError("a bug of the writer")
    ctx._checkpointer.store.publish = publish
    return big(ctx)
""",
    )
    launch = project.submit("--local", "--detach", steps=10).wait_until_over()
    assert launch.status.state == "failed"
    assert "a bug of the writer" in launch.run.rank_log(1, 0, "err").read_text()
