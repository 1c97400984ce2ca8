"""The parts of ctx that no other test of a whole run calls: boundaries of a foreign loop, ctx.map, averages, and what
a finished run gives to others."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.runs import Launch, Project
from harness.training import curve, points, result
from PIL import Image, ImageSequence
from safetensors.torch import load_file

import jobkit
from jobkit.errors import InputError
from jobkit.run.rundir import RunDir

TASK = """\
import time
import torch
from torch import nn
import jobkit
from training_task import digest, mark, pause

def by_boundary(ctx):
    mark(ctx)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if ctx.checkpoint is not None:
        state = torch.load(ctx.checkpoint / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save(folder):
        if ctx.is_main:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")

    ctx.boundary(ctx.step, save, total=60)
    for step in range(ctx.step, 60):
        loss = (model(torch.rand(4, 2)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss})
        pause(ctx)
        while ctx.attempt == 2 and step == 30 and not ctx._rank.page.stop_asked:  # not to be over before that
            time.sleep(0.02)
        ctx.boundary(step + 1, save, total=60)
    return {"digest": digest(model.state_dict())}

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))

NAMES = "seed rank local_rank world_size is_main attempt".split()

def uses_everything(ctx):
    outputs = ctx.run_dir / "outputs"
    seen = {name: getattr(ctx, name) for name in NAMES}
    seen["Context"] = type(ctx) is jobkit.Context
    seen |= {"params": dict(ctx.params), "device": str(ctx.device), "current": type(ctx).current() is ctx}
    seen |= {"jobkit.current": jobkit.current() is ctx, "backend": torch.distributed.get_backend()}
    seen["deterministic"] = torch.is_deterministic_algorithms_warn_only_enabled()
    seen["derive_seed"] = [jobkit.derive_seed(ctx.seed, "noise"), jobkit.derive_seed(ctx.seed, "order")]
    seen["group of torch"] = (torch.distributed.get_rank(), torch.distributed.get_world_size())
    seen["run_dir"] = (ctx.run_dir / "events.jsonl").exists()
    with ctx.main_first():
        seen["prepared"] = (outputs / "prepared").exists()
        time.sleep(0.3 * ctx.is_main)
        (outputs / "prepared").touch()
    if ctx.is_main:
        time.sleep(0.3)
        (outputs / "before the barrier").touch()
    ctx.barrier()
    seen["barrier"] = (outputs / "before the barrier").exists()
    model = ctx.parallelize(Tied())
    optimizer = ctx.optimizer(model, jobkit.optim.EmaAdamW, lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    data = torch.arange(30.0).reshape(10, 3)
    seen["steps"] = []
    average = model.module.first.weight.detach().clone()
    for step in ctx.steps(5):
        seen["steps"].append((step, ctx.step))
        with ctx.autocast():
            loss = model(data).square().mean()
        loss.backward()
        ctx.update(optimizer)
        average = average.lerp(model.module.first.weight.detach(), 1 - (2 + step) / (11 + step))
        if step == 2:
            ctx.log({"train/loss": loss})
            ctx.log_image("image", torch.linspace(0, 1, 16).reshape(1, 4, 4))
            ctx.log_video("video", torch.linspace(0, 1, 3).reshape(3, 1, 1, 1).expand(3, 1, 4, 4))
            ctx.log_text("text", "words")
    weight = model.module.first.weight
    seen |= {"weight": weight.detach().clone(), "average": average}
    with ctx.averaged(optimizer):
        seen["averaged"] = weight.detach().clone()
    seen["after"] = weight.detach().clone()

    def name(batch, ids):
        return {"y": batch[:, 0], "id": ids}

    ctx.map(name, data, to=outputs / "mapped", batch_size=3)
    ctx.barrier()
    files = [torch.load(file) for file in sorted((outputs / "mapped").glob("batch_*.pt"))]
    mapped = {"map here": ctx.map(name, data, batch_size=3), "map": ctx.map(name, data, to="all", batch_size=3)}
    mapped["map files"] = {key: torch.cat([file[key] for file in files]) for key in ("y", "id")}
    seen |= {key: value and {of: value[of].tolist() for of in ("y", "id")} for key, value in mapped.items()}
    seen["samples"] = ctx.evaluate_samples(lambda batch, ids: batch[:, 0], data, batch_size=3).tolist()
    torch.save(seen, outputs / f"seen_{ctx.rank}.pt")
    return {"mean": ctx.evaluate(lambda batch, ids: {"x": batch[:, 0]}, data, batch_size=4)["x"]}
"""


def run(folder: Path, task: str, ranks: int, *words: str, **params: object) -> Launch:
    more = f"resources: {{tasks_per_node: {ranks}}}\ncheckpoint: {{every: 5, memory: off}}\n"
    made = Project(folder, yaml=f"name: context\ntask: context_task:{task}\nparams: {{steps: 60}}\n{more}", plain=False)
    shutil.copy(Path(__file__).parents[1] / "harness" / "training_task.py", folder)
    made.write("context_task.py", TASK)
    return made.submit("--local", "--detach", *words, **params)


def test_a_foreign_loop_with_its_own_files_goes_on_exactly(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", "by_boundary", 2)
    launch = run(tmp_path / "interrupted", "by_boundary", 2, step_seconds=0.2, last_attempt=3)
    launch.wait_for_step(12).kill_rank(1).wait_for_attempt(2)
    launch.wait_for_step(25).project.jobkit("preempt", "-y", launch.run.name)
    assert result(launch) == result(straight)
    assert launch.causes == ["killed", "preempted", "finished"]
    assert points(launch, "train/loss") == list(range(60))


@pytest.fixture(scope="session")
def everything(once: Callable[..., Path]) -> Launch:
    """A finished run of two ranks, each on a node of its own, which wrote down all that ctx gave it."""

    def make(folder: Path) -> None:
        (folder / "counted.py").write_text(f"import os\nopen({str(folder / 'imports')!r}, 'a').write('imported\\n')\n")
        keys = ("preload=[counted]", "deterministic=warn", "backend=gloo", "device=cpu", "seed=3", "resources.nodes=2")
        result(run(folder, "uses_everything", 1, *keys))

    folder = once("everything", make)
    (path,) = (folder / "runs").glob("context-*")
    return Launch(Project(folder / "reader"), RunDir(path))


@pytest.fixture
def seen(everything: Launch) -> list[dict[str, Any]]:
    """What each rank wrote down."""
    return [torch.load(everything.run.outputs / f"seen_{rank}.pt", weights_only=False) for rank in range(2)]


SAMPLES = [3.0 * sample for sample in range(10)]
MAPPED = {"y": SAMPLES, "id": list(range(10))}
SEEDS = [hashlib.blake2b(repr((3, word)).encode(), digest_size=8).digest() for word in ("noise", "order")]
SAYS: dict[str, list[Any]] = {
    "params": [{"steps": 60}] * 2,
    "seed": [3, 3],
    "rank": [0, 1],
    "local_rank": [0, 0],  # each on a node of its own
    "world_size": [2, 2],
    "group of torch": [(0, 2), (1, 2)],
    "is_main": [True, False],
    "run_dir": [True, True],
    "device": ["cpu", "cpu"],
    "backend": ["gloo", "gloo"],
    "deterministic": [True, True],
    "attempt": [1, 1],
    "Context": [True, True],
    "current": [True, True],
    "jobkit.current": [True, True],
    "prepared": [False, True],
    "barrier": [True, True],
    "steps": [[(step, step) for step in range(5)]] * 2,
    "derive_seed": [[int.from_bytes(seed, "little") >> 1 for seed in SEEDS]] * 2,  # as in the first release
    "samples": [SAMPLES] * 2,
    "map": [MAPPED] * 2,
    "map here": [MAPPED, None],
    "map files": [MAPPED] * 2,
}
"""What both ranks find; `prepared`: what rank 0 makes in `main_first`, `barrier`: what it makes before it."""


@pytest.mark.parametrize("name", SAYS)
def test_the_context_says(seen: list[dict[str, Any]], name: str) -> None:
    assert [rank[name] for rank in seen] == SAYS[name]


def test_a_module_is_preloaded_once_by_the_agent(everything: Launch) -> None:
    assert (everything.run.path.parents[1] / "imports").read_text() == "imported\n", "before it forked two ranks"


def test_averaged_shows_the_average_inside_alone(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        torch.testing.assert_close(rank["averaged"], rank["average"])
        assert torch.equal(rank["after"], rank["weight"])
        assert not torch.allclose(rank["averaged"], rank["weight"])


def logged(launch: Launch, tag: str) -> Any:
    """Return what TensorBoard shows of a tag, which has to be at step 2 alone."""
    values = curve(launch, tag)
    assert list(values) == [2]
    return values[2]


def test_an_image_is_logged_at_its_step(everything: Launch) -> None:
    picture = Image.open(io.BytesIO(logged(everything, "image").tensor.string_val[2]))
    assert list(picture.convert("L").tobytes()) == [17 * number for number in range(16)]


def test_a_video_is_logged_at_its_step(everything: Launch) -> None:
    picture = Image.open(io.BytesIO(logged(everything, "video").tensor.string_val[2]))
    frames = [frame.convert("L").getpixel((0, 0)) for frame in ImageSequence.Iterator(picture)]
    assert (picture.size, frames) == ((4, 4), [0, 128, 255])


def test_a_text_is_logged_at_its_step(everything: Launch) -> None:
    assert list(logged(everything, "text/text_summary").tensor.string_val) == [b"words"]


OPENED = {
    "result": lambda opened: opened.result == {"mean": 13.5},
    "params": lambda opened: opened.params == {"steps": 60},
    "config": lambda opened: (opened.config.seed, opened.config.preload) == (3, ["counted"]),
}


@pytest.mark.parametrize("name", OPENED)
def test_an_opened_run_has_its(everything: Launch, name: str) -> None:
    assert OPENED[name](jobkit.open_run(everything.run.path))


def test_an_opened_run_has_its_averaged_weights_also_tied_ones(everything: Launch, seen: list[dict[str, Any]]) -> None:
    weights = jobkit.open_run(everything.run.path).weights()
    assert set(weights) == {"first.weight", "second.weight"}
    for weight in weights.values():
        assert torch.equal(weight, seen[0]["averaged"])
    with pytest.raises(InputError, match="teacher"):
        jobkit.open_run(everything.run.path).weights("teacher")


def test_final_is_read_without_jobkit(everything: Launch, seen: list[dict[str, Any]]) -> None:
    names = {file.name for file in everything.run.final.iterdir()}
    assert names == {"model.safetensors", "result.json", "config.yaml"}
    weights = load_file(everything.run.final / "model.safetensors")
    assert torch.equal(weights["first.weight"], seen[0]["averaged"])
    assert json.loads((everything.run.final / "result.json").read_text()) == {"mean": 13.5}


def test_evaluate_is_the_mean_of_all_samples(everything: Launch) -> None:
    assert everything.status.result == {"mean": sum(range(0, 30, 3)) / 10}


def test_a_folder_without_a_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        jobkit.open_run(tmp_path / "nothing")


def test_open_run_gives_an_object_that_names_the_run(everything: Launch) -> None:
    opened = jobkit.open_run(everything.run.path)
    assert isinstance(opened, jobkit.OpenedRun) and opened.run.path == everything.run.path
