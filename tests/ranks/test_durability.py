"""A power cut at any instant of a save leaves a state to go on from: each file and each name is sure in its turn."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.disk import MOVES, Disk, traced
from harness.ranks import make_context, run_ranks
from torch import nn

from jobkit.config.schema import CheckpointConfig, Config
from jobkit.wire.group import RankGroup
from jobkit.worker.ending import run_recorded

CONFIG = Config(name="test", task="module:function", checkpoint=CheckpointConfig(every=2, memory="off", keep=1))


def attempts(ranks: RankGroup, folder: Path) -> list[int]:
    """The first attempt is told to stop within step 5; the second goes on to step 8, and finishes."""
    return [attempt(ranks, folder, number) for number in (1, 2)]


def attempt(ranks: RankGroup, folder: Path, number: int) -> int:
    ctx = make_context(folder, ranks, CONFIG, number)

    def program() -> None:
        ctx.track(model=nn.Linear(300, 50))
        for step in range(ctx.step, 9):
            ctx.boundary(step, lambda files: (files / f"of_rank_{ctx.rank}").write_text("state"), total=8)
            if (step, number) == (5, 1):
                ctx._rank.page.ask_to_stop()
        ctx.finish({"steps": 8})

    return run_recorded(ctx._rank, program)


def save(folder: Path) -> None:
    """What is traced."""
    assert run_ranks(attempts, 3, folder) == [[75, 0]] * 3


def test_each_file_of_a_save_and_each_name_is_on_the_disk_before_anything_relies_on_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "test-01234567"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("name: test")
    disk, record = Disk(run.parent), []
    program = f"import ranks.test_durability as t; t.save(t.Path({str(run.parent)!r}))"
    for call in traced([sys.executable, "-c", program], tmp_path, run.parent):
        old, new = call.paths if call.name in MOVES else (run, run)
        if new.name == "latest" or new.name.startswith(".old"):  # it points to the newest checkpoint, or needs it
            assert record[-1] != old.name, "the newest checkpoint goes"
            assert disk.unsure(run / "checkpoints" / record[-1]) == []
        elif new.name not in ("progress.json", "model.safetensors") and new != run:  # they are views, or within final/
            assert disk.unsure_within(old) == [], f"it gets the name {new.name} too early"
        if new.parent.parent.name == "ends":
            attempt = int(new.parent.name)
            assert disk.unsure(run / "checkpoints" / f"step_0000000{(6, 8)[attempt - 1]}") == [], "it ends too early"
        if new.name == "step_00000008":
            assert disk.unsure(run / "final") == []
        disk.follow(call)
        record += [new.name] if new.name.startswith("step_") else []
    assert record == [f"step_{step:08d}" for step in (2, 4, 6, 7, 8)]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step_00000008"]
    lost = {name: disk.unsure(run / name) for name in ("final", "checkpoints/step_00000008", "lease.json")}
    assert not any(lost.values()), lost
