"""Small programs in the styles of public ones, as `jobkit verify` sees them: sound, and with one thing forgotten.

A program's docstring ends with YAML: what to run, and, where something can be forgotten, what the answer has to name.

    task: ema:train             # or `command: [python, ema.py]`, the default
    ranks: 1
    steps: 20                   # of jobkit verify
    forgotten: ema              # the expression that is named
    type: ctx.track(ema=ema)    # what the answer says to type

A line of the program that ends with `# forgets` is left out of the forgetful version, and `# forgets: NEW` stands there
as NEW. The oracle is the person who wrote the program: verify must find what the marked line declares, and nothing in
the sound version.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PROGRAMS = sorted(Path(__file__).with_name("programs").glob("*.py"))
MARK = re.compile(r"^(\s*)(.*?)\s*# forgets(?::\s*(.*))?$")


def settings_of(program: Path) -> dict[str, Any]:
    """Return the YAML of a program's docstring."""
    text = program.read_text(encoding="utf-8").split('"""')[1]
    return dict(yaml.safe_load(text.split("\n\n", 1)[1]) or {}) if "\n\n" in text else {}


def written(program: Path, *, forgetful: bool) -> str:
    """Return the program's text in one of its versions."""
    lines = []
    for line in program.read_text(encoding="utf-8").splitlines():
        if (marked := MARK.match(line)) is None or not forgetful:
            lines.append(line)
        elif marked[3]:
            lines.append(marked[1] + marked[3])
    return "\n".join(lines) + "\n"


def verify(program: Path, folder: Path, *, forgetful: bool) -> tuple[int, dict[str, Any]]:
    """Run `jobkit verify` on a version of a program, and return its exit code and its report."""
    settings = settings_of(program)
    (folder / program.name).write_text(written(program, forgetful=forgetful), encoding="utf-8")
    config: dict[str, Any] = {"name": program.stem, "params": settings.get("params", {})}
    if "task" in settings:
        config["task"] = settings["task"]
    else:
        config["command"] = settings.get("command", ["python", program.name])
    if (ranks := settings.get("ranks", 1)) > 1:
        config["resources"] = {"tasks_per_node": ranks}
    config |= settings.get("config", {})
    (folder / "zoo.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    words = ["verify", "zoo.yaml", "--local", "--steps", str(settings.get("steps", 20)), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "jobkit", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_sound_program_is_equal(program: Path, tmp_path: Path) -> None:
    code, report = verify(program, tmp_path, forgetful=False)
    findings = [item["expression"] for item in report["found"] if item["is_finding"]]
    assert (code, report["equal"], findings) == (0, True, []), "\n".join(report["lines"])


@pytest.mark.parametrize(
    "program", [each for each in PROGRAMS if "forgotten" in settings_of(each)], ids=lambda program: program.stem
)
def test_what_a_program_forgets_is_named(program: Path, tmp_path: Path) -> None:
    settings = settings_of(program)
    code, report = verify(program, tmp_path, forgetful=True)
    answer = "\n".join(report["lines"])
    assert (code, report["equal"]) == (1, False), answer
    assert report["found"], answer
    named = report["found"][0]["expression"]
    assert named == settings["forgotten"] or named.startswith(
        (f"{settings['forgotten']}[", f"{settings['forgotten']}.")
    )
    assert settings.get("type", "") in answer, answer
