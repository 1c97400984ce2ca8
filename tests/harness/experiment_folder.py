"""A folder with the experiments in it, and what a user types there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from jobkit.run.experiment import load

ROOT = Path(__file__).parents[2]

SCRIPT = """\
import json, os, signal, sys
import jobkit
from experiments.{experiment} import sample, train

name, params, stop_after = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])


def {writer}(*arguments, {writer}=train.{writer}):
    global stop_after
    {writer}(*arguments)
    stop_after -= 1
    if stop_after == 0:
        os.kill(os.getpid(), signal.SIGTERM)


train.{writer} = sample.{writer} = {writer}
ctx = jobkit.init(name=name, params=params, runs_dir="runs")
ctx.finish(train.train(ctx) if name == "train" else sample.sample(ctx))
"""


class Folder:
    """A folder that an experiment is run from, with data and runs of its own.

    `writer` names the experiment's function that writes what a person looks at: what a script can be stopped after.
    """

    def __init__(self, path: Path, experiment: str, writer: str) -> None:
        self.path = path
        shutil.copytree(ROOT / "experiments", path / "experiments", ignore=shutil.ignore_patterns("__pycache__"))
        (path / "script.py").write_text(SCRIPT.format(experiment=experiment, writer=writer))

    def python(self, *arguments: str, expect: int = 0) -> str:
        """What a Python that ends with exit code `expect` prints."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "JOBKIT_CONFIG": "none", "JOBKIT_RUNS": "runs"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
        assert done.returncode == expect, done.stdout
        return done.stdout

    def submit(self, recipe: Path, *overrides: str, expect: int = 0) -> str:
        """Run the small recipe on this machine."""
        arguments = ("submit", f"experiments/{recipe.name}", "--local", "--demo", *overrides)
        return self.python("-m", "jobkit", *arguments, expect=expect)

    def script(self, task: str, recipe: Path, *overrides: str, stop_after: int = 0) -> Path:
        """The directory of the same in a plain script of one rank; it can be stopped when it has written some files."""
        params = load(recipe, overrides, demo=True).config.params
        self.python("script.py", task, json.dumps(params), str(stop_after), expect=75 if stop_after else 0)
        return self.run(task)

    def run(self, name: str) -> Path:
        """The only run directory of a name."""
        (found,) = self.path.glob(f"runs/{name}-*")
        return found
