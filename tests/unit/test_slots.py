"""The slots of snapshots in memory, as a parent makes them and a rank finds them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobkit.run.slots import SLOTS, environment_of, find_slots, make_slots


def test_a_rank_finds_the_slots_that_its_parent_made() -> None:
    made = make_slots()
    assert made is not None
    assert find_slots(environment_of(made)) == made
    for file in made:
        assert not os.get_inheritable(file)
        os.close(file)
    assert find_slots(environment_of(made)) is None


@pytest.mark.parametrize("value", ["", "3", "x,y", "1,2,3", "-1,-1", "1000000,1000001"])
def test_what_are_no_slots_is_not_taken_for_them(value: str) -> None:
    assert find_slots({SLOTS: value}) is None


def test_files_that_happen_to_have_their_numbers_are_not_touched(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as first, (tmp_path / "b").open("w") as second:
        assert find_slots(environment_of([first.fileno(), second.fileno()])) is None


def test_who_is_given_no_slots_has_none() -> None:
    assert find_slots({}) is None


def test_nothing_of_them_is_in_a_file_system() -> None:
    before = set(Path("/dev/shm").iterdir())
    made = make_slots()
    assert made is not None
    assert set(Path("/dev/shm").iterdir()) == before
    for file in made:
        os.close(file)
