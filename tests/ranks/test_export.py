"""The weights of a finished run: everything that a module may hold, whatever it was spread over, read back."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.attempts import STOPPED, attempt, stop_after
from harness.ranks import Team, on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.errors import JobkitError
from jobkit.group import RankGroup
from jobkit.run.config import CommConfig, ParallelConfig
from jobkit.run.layout import factor
from jobkit.train.exported import save_weights
from jobkit.train.parallel import Parallel
from jobkit.worker.tracked_state import TrackedState

DONE = "done"


def test_what_a_killed_attempt_left_decides_nothing_about_who_may_read_the_weights(tmp_path: Path) -> None:
    left = tmp_path / ".model.safetensors.tmp"
    left.touch(0o600)
    before = os.umask(0o022)
    try:
        save_weights(tmp_path, "model", {"weight": torch.ones(2)}, {}, {})
    finally:
        os.umask(before)
    assert [(file.name, file.stat().st_mode & 0o777) for file in tmp_path.iterdir()] == [("model.safetensors", 0o644)]


class Odd(nn.Module):
    """What a state_dict may hold beside plain tensors."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        table = torch.arange(12.0) + fill
        self.register_buffer("table", table)
        self.register_buffer("tail", table[4:])  # of one storage with the one above
        self.register_buffer("columns", (torch.arange(6.0).view(2, 3) + fill).t())
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("sparse", (torch.eye(3) * (1 + fill)).to_sparse())
        self.register_buffer("complex", torch.full((2,), 1 + fill, dtype=torch.complex128))
        self.register_buffer("conjugate", torch.tensor([1 + 2j]).conj() * (1 + fill))
        self.seen: Any = {"words": ["a"], "count": fill}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.layout == right.layout and torch.equal(left, right)
    return bool(left == right)


def assert_same(left: nn.Module, right: nn.Module) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        if value is not None and isinstance(value, Tensor) and value.layout != torch.strided:
            value, theirs[name] = value.to_dense(), theirs[name].to_dense()
        assert same(value, theirs[name]), name


def finish_odd(ctx: Any) -> str:
    ctx.track(model=Odd(fill=3.0))
    for _ in ctx.steps(1):
        pass
    return DONE


def final(runs: Path, name: str = "model") -> Path:
    (file,) = runs.glob(f"run-*/final/{name}.safetensors")
    return file


def test_all_that_a_module_may_hold_is_exported_and_loaded_again(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, finish_odd) == [DONE]
    assert {path.name for path in final(tmp_path).parent.iterdir()} == {"model.safetensors", "model.extra.pt"}
    stored = load_file(final(tmp_path))
    assert "embed.weight" in stored and "head.weight" not in stored, "tied weights are one tensor"
    from jobkit.train.exported import load_weights

    trained = Odd(fill=3.0)
    trained.embed.weight.data.copy_(stored["embed.weight"])
    for path in (final(tmp_path), final(tmp_path).parent, final(tmp_path).parent.parent):
        model = Odd()
        load_weights(model, path)
        assert_same(model, trained)
        assert model.head.weight is model.embed.weight


class Vocabulary:
    """An object of the user's own."""


def test_an_object_of_ones_own_is_unpickled_only_where_the_file_is_trusted(tmp_path: Path) -> None:
    from jobkit.train.exported import load_weights, save_weights

    model = Odd()
    tensors = {name: value for name, value in Odd().state_dict().items() if isinstance(value, Tensor)}
    save_weights(tmp_path, "model", {}, {}, {**tensors, "_extra_state": Vocabulary()})
    with pytest.raises(JobkitError, match=r"model\.extra\.pt holds objects that could run code .*Vocabulary"):
        load_weights(model, tmp_path)
    load_weights(model, tmp_path, trusted=True)
    assert isinstance(model.seen, Vocabulary)


def test_a_file_that_is_not_there_or_does_not_fit_is_an_error_in_a_line(tmp_path: Path) -> None:
    from jobkit.train.exported import load_weights

    with pytest.raises(JobkitError, match="has no exported weights of 'model': has the run finished"):
        load_weights(nn.Linear(2, 2), tmp_path)
    (tmp_path / "net.safetensors").write_bytes(b"nothing")
    with pytest.raises(JobkitError, match="has no exported weights of 'model': it has net"):
        load_weights(nn.Linear(2, 2), tmp_path)
    with pytest.raises(JobkitError, match=r"net\.safetensors cannot be read as the weights"):
        load_weights(nn.Linear(2, 2), tmp_path, "net")


# Spread over ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.BatchNorm1d(6)


def block() -> Block:
    torch.manual_seed(0)
    return Block()


def by_rows() -> nn.Module:
    return fully_shard(block(), mesh=init_device_mesh("cpu", (4,)))  # 10 and 6 rows on 4 ranks: uneven, some empty


def hybrid() -> nn.Module:
    return fully_shard(block(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))


def by_rows_and_layers() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    module = parallelize_module(block(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(module, mesh=mesh["shard"])


def gather_without_the_device(team: Team, makes: list[Callable[[], nn.Module]]) -> list[tuple[int, list[str]]]:
    from jobkit.checkpoint.whole import gather_whole

    found = []
    for make in makes:
        module = make()
        expected = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in module.state_dict().items()
        }
        whole = gather_whole(RankGroup.of(team.group), module.state_dict())
        if team.rank == 0:
            assert list(whole.tensors) == list(expected)
            assert all(same(whole.tensors[name], value) for name, value in expected.items()), make.__name__
        found.append((len(whole.tensors), sorted(whole.tied)))
    columns = distribute_tensor(torch.arange(35.0).view(5, 7), init_device_mesh("cpu", (2, 2)), [Shard(1), Shard(1)])
    copies = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (2, 2)), [Replicate(), Replicate()])
    own = {"columns": columns, "copies": copies, f"stage {team.rank % 2}": torch.ones(3) * (team.rank % 2)}
    whole = gather_whole(RankGroup.of(team.group), {**own, "note": f"of rank {team.rank}"})
    if team.rank == 0:
        assert torch.equal(whole.tensors["columns"], torch.arange(35.0).view(5, 7))
        assert torch.equal(whole.tensors["copies"], torch.arange(6.0))
        assert [whole.tensors[f"stage {n}"].tolist() for n in range(2)] == [[0] * 3, [1] * 3]
        assert whole.others == {"note": "of rank 0"}
    return found


def test_shards_and_stages_are_gathered_as_full_tensor_does_and_only_on_rank_0() -> None:
    first, *others = on_ranks(4, gather_without_the_device, [by_rows, hybrid, by_rows_and_layers])
    assert [count for count, _ in first] == [9, 9, 9]
    assert all(count == 0 for rank in others for count, _ in rank)


def finish_sharded(ctx: Any) -> str:
    """With neither of torch's ways to put a tensor together, which go through the device, or pickle all of it."""
    model = ctx.parallelize(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 7)))
    ctx.track(model=model)
    for _ in ctx.steps(1):
        pass

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("gathered through the device")

    DTensor.full_tensor = refused  # type: ignore[method-assign]
    dist.all_gather_object, gather = dist.all_gather_object, dist.gather_object

    def small(obj: Any, *args: Any, **options: Any) -> None:
        tensors = [one for one in (obj.values() if isinstance(obj, dict) else ()) if isinstance(one, Tensor)]
        assert not tensors, "gathered by pickles"
        gather(obj, *args, **options)

    dist.gather_object = small
    return DONE


@pytest.mark.parametrize("parallel", ["data: zero3", "pipeline: 2"])
def test_a_run_exports_a_spread_model_over_the_host(tmp_path: Path, parallel: str) -> None:
    config = f"parallel: {{{parallel}}}\nresources: {{tasks_per_node: 2}}\n"
    assert attempt(2, tmp_path, finish_sharded, config=config) == [DONE, DONE]
    shapes = {name: list(value.shape) for name, value in load_file(final(tmp_path)).items()}
    assert shapes == {"0.weight": [9, 7], "0.bias": [9], "1.weight": [7, 9], "1.bias": [7]}


# Compiled


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.out = nn.Linear(3, 1)


class Tracked:
    """A model of which nothing, a part or all is compiled, its optimizer, and what tracks them."""

    def __init__(self, compiled: str, folder: Path, *, resumed: bool = False) -> None:
        self.model: Any = Outer()
        parallel = Parallel(factor(ParallelConfig(), 1, 1), ParallelConfig(), CommConfig(), torch.device("cpu"))
        self.checkpointer = Checkpointer(Store(folder))
        loaded = self.checkpointer.load_newest(names=()) if resumed else None
        self.state = TrackedState(parallel, self.checkpointer, RankGroup.alone(), loaded)
        self.state.add_module(self.model)
        self.state.states.name_parameters({})
        if compiled == "a part":
            self.model.net = torch.compile(self.model.net, backend="eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.tracked = torch.compile(self.model, backend="eager") if compiled == "all" else self.model
        self.state.add("model", self.tracked)
        self.state.add("optimizer", self.optimizer)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()

    def save(self, step: int) -> None:
        self.checkpointer.save(step, self.state.trees()[0]).wait()

    def everything(self) -> tuple[list[Tensor], list[Tensor]]:
        moments = [self.optimizer.state[one]["exp_avg"] for one in self.model.parameters()]
        return [one.detach().clone() for one in self.model.state_dict().values()], moments


@pytest.mark.parametrize(("before", "after"), [*permutations(("nothing", "a part", "all"), 2)])
def test_a_checkpoint_has_the_same_names_compiled_or_not(tmp_path: Path, before: str, after: str) -> None:
    first = Tracked(before, tmp_path)
    first.step()
    first.save(1)
    second = Tracked(after, tmp_path, resumed=True)
    torch.testing.assert_close(second.everything(), first.everything(), rtol=0, atol=0)
    loaded = second.checkpointer.load_newest()
    assert loaded is not None
    assert list(loaded.shared["model"]) == list(Outer().state_dict())
    assert loaded.shared["model"]._metadata == Outer().state_dict()._metadata, "the versions of its modules"
    assert "net.0.weight" in loaded.shared["optimizer"]["state"]


# The trainable part


class Momentum(Outer):
    """A frozen part, as a LoRA has, and one that is changed by hand, as a momentum encoder is."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        self.teacher = nn.Linear(3, 1).requires_grad_(False)


def train_a_part(ctx: Any, weights: float, stop: bool) -> Any:
    model = Momentum()
    with torch.no_grad():
        model.net[0].weight.fill_(weights)  # built again by the function
        model.teacher.weight.fill_(7)
    model = ctx.parallelize(model)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    module = getattr(model, "module", model)
    for _ in ctx.steps(4):
        for parameter in module.out.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if ctx.world_size == 1:  # as momentum encoders are written: torch counts no write
            module.teacher.weight.data = module.teacher.weight.data * 1.0 + 1
        else:
            module.teacher.weight.data.add_(1)
        if stop:
            stop_after(ctx, 1)
    own = [one.to_local() if isinstance(one, DTensor) else one for one in (module.net[0].weight, module.teacher.weight)]
    return [one.view(-1)[0].item() if one.numel() else None for one in own]


@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 1), ("zero3", 2)])
def test_the_trainable_part_is_saved_and_the_rest_is_what_the_function_built(
    tmp_path: Path, parallel: str, ranks: int
) -> None:
    config = f"parallel: {{data: {parallel}}}\nresources: {{tasks_per_node: {ranks}}}\n"
    part = f"{config}checkpoint: {{weights: trainable}}\n"
    assert attempt(ranks, tmp_path, train_a_part, 2.0, True, config=part) == [STOPPED] * ranks
    if ranks == 1:
        (whole,) = attempt(1, tmp_path, train_a_part, 2.0, True, config=config)
        assert "has no 'net.0.weight' of model, which requires no gradient: it was written with checkpoint.w" in whole
    assert attempt(ranks, tmp_path, train_a_part, 3.0, False, config=part)[0] == [3.0, 11.0]
    assert set(load_file(final(tmp_path))) == {
        *("net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked"),  # buffers
        *("out.weight", "out.bias", "teacher.weight"),  # not the teacher's bias, which nobody has changed
    }
    from jobkit.train.exported import load_weights

    model = Momentum()
    built = model.net[0].weight.clone()
    load_weights(model, final(tmp_path))
    assert torch.equal(model.net[0].weight, built) and model.teacher.weight[0, 0] == 11
