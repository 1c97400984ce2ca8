"""A few of tests/soak/chaos.py's plans, by fixed seeds; `tests/soak/chaos.py --soak` goes through many more."""

from __future__ import annotations

import pytest
from chaos import Chaos, Trial, main, table
from chaos_actions import ACTIONS
from chaos_plan import EVERY, KINDS, SAVING, STEPS, TOGETHER, Event, choose, draw
from chaos_run import Row
from slurm_cluster import Cluster

EVENTS = 3


def came_through(trial: Trial) -> bool:
    """Whether nothing is wrong; a failing test's report shows what is."""
    print(*trial.rows, *trial.problems, sep="\n")
    return not trial.problems


@pytest.fixture(scope="session")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Chaos:
    """Tests of one process share the uninterrupted run."""
    return Chaos(tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize("seed", [20])
def test_a_run_on_slurm_comes_through(slurm: Cluster, chaos: Chaos, seed: int) -> None:
    plan = draw(seed, EVENTS, *choose("", "slurm", own_cluster=False))  # other tests use this Slurm too
    assert came_through(chaos.trial(seed, plan, slurm))


def test_a_run_on_this_machine_comes_through(chaos: Chaos) -> None:
    assert came_through(chaos.trial(6, draw(6, EVENTS, *choose("", "local")), None))


def test_a_plan_follows_from_its_seed() -> None:
    names = choose("", "slurm")
    assert draw(1, 20, *names) == draw(1, 20, *names)
    assert draw(1, 20, *names) != draw(2, 20, *names)


@pytest.mark.parametrize("place", ["slurm", "local"])
def test_no_plan_crashes_a_run_three_times_without_progress(place: str) -> None:
    for seed in range(200):
        crashes = 0
        for event in draw(seed, 20, *choose("", place)):
            progress = event.moment in (STEPS, SAVING) and event.steps > EVERY
            crashes = 0 if progress else crashes
            crashes += not KINDS[event.kind].graceful and not progress and event.moment != TOGETHER
            assert crashes <= 2, f"seed {seed}, event {event.number}"


def test_only_what_was_asked_for_is_drawn() -> None:
    kinds, moments = choose("oom,ctrl_c,saving", "local")
    assert {(event.kind, event.moment) for event in draw(1, 20, kinds, moments)} == {
        ("oom", SAVING),
        ("ctrl_c", SAVING),
    }
    assert "node_lost" not in choose("", "slurm", own_cluster=False)[0]


def test_a_name_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--local", "--only", "explode"]) == 2
    assert "kill_rank" in capsys.readouterr().err


def test_the_table_says_what_each_interruption_cost() -> None:
    def row(kind: str, repeated: int, *problems: str) -> Row:
        event = Event(1, kind, STEPS, 5, 0.0, 0, 0.0)
        return Row(event, 1, 0.0, [], "c", resumed=10, repeated=repeated, attempts=1, seconds=7.0, problems=[*problems])

    good = Trial(1, "slurm", [row("oom", 1), row("oom", 4), row("preempt", 0)])
    bad = Trial(2, "slurm", [row("oom", 9, "it had to be submitted again")], ["event 1 (oom): ..."])
    lines = table([good, bad]).splitlines()
    assert "| oom | 3 | 0 | 1.0 | 1 / 4 / 9 | 7 | 2 of 3 | 2 of 3 |" in lines
    assert "| preempt | 1 | 0 | 1.0 | 0 / 0 / 0 | 7 | always | always |" in lines


def test_every_kind_of_interruption_can_be_carried_out() -> None:
    assert ACTIONS.keys() == KINDS.keys()
