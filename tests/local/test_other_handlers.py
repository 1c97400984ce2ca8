"""Signal handlers of the script's own and of libraries: jobkit hears of a stop, names them, and calls them after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.project import status, wait_for

LIBRARY = """\
import signal

def on_term(number, frame):
    print("of the library", flush=True)

def replace():
    signal.signal(signal.SIGTERM, on_term)
"""

SCRIPT = """\
import signal, sys, time
import torch
import jobkit
from jobkit.worker.stop import STOP_SIGNALS
import LIBRARY as library


def of_my_own(number, frame):
    (run,) = __import__("pathlib").Path("runs").glob("plain-*")
    print("checkpoints:", sorted(path.name for path in run.glob("checkpoints/step_*")), flush=True)
    sys.exit(0)


BEFORE
ctx = jobkit.init(name="plain", runs_dir="runs")
model = ctx.parallelize(torch.nn.Linear(2, 2))
ctx.track(model=model)
AFTER
for step in ctx.steps(50):
    DURING
    if step == 3:
        open("begun", "w").close()
        while not STOP_SIGNALS.pending:
            time.sleep(0.01)
ctx.finish()
"""

OWN = "signal.signal(signal.SIGTERM, of_my_own)"


def stopped(folder: Path, *, library: str = "library", **parts: str) -> tuple[int, str]:
    """The exit code and the output of a script that gets SIGTERM in its fourth step."""
    (folder / f"{library}.py").write_text(LIBRARY)
    script = SCRIPT.replace("LIBRARY", library)
    for part in ("before", "after", "during"):
        script = script.replace(part.upper(), parts.get(part, "pass"))
    (folder / "train.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
    )
    wait_for("the fourth step", lambda: (folder / "begun").exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=300)
    (run,) = folder.glob("runs/plain-*")
    assert (status(run)["checkpoint"], status(run)["attempts"][0]["cause"]) == (4, "user"), printed
    return process.returncode, printed


def test_a_handler_from_before_init_is_called_when_the_checkpoint_is_durable(tmp_path: Path) -> None:
    code, printed = stopped(tmp_path, before=OWN)
    assert code == 75, "its sys.exit(0) does not make a stop a success"
    assert "checkpoints: ['step_00000004']" in printed and "jobkit has taken it back" not in printed


@pytest.mark.parametrize(
    ("place", "what", "named", "called"),
    [
        ("after", OWN, "__main__.of_my_own", "checkpoints: ['step_00000004']"),
        ("during", "library.replace()", "library.on_term", "of the library"),
    ],
)
def test_a_handler_that_takes_jobkits_place_is_named_once_and_called_too(
    tmp_path: Path, place: str, what: str, named: str, called: str
) -> None:
    during = {"during": "None if step != 2 else " + what} if place == "during" else {"after": what}
    code, printed = stopped(tmp_path, **during)
    assert code == 75
    assert printed.count(f"was given to another handler: {named}. jobkit has taken it back") == 1
    assert called in printed


def test_a_frameworks_handler_is_named_and_not_called(tmp_path: Path) -> None:
    code, printed = stopped(tmp_path, library="pytorch_lightning", after="library.replace()")
    assert code == 75 and "of the library" not in printed
    assert "pytorch_lightning.on_term. jobkit has taken it back, and does not call that one" in printed


def test_a_signal_that_was_given_back_to_the_system_is_taken_again(tmp_path: Path) -> None:
    code, printed = stopped(tmp_path, after="signal.signal(signal.SIGTERM, signal.SIG_DFL)")
    assert code == 75 and "another handler: the default. jobkit has taken it back" in printed
