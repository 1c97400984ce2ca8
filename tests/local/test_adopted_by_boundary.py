"""The scripts in examples/ that call ctx.boundary themselves: Ctrl-C, and a rank that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.examples import BY_BOUNDARY, Adopted, Example, assert_as_before, weights_before
from harness.project import describe, status


@pytest.mark.parametrize("example", BY_BOUNDARY, ids=lambda example: example.name)
def test_a_script_with_boundary_goes_on_after_ctrl_c_and_the_death_of_a_rank(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, example: Example
) -> None:
    example.skip_without_packages()
    adopted = Adopted(tmp_path / "interrupted", example, {1: 5, 2: 5})
    adopted.interrupt()
    with adopted.start("submit", "toy.yaml", "--local") as process:
        adopted.kill_rank(2, process)
        assert process.wait(300) == 0, describe(adopted.run)
    assert_as_before(adopted, weights_before(tmp_path_factory, example), ["user", "killed", "finished"])
    first, second, third = status(adopted.run)["attempts"]
    assert first["last_step"] == second["first_step"] == 5
    assert third["first_step"] == example.kept, "a checkpoint every 3 steps"
