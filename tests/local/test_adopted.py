"""The scripts in examples/ under `command:` on this machine: they train as before, and Ctrl-C costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.examples import USUAL, Adopted, Example, assert_as_before, weights_before
from harness.project import status


@pytest.mark.parametrize("example", USUAL, ids=lambda example: example.name)
def test_an_adopted_script_goes_on_after_ctrl_c_as_if_there_were_no_jobkit(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, example: Example
) -> None:
    example.skip_without_packages()
    before = weights_before(tmp_path_factory, example)
    whole, adopted = Adopted(tmp_path / "whole", example, {}), Adopted(tmp_path / "interrupted", example, {1: 5})
    whole.submit("--local")
    assert_as_before(whole, before, ["finished"])
    adopted.interrupt()
    adopted.submit("--local")
    assert_as_before(adopted, before, ["user", "finished"])
    first, second = status(adopted.run)["attempts"]
    assert first["last_step"] == second["first_step"] == 5
