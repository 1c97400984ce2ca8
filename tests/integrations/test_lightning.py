"""Lightning's Trainer under jobkit: exact in the middle of an epoch, as a task and as a script."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.runs import PATIENCE, Project
from harness.training import points

HERE = Path(__file__).parent
FILES = (HERE / "lightning_task.py", HERE.parent / "harness" / "training_task.py")


def project(folder: Path, yaml: str = "") -> Project:
    made = Project(folder, yaml=yaml, plain=False)
    for file in FILES:
        shutil.copy(file, folder)
    return made


@pytest.mark.parametrize(
    ("task", "ranks", "unseen"),
    [("automatic", 3, []), ("accumulated", 1, []), ("gan", 1, []), ("stream", 1, ["samples"])],
)
def test_a_trainer_is_exact_in_the_middle_of_an_epoch(tmp_path: Path, task: str, ranks: int, unseen: list[str]) -> None:
    yaml = f"name: {task}\ntask: lightning_task:{task}\npreload: [lightning]\nresources: {{tasks_per_node: {ranks}}}\n"
    made = project(tmp_path, yaml)
    done = made.jobkit("verify", str(made.yaml), "--local", "--steps", "15", "--json", check=False)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert (report["equal"], report["missing"]) == (True, ["evaluation"]), report
    assert ["samples"] * any("not seen" in line for line in report["lines"]) == unseen


SCRIPT = """\
import sys
import jobkit
from lightning_task import script
ctx = jobkit.init(name="script", params={"epochs": 4})
ctx.params = {"pause": float(sys.argv[1])}
ctx.finish(script(ctx))
"""


def start(made: Project, *words: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    words = (sys.executable, "script.py", *words)
    return subprocess.Popen(words, cwd=made.folder, env=made.environment, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


def test_a_script_with_a_trainer_is_stopped_and_killed_and_goes_on_exactly(tmp_path: Path) -> None:
    straight, made = project(tmp_path / "straight"), project(tmp_path / "interrupted")
    for place in (straight, made):
        place.write("script.py", SCRIPT)
    code, output = finish(start(straight, "0"))
    assert code == 0, output
    expected = straight.only_run()

    process = start(made, "0.3")
    launch = made.only_run().wait_for_step(14)
    made.jobkit("preempt", str(launch.run.path), "-y")
    code, output = finish(process)
    assert (code, "Traceback" in output) == (75, False), output

    made.write("script.py", SCRIPT.replace("script(ctx)", "script(ctx, resumes=False)"))
    code, output = finish(start(made, "0"))
    assert (code, "ckpt_path=job.checkpoint" in output) == (1, True), output

    made.write("script.py", SCRIPT)
    second = start(made, "0.3")
    launch.wait_for_attempt(3).wait_for_step(launch.ends[0].last_step + 4)  # type: ignore[operator]
    second.kill()
    assert finish(second)[0] != 0
    code, output = finish(start(made, "0"))
    assert code == 0, output
    assert launch.status.result == expected.status.result
    assert launch.status.result is not None
    assert {"val_loss", "train/error", "digest", "scores"} <= set(launch.status.result)
    assert "hydra.run.dir" in output
    for tag in ("train/loss_step", "train/loss_epoch", "val_loss"):
        assert points(launch, tag) == points(expected, tag)
    assert len(points(launch, "train/loss_step")) == 48


def test_a_trainer_that_does_not_fit_the_run_is_refused(tmp_path: Path) -> None:
    made = project(tmp_path)
    made.write("script.py", SCRIPT.replace("script(ctx)", "script(ctx, devices=2)"))
    code, output = finish(start(made, "0"))
    assert (code, "tasks_per_node" in output, output.count("Traceback")) == (1, True, 0), output
    trainer = "import lightning_task; fit = lightning_task.L.Trainer.fit\n"
    twice = "lightning_task.L.Trainer.fit = lambda *a, **k: (fit(*a, **k), fit(*a, **k))\n"
    made.write("script.py", trainer + twice + SCRIPT)
    code, output = finish(start(made, "0"))
    assert (code, "second trainer.fit" in output) == (1, True), output
