"""Scripts with jobkit.init: under plain python, torchrun and a YAML's `command:`; and a YAML under torchrun."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness.runs import PATIENCE, Project, wait_until

# It has more steps than a test takes to interrupt it: those that nobody slows down take no time.
SCRIPT = """\
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
import jobkit
from training_task import Points, digest, mark, network

ctx = jobkit.init(name="script", params={"epochs": 12})
mark(ctx)
model = network()
if ctx.world_size > 1:
    model = ctx.parallelize(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Points(), batch_size=8, shuffle=True)
pause = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
for epoch in ctx.epochs(ctx.params.epochs, model=model, optimizer=optimizer):
    for x, y in ctx.batches(loader):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss})
        time.sleep(pause)
ctx.finish({"digest": digest(model.state_dict(), optimizer.state_dict()["state"])})
"""

WHILE_TRUE = """\
import torch
import jobkit

ctx = jobkit.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ctx.track(model=model, optimizer=optimizer)
updates = ctx.step
while True:
    ctx.boundary(updates)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    updates += 1
    if updates > 10:
        break
ctx.finish({"updates": updates})
"""

LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"],
    "torchrun of three": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable],
}


def project(folder: Path) -> Project:
    made = Project(folder, {**os.environ, "OMP_NUM_THREADS": "1"}, plain=False)  # two threads wait for a busy core
    shutil.copy(Path(__file__).parents[1] / "harness" / "training_task.py", folder)
    made.write("script.py", SCRIPT)
    return made


def start(made: Project, launcher: str, *arguments: str) -> subprocess.Popen[str]:
    words = [*LAUNCHERS[launcher], *(arguments or ["script.py"])]
    return subprocess.Popen(
        words, cwd=made.folder, env=made.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, output
    return output


def test_a_script_is_stopped_and_killed_and_goes_on_exactly(tmp_path: Path) -> None:
    straight = project(tmp_path / "straight")
    finish(start(straight, "python"))
    expected = straight.only_run().status.result
    made = project(tmp_path / "interrupted")
    process = start(made, "python", "script.py", "0.3")
    launch = made.only_run().wait_for_step(8)
    launch.project.jobkit("preempt", str(launch.run.path), "-y")
    process.communicate(timeout=PATIENCE)
    assert launch.causes == ["preempted"]
    second = start(made, "python", "script.py", "0.3")
    launch.wait_for_attempt(2).wait_for_step(launch.ends[0].last_step + 5)  # type: ignore[operator]
    launch.kill_rank(0)
    second.communicate(timeout=PATIENCE)
    made.begin_with("script.py", "import socket\nsocket.gethostname = lambda: 'elsewhere'\n")  # a scheduler's next node
    finish(start(made, "python"))
    assert launch.status.result == expected
    assert launch.status.state == "finished"
    assert "already finished" in finish(start(made, "python"))


def test_a_script_that_seeds_itself_computes_something_else_for_each_seed(tmp_path: Path) -> None:
    seeded = "seed = int(sys.argv[2])\n" + SCRIPT.replace('"epochs": 4})', '"epochs": 4, "seed": seed})')
    seeded = seeded.replace("mark(ctx)", "torch.manual_seed(seed)\nmark(ctx)")
    seeded = seeded.replace("import sys, time", "").replace("seed =", "import sys, time\nseed =", 1)
    results = []
    for folder, seed in (("first", "1"), ("second", "2"), ("killed", "1")):
        made = project(tmp_path / folder)
        made.write("script.py", seeded)
        if folder == "killed":
            process = start(made, "python", "script.py", "0.3", seed)
            made.only_run().wait_for_step(3).kill_rank(0)
            process.communicate(timeout=PATIENCE)
        output = finish(start(made, "python", "script.py", "0", seed))
        assert f"torch ({seed})" in output and "came before" not in output
        results.append(made.only_run().status.result)
    assert results[0] != results[1] and results[0] == results[2]


def test_a_script_keeps_the_seed_that_its_run_began_with(tmp_path: Path) -> None:
    """Runs from before `params.seed` counted have 0 in their config.yaml."""
    made = project(tmp_path)
    init = 'import jobkit, sys\nctx = jobkit.init(name="script", params={"seed": 3})\nprint(f"it is {ctx.seed}")\n'
    made.write("script.py", init + "if len(sys.argv) == 1: sys.exit(3)\nctx.finish({})\n")
    assert "it is 3" in finish(start(made, "python", "script.py"), 3)
    file = made.only_run().run.config_file
    file.write_text(file.read_text().replace("\nseed: 3\n", "\nseed: 0\n"))
    assert finish(start(made, "torchrun", "script.py", "again")).count("it is 0") == 2


def test_seeds_before_jobkit_init_are_named(tmp_path: Path) -> None:
    made = project(tmp_path)
    made.write("script.py", "import torch\ntorch.manual_seed(3)\n" + WHILE_TRUE)
    assert "torch.manual_seed(3) came before jobkit.init" in finish(start(made, "python"))


SHOWS_THREADS = """\
import json, os, sys
import torch
if "sets" in sys.argv: torch.set_num_threads(3)
import jobkit
ctx = jobkit.init(name="script") if "plain" not in sys.argv else None
found = {"threads": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS")}
print(json.dumps(found)) if ctx is None else ctx.finish(found)
"""

TASKS_OF_THREADS = """\
import torch
def train(ctx):
    return {"threads": torch.get_num_threads()}
"""


def test_a_script_has_torch_s_own_threads_or_those_it_sets(tmp_path: Path) -> None:
    def threads(word: str, *, is_command: bool = False) -> Any:
        made = project(tmp_path / word)
        del made.environment["OMP_NUM_THREADS"]
        made.write("script.py", SHOWS_THREADS)
        made.yaml.write_text(f"name: command\ncommand: [{sys.executable}, script.py, {word}]\n")
        if is_command:
            return made.submit("--local", "--detach").wait_until_over().status.result
        output = finish(start(made, "python", "script.py", word))
        return json.loads(output) if word == "plain" else made.only_run().status.result

    assert threads("as_it_is", is_command=True) == threads("plain")
    assert threads("sets") == {"threads": 3, "omp": None}


def test_a_task_has_as_many_threads_as_cores_unless_somebody_sets_others(tmp_path: Path) -> None:
    made = project(tmp_path)
    del made.environment["OMP_NUM_THREADS"]
    made.write("plainly.py", TASKS_OF_THREADS)
    made.write("sets.py", "import torch\ntorch.set_num_threads(1)\n" + TASKS_OF_THREADS)

    cores = (os.cpu_count() or 1) + 1  # a number that no library takes by itself

    def threads(task: str, *words: str) -> Any:
        made.yaml.write_text(f"name: threads\ntask: {task}:train\nresources: {{cpus_per_task: {cores}}}\n")
        return made.submit("--local", "--detach", "--fresh", *words).wait_until_over().status.result

    assert threads("sets") == threads("sets", "preload=[sets]") == {"threads": 1}
    assert threads("plainly") == {"threads": cores}
    finish(start(made, "python", "-m", "jobkit.worker", "exp.yaml", "--runs-dir", "elsewhere"))
    (folder,) = (made.folder / "elsewhere").glob("threads-*")
    assert made.launch(folder).status.result == {"threads": cores}
    made.environment["OMP_NUM_THREADS"] = "1"
    assert threads("plainly") == {"threads": 1}


def test_ctrl_c_saves_a_script_and_ends_it_with_75(tmp_path: Path) -> None:
    made = project(tmp_path)
    # The second signal comes from here: on a busy machine later than torchrun's.
    made.begin_with("script.py", "from jobkit.worker import signals\nsignals.ONE_CTRL_C_SECONDS = 60.0")
    process = start(made, "python", "script.py", "0.1")
    launch = made.only_run().wait_for_step(5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)  # torchrun sends the terminal's Ctrl-C once more
    output = finish(process, 75)
    assert "Traceback" not in output
    assert launch.status.state == "interrupted"
    refused = made.jobkit("resume", launch.run.name, check=False)
    assert (refused.returncode, "by python" in refused.stderr) == (2, True)
    assert "by python" in made.jobkit("status", launch.run.name).stdout
    assert launch.ends[0].durable_step == launch.ends[0].last_step
    for shard in launch.run.checkpoints.glob("step_*/*.safetensors"):
        shard.write_bytes(b"damaged")
    assert "Traceback" not in finish(start(made, "python"), 1)
    assert (launch.status.state, "fresh" in (launch.ends[1].error or "")) == ("failed", True)


def test_the_scripts_own_handlers_are_called_after_the_flag_is_set(tmp_path: Path) -> None:
    """One is set before jobkit.init, and one after it, which calls the one before it and exits."""
    made = project(tmp_path)
    before = """\
import signal
def note(word):
    with open("called", "a") as file: file.write(word + "\\n")
signal.signal(signal.SIGTERM, lambda *_: note("term"))
"""
    after = """\
old = signal.getsignal(signal.SIGUSR2)
def leave(*frame):
    note("usr2")
    old(*frame)
    sys.exit(0)
signal.signal(signal.SIGUSR2, leave)
model = network()
"""
    made.write("script.py", before + SCRIPT.replace("model = network()\n", after))
    called = made.folder / "called"
    for number, signum in enumerate((signal.SIGTERM, signal.SIGUSR2), start=1):
        process = start(made, "python", "script.py", "0.1")
        launch = made.only_run().wait_for_attempt(number)
        launch.wait_for_step((launch.run.durable_step() or 0) + 5)  # past the line that sets the second handler
        process.send_signal(signum)
        output = finish(process, 75)
        assert launch.ends[-1].durable_step == launch.ends[-1].last_step
        assert ("SystemExit(0)" in output) is (signum == signal.SIGUSR2)
    assert called.read_text() == "term\nusr2\n"
    finish(start(made, "python"))
    assert launch.status.state == "finished"


def test_a_closed_terminal_saves_a_script_that_prints(tmp_path: Path) -> None:
    made = project(tmp_path)
    made.write("script.py", SCRIPT.replace("time.sleep(pause)", "time.sleep(pause); print(ctx.step, flush=True)"))
    terminal, inner = pty.openpty()
    words = ["setsid", "--ctty", sys.executable, "script.py", "0.1"]
    process = subprocess.Popen(words, cwd=made.folder, env=made.environment, stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    launch = made.only_run().wait_for_step(5)
    os.close(terminal)
    assert process.wait(PATIENCE) == 75
    assert (launch.causes, launch.ends[0].durable_step) == (["stopped"], launch.ends[0].last_step)


def test_a_loop_that_breaks_after_a_step_counts_the_step(tmp_path: Path) -> None:
    """As nanoGPT's `if iter_num > max_iters: break`."""
    made = project(tmp_path)
    made.write("script.py", WHILE_TRUE)
    finish(start(made, "python"))
    launch = made.only_run()
    assert (launch.ends[0].last_step, launch.run.durable_step()) == (11, 11)
    assert launch.status.result == {"updates": 11}


def test_a_script_that_raises_has_its_error_in_the_journal(tmp_path: Path) -> None:
    made = project(tmp_path)
    made.write("script.py", SCRIPT.replace("time.sleep(pause)", "assert ctx.step < 6, 'a fault of the script'"))
    output = finish(start(made, "python"), 1)
    assert output.count("Traceback") == 1
    ended = made.only_run().ends[0]
    assert (ended.cause, ended.step) == ("crashed", 6)
    assert "a fault of the script" in str(ended.error)


def test_a_script_that_exits_before_its_end_has_not_finished(tmp_path: Path) -> None:
    made = project(tmp_path)
    made.write("script.py", SCRIPT.replace("    time.sleep(pause)", "    if ctx.step == 6: sys.exit(3)"))
    assert "without ctx.finish" in finish(start(made, "python"), 3)
    launch = made.only_run()
    assert (launch.status.state, launch.causes) == ("interrupted", ["crashed"])
    assert launch.ends[-1].last_step == 6
    made.write("script.py", SCRIPT)
    finish(start(made, "python"))
    assert launch.status.state == "finished"


def test_a_script_that_died_after_its_last_checkpoint_is_not_run_again(tmp_path: Path) -> None:
    made = project(tmp_path)
    made.write("script.py", SCRIPT + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    finish(start(made, "python"), -signal.SIGKILL)
    made.write("script.py", SCRIPT.replace("ctx.finish(", "ctx.finish(None) or print(loss, "))
    finish(start(made, "python"))
    assert "digest" in str(made.only_run().status.result)


def test_the_command_of_a_yaml_is_restarted_in_place(tmp_path: Path) -> None:
    made = project(tmp_path)
    made.yaml.write_text(
        f"name: command\ncommand: [{sys.executable}, script.py, '0.1']\nresources: {{tasks_per_node: 2}}\n"
    )
    script = SCRIPT.replace('name="script", params={"epochs": 12}', "").replace("ctx.params.epochs", "12")
    made.write("script.py", script)
    launch = made.submit("--local", "--detach")
    launch.wait_for_step(8).kill_rank(1)
    launch.wait_until_over()
    assert launch.causes == ["killed", "finished"]
    assert launch.ends[1].first_step is not None


def test_a_yaml_runs_under_torchrun(tmp_path: Path) -> None:
    made = project(tmp_path)
    made.yaml.write_text("name: training\ntask: training_task:train\nparams: {steps: 20}\n")
    output = finish(start(made, "torchrun", "-m", "jobkit.worker", "exp.yaml", "--runs-dir", "elsewhere"))
    (folder,) = (made.folder / "elsewhere").glob("training-*")
    assert made.launch(folder).status.state == "finished", output


def test_a_yaml_without_a_task_is_for_jobkit_init_and_mpirun_continues_what_torchrun_began(tmp_path: Path) -> None:
    results = []
    for name in ("straight", "interrupted"):
        made = project(tmp_path / name)
        made.yaml.write_text("name: script\nparams: {epochs: 12}\ncheckpoint: {every: 4}\n")
        made.write("script.py", SCRIPT.replace('name="script", params={"epochs": 12}', '"exp.yaml"'))
        if name == "interrupted":
            process = start(made, "torchrun", "script.py", "0.2")
            launch = made.only_run().wait_for_step(10)
            launch.wait_until(lambda me: me.run.durable_step(), "a checkpoint").kill_rank(1)
            process.communicate(timeout=PATIENCE)
            saved = launch.run.durable_step()
        finish(start(made, "mpirun"))
        results.append(made.only_run().status.result)
        assert name == "straight" or made.only_run().ends[-1].first_step == saved
    assert results[0] == results[1]


def test_ddp_of_a_script_itself_is_exact_on_three_ranks(tmp_path: Path) -> None:
    results = []
    for name in ("straight", "killed"):
        made = project(tmp_path / name)
        made.yaml.write_text("name: script\nparams: {epochs: 12}\ncheckpoint: {every: 4}\n")
        script = SCRIPT.replace('name="script", params={"epochs": 12}', '"exp.yaml"')
        made.write("script.py", script.replace("ctx.parallelize(", "nn.parallel.DistributedDataParallel("))
        if name == "killed":
            process = start(made, "torchrun of three", "script.py", "0.2")
            launch = made.only_run().wait_for_step(10)
            launch.wait_until(lambda me: me.run.durable_step(), "a checkpoint").kill_rank(1)
            process.communicate(timeout=PATIENCE)
            saved = launch.run.durable_step()
        finish(start(made, "torchrun of three"))
        results.append(made.only_run().status.result)
        assert name == "straight" or made.only_run().ends[-1].first_step == saved
    assert results[0] == results[1]


def test_a_rank_that_is_told_no_address_ends_with_a_line(tmp_path: Path) -> None:
    made = project(tmp_path)
    made.environment |= {"RANK": "0", "WORLD_SIZE": "2"}
    output = finish(start(made, "python"), 1)
    assert output.startswith("error: ") and "MASTER_ADDR" in output and "Traceback" not in output


FORKS = """\
import multiprocessing, os, sys, time
import torch
import jobkit

def fail():
    raise ValueError("the rank handles it")

def live(lives):
    lives.set()
    time.sleep(30)

def train(ctx):
    ctx.track(model=torch.nn.Linear(1, 1))
    for step in ctx.steps(6):
        if step == 3:
            codes = []
            for end in (fail, lambda: sys.exit(3)):
                process = os.fork()
                if process == 0:
                    end()
                codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
            lives = multiprocessing.Event()
            child = multiprocessing.get_context("fork").Process(target=live, args=(lives,))
            child.start()
            lives.wait()
            child.terminate()
            child.join()
            codes.append(child.exitcode)
            if ctx.world_size > 1:
                torch.distributed.barrier()
            folder = ctx.run_dir / "ends" / str(ctx.attempt)
            seen = [file.name for file in folder.glob("*")]
    return {"codes": codes, "ends": seen}

if __name__ == "__main__":
    ctx = jobkit.init(name="script")
    ctx.finish(train(ctx))
"""


def test_a_process_that_a_rank_forks_has_no_say_in_how_the_rank_ends(tmp_path: Path) -> None:
    """Nor does its SIGTERM stop the rank: it has the codes that it has without jobkit."""
    made = project(tmp_path)
    made.write("script.py", FORKS)
    finish(start(made, "python"))
    launch = made.only_run()
    made.yaml.write_text("name: task\ntask: script:train\nresources: {tasks_per_node: 3}\n")
    for one in (launch, made.submit("--local", "--detach").wait_until_over()):
        assert (one.causes, one.status.result) == (["finished"], {"codes": [1, 3, -15], "ends": []})


def test_sigterm_to_the_whole_group_saves_a_script_whose_loader_has_workers(tmp_path: Path) -> None:
    """Where a process that it has forked has ended, too."""
    made = project(tmp_path)
    forks = """\
    if epoch == 1 and os.fork() == 0:
        sys.exit(0)
    os.wait() if epoch == 1 else None
    for x, y in ctx.batches(loader):
"""
    script = SCRIPT.replace("shuffle=True", "shuffle=True, num_workers=2").replace("import sys", "import os, sys")
    made.write("script.py", script.replace("    for x, y in ctx.batches(loader):\n", forks))
    words = [sys.executable, "script.py", "0.1"]
    process = subprocess.Popen(
        words,
        cwd=made.folder,
        env=made.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # as torchrun and timeout start it
    )
    launch = made.only_run().wait_for_step(15)
    os.killpg(process.pid, signal.SIGTERM)
    finish(process, 75)
    assert launch.ends[0].durable_step == launch.ends[0].last_step
    killed = start(made, "python", "script.py", "0.1")
    launch.wait_for_attempt(2).wait_for_step(20)
    killed.kill()
    killed.communicate()
    finish(start(made, "python"))  # at once: the workers of the killed rank hold no lock of the run


VALIDATES = """\
import time
import torch
import jobkit
from torch.utils.data import DataLoader

ctx = jobkit.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = ctx.values(validated=0)
for epoch in ctx.epochs(3, model=model, optimizer=optimizer):
    for x in ctx.batches(DataLoader(torch.ones(8, 1))):
        model(x).sum().backward()
        optimizer.step()
        if ctx.attempt == 1 and ctx.step == 12:
            time.sleep(3600)
    time.sleep(12 if epoch == 0 else 0)
    state.validated += 1
ctx.finish({"validated": state.validated})
"""


def test_a_validation_longer_than_the_watchdog_is_no_hang_and_a_step_is(tmp_path: Path) -> None:
    made = project(tmp_path)
    made.write("validates.py", VALIDATES)
    made.write("v.yaml", "name: v\ncommand: [python, validates.py]\nwatchdog: 4s\ncheckpoint: {every: 2}\n")
    process = made.start("submit", "v.yaml", "--local")
    launch = made.only_run()
    since = wait_until(lambda: getattr(launch.run.progress(), "outside_since", None), "the validation is shown")
    assert since <= time.time()
    finish(process)
    assert (launch.causes, launch.ends[0].step) == (["hang", "finished"], 12)
    assert launch.status.result == {"validated": 3}
