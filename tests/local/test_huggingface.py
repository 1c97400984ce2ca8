"""Hugging Face's Trainer under jobkit: interrupted, it ends with the bits that a script without jobkit ends with."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from harness.adopted import INTERRUPT, KILL_RANK, PYTHON, Adopted, Launch, assert_equal, submitted, torchrun
from harness.project import causes, events, status
from harness.reference import made_once

SCRIPT = (Path(__file__).parents[1] / "harness" / "trainer_script.py").read_text()

PLAIN = (
    SCRIPT.replace("from jobkit.huggingface import JobkitCallback\n", "")
    .replace("trainer.add_callback(job := JobkitCallback(trainer))\n", "")
    .replace("trainer.train(resume_from_checkpoint=job.checkpoint)", "trainer.train()")
)
"""The script that has never heard of jobkit."""

PERSISTENT = "dict(eval_strategy='epoch', save_strategy='epoch', dataloader_persistent_workers=True)"


@pytest.fixture
def whole(tmp_path_factory: pytest.TempPathFactory) -> Adopted:
    """The script on one rank, uninterrupted."""
    folder = made_once(tmp_path_factory, "trainer", lambda folder: Adopted(folder, SCRIPT).run(PYTHON))
    return Adopted(folder, SCRIPT)


def test_a_script_is_brought_under_jobkit_by_three_lines() -> None:
    changed = set(SCRIPT.splitlines()) - set(PLAIN.splitlines())
    assert len(changed) == 3 and len(set(PLAIN.splitlines()) - set(SCRIPT.splitlines())) == 1
    assert "jobkit" not in PLAIN.partition('"""')[2].partition('"""')[2]


@pytest.mark.parametrize(
    ("environment", "launch", "stops"),
    [
        pytest.param({"DATA": "stream"}, torchrun(2), [11], id="stream-2-ranks"),
        pytest.param({"WORKERS": "1", "EXTRA": PERSISTENT}, PYTHON, [5, 11], id="persistent-workers"),
    ],
)
def test_ctrl_c_changes_no_bit_and_no_point(
    tmp_path: Path, environment: dict[str, str], launch: Launch, stops: list[int]
) -> None:
    plain = Adopted(tmp_path / "plain", PLAIN, environment)
    plain.run(launch)
    whole = Adopted(tmp_path / "whole", SCRIPT, environment)
    whole.run(launch)
    trained = (tmp_path / "plain" / "out" / "model.safetensors").read_bytes()
    assert whole.weights()["out/model.safetensors"] == trained
    stopped = Adopted(tmp_path / "stopped", SCRIPT, environment)
    for steps in stops:
        assert stopped.interrupt(launch, steps, INTERRUPT) == (75 if launch is PYTHON else 1), stopped.output
    stopped.run(launch)
    assert causes(stopped.run_dir) == ["user"] * len(stops) + ["finished"]
    attempts = status(stopped.run_dir)["attempts"]
    assert all(one["last_step"] == two["first_step"] for one, two in pairwise(attempts)), "a stop repeats nothing"
    assert_equal(whole, stopped)


def test_a_killed_rank_repeats_some_steps_and_logs_none_twice(tmp_path: Path) -> None:
    whole = Adopted(tmp_path / "whole", SCRIPT)
    whole.run(submitted(2))
    killed = Adopted(tmp_path / "killed", SCRIPT)
    assert killed.interrupt(submitted(2), 5, KILL_RANK) == 0, killed.output
    assert causes(killed.run_dir) == ["killed", "finished"]
    assert_equal(whole, killed)


STOPS_IN_EVALUATION = """\
import signal
class StopsInEvaluation(transformers.TrainerCallback):
    def on_prediction_step(self, args, state, control, **_):
        if state.global_step == 8 and not os.path.exists("stopped"):
            open("stopped", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
trainer.add_callback(StopsInEvaluation())
trainer.add_callback(job"""


def test_a_stop_does_not_wait_for_the_end_of_an_evaluation_and_repeats_it_alone(tmp_path: Path, whole: Adopted) -> None:
    stopped = Adopted(
        tmp_path / "stopped",
        "import transformers\n" + SCRIPT.replace("trainer.add_callback(job", STOPS_IN_EVALUATION),
    )
    stopped.run(PYTHON, expect=75)
    assert status(stopped.run_dir)["step"] == 8
    assert 8 not in [step for step, _ in stopped.points()["eval/loss"]]
    stopped.run(PYTHON)
    assert_equal(whole, stopped)


def test_an_early_stop_is_the_same_early_stop(tmp_path: Path) -> None:
    environment = {"EARLY": "1", "EXTRA": "dict(num_train_epochs=9)"}
    whole = Adopted(tmp_path / "whole", SCRIPT, environment)
    whole.run(PYTHON)
    stopped = Adopted(tmp_path / "stopped", SCRIPT, environment)
    assert stopped.interrupt(PYTHON, 14, INTERRUPT) == 75
    stopped.run(PYTHON)
    assert status(whole.run_dir)["step"] < 9 * 13
    assert_equal(whole, stopped)


DIES_AFTER_TRAINING = 'assert os.path.exists("again") or not open("again", "w")\nprint("evaluated:"'


def test_what_follows_the_training_is_repeated_alone_and_a_script_that_ends_has_finished(
    tmp_path: Path, whole: Adopted
) -> None:
    died = Adopted(tmp_path / "died", SCRIPT.replace('print("evaluated:"', DIES_AFTER_TRAINING))
    died.run(PYTHON, expect=1)
    assert status(died.run_dir)["state"] == "failed"
    died.run(PYTHON)
    assert status(died.run_dir)["attempts"][1]["first_step"] == status(whole.run_dir)["step"]
    assert_equal(whole, died)
    (finished,) = [event for event in events(died.run_dir) if event["event"] == "finished"]
    assert finished["result"].keys() == {"train_loss", "eval_loss"}


def test_trainers_own_handler_of_signals_and_its_own_curves_are_replaced(tmp_path: Path) -> None:
    stopped = Adopted(tmp_path, SCRIPT, {"EXTRA": "dict(enable_jit_checkpoint=True)"})
    assert stopped.interrupt(PYTHON, 3, INTERRUPT) == 75
    assert "enable_jit_checkpoint is off: at SIGTERM jobkit saves a checkpoint" in stopped.output
    assert not list((tmp_path / "out").glob("**/events.out.tfevents.*"))
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_training_that_is_not_given_the_checkpoint_is_told_what_to_write(tmp_path: Path) -> None:
    forgets = Adopted(tmp_path, SCRIPT.replace("resume_from_checkpoint=job.checkpoint", ""))
    assert forgets.interrupt(PYTHON, 3, INTERRUPT) == 75
    forgets.run(PYTHON, expect=1)
    assert "trainer.train(resume_from_checkpoint=job.checkpoint)" in forgets.output


def test_without_transformers_the_import_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('No module named transformers')")
    command = [sys.executable, "-c", "import jobkit.huggingface"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=600)
    assert done.stderr.splitlines()[-1].endswith("in the clone of jobkit, pip install '.[huggingface]'")
