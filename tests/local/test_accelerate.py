"""A loop of Hugging Face accelerate's Accelerator: stopped within an accumulation of gradients it goes on exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.examples import ACCELERATE, EXAMPLES
from harness.project import describe, logged_steps

LAST = "                optimizer.zero_grad()\n"
STOPPED = """\
            ctx.log({"train/loss": loss})
            if os.environ["STOP_AT"]:
                time.sleep(0.3)  # of steps so long the ranks agree on a stop after each
            if os.environ["STOP_AT"] == str(ctx.step):
                os.kill(os.getpid(), signal.SIGTERM)
"""
"""What a step ends with, of six in an epoch, and two in an accumulation."""


def train(folder: Path, script: str, *, stop_at: str = "", expect: int = 0) -> str:
    """Run it on two ranks of torchrun, which ends with 1 where they end with 75; returns what is printed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JOBKIT_CONFIG": "none", "STOP_AT": stop_at}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_script_of_accelerates_goes_on_between_two_accumulated_batches_as_if_it_had_not_stopped(
    tmp_path: Path,
) -> None:
    ACCELERATE.skip_without_packages()
    text = (EXAMPLES / "accelerate/after.py").read_text()
    assert LAST in text
    (tmp_path / "train.py").write_text("import os, signal, time\n" + text.replace(LAST, LAST + STOPPED))
    (tmp_path / "before.py").write_text((EXAMPLES / "accelerate/before.py").read_text())
    train(tmp_path, "before.py")
    before = (tmp_path / "weights.pt").read_bytes()
    (tmp_path / "weights.pt").unlink()

    # After the first batch of the second epoch.
    assert "stopped at step 7, its checkpoint is safe" in train(tmp_path, "train.py", stop_at="6", expect=1)
    train(tmp_path, "train.py")
    (run,) = (tmp_path / "runs").glob("train-*")
    assert (tmp_path / "weights.pt").read_bytes() == before, describe(run)
    assert logged_steps(run) == list(ACCELERATE.steps)
