"""The parts of a training on one device: copies, streams, precision, the optimizer, generators, one rank of nccl."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from harness.ranks import Team, on_ranks
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from jobkit.checkpoint.slot import Slot
from jobkit.checkpoint.staging import HostBuffers
from jobkit.checkpoint.state import rng_state, seed_device, set_rng_state
from jobkit.errors import NotFinite
from jobkit.run.config import Config
from jobkit.run.device_kinds import has_streams
from jobkit.run.slots import make_slots
from jobkit.train.data import Loader
from jobkit.train.data_parallel import data_parallel, send_first
from jobkit.train.devices import check_precision, describe, group_backend, report
from jobkit.train.engine import Engine
from jobkit.train.gradients import clip_gradients, gradient_norm
from jobkit.train.local_sgd import average_replicas
from jobkit.train.optim import fused_ema_adam
from jobkit.train.seeds import seed_generators
from jobkit.train.sharding import shard
from jobkit.train.weights import materialise
from jobkit.worker.losses import LossWatch, is_harmed
from jobkit.worker.timing import ComputeTimer, events_of


def images_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 64, 1)]
    return nn.Sequential(*layers)


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


# Copies and streams


def test_staged_copies_are_complete_whatever_computes_when_they_are_asked_for(device: torch.device) -> None:
    size = 2048 if device.type == "cuda" else 64
    matrix = torch.rand(size, size, device=device) / size
    images = torch.rand(8, 4, 16, 16, device=device).contiguous(memory_format=torch.channels_last)
    part = torch.rand(64, 64, device=device)[:, ::2]
    result = torch.zeros_like(matrix)
    buffers = HostBuffers()
    for _ in range(2):  # the second into memory that is there
        side = torch.cuda.Stream(device) if device.type == "cuda" else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # of None it is nothing
            value = matrix
            for _ in range(200):  # still under way when the copy is asked for
                value = value @ matrix + 1
            result.copy_(value)
        copies = buffers.copy({"result": result, "images": images, "part": part, "host": torch.ones(3)})
        if has_streams(device.type):
            assert all(one.is_pinned() for one in copies.values())
        expected = {"result": value, "images": images, "part": part, "host": torch.ones(3)}
        assert all(torch.equal(copies[name], one.cpu()) for name, one in expected.items())


def test_memory_that_outlives_the_rank_is_pinned_and_takes_copies(device: torch.device) -> None:
    slots = make_slots()
    assert slots is not None
    slot = Slot(slots[0])
    gpu = device if device.type == "cuda" else None
    buffers = HostBuffers(lambda size, _: slot.map_data(size, gpu))
    state = {f"tensor_{number}": torch.rand(1000, 100, device=device) for number in range(10)}
    for _ in range(2):
        copies = buffers.copy(state)
        assert all(torch.equal(copies[name], one.cpu()) for name, one in state.items())
    assert slot.data.is_pinned() == (gpu is not None)
    slot.release()
    (torch.ones(4, device=device) + 1).sum().item()  # no error is left behind


def test_a_rank_times_its_own_part_of_a_step_on_the_devices_clock(device: torch.device) -> None:
    timer = ComputeTimer(events_of(device))
    model = nn.Linear(256, 256).to(device)
    timer.watch(model)
    for _ in range(3):
        timer.begin()
        model(torch.ones(256, 256, device=device)).sum().backward()
        timer.end()
    synchronise(device)
    own, whole = timer.take()
    assert own > 0
    assert whole > 0


def test_the_loader_hands_out_whole_batches_on_the_device(device: torch.device) -> None:
    samples = torch.arange(4096.0).view(64, 64)
    dataset = torch.utils.data.TensorDataset(samples, torch.arange(64))
    loader = Loader(dataset, global_batch_size=16, rank=0, world_size=1, device=device, seed=0)
    for _ in range(4):
        x, ids = next(loader)
        assert x.device == ids.device == device
        assert torch.equal(x.cpu(), samples[ids.cpu()])


# Precision, gradients and the optimizer


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_trains(device: torch.device, precision: str) -> None:
    check_precision(device, precision)
    engine = Engine(Config(name="toy", task="mytask:train", precision=precision), device)  # type: ignore[arg-type]
    model = engine.parallelize(images_net().to(memory_format=torch.channels_last))
    optimizer = engine.optimizer(model, fused_ema_adam, lr=3e-3)
    x = torch.randn(16, 3, 8, 8, device=device).contiguous(memory_format=torch.channels_last)
    losses = []
    for _ in range(12):  # the loss scale of fp16 overflows in the first ones
        loss = engine.backward(
            model, x, lambda output, x: (output - x.mean((1, 2, 3))[:, None]).square().mean(), x, **SIZES
        )
        norm = engine.update(optimizer, max_norm=1.0)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert norm is not None
    assert norm.device.type == device.type
    with engine.autocast():
        wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        assert model(x).dtype == wanted


SIZES = {"global_batch_size": 16, "micro_batch_size": 8}


def test_the_fused_optimizer_takes_the_steps_of_the_plain_one_and_resumes_from_the_cpus(device: torch.device) -> None:
    found = []
    for fused in (True, False):
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(64, 64, device="cpu").to(device)) for _ in range(3)]
        optimizer = fused_ema_adam(parameters, lr=1e-2, fused=fused)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = parameter.detach().sin()
            optimizer.step()
        found.append(([*parameters, *(optimizer.state[one]["ema"] for one in parameters)], optimizer))
    for fused_one, plain_one in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(fused_one, plain_one, rtol=1e-5, atol=1e-6)
    state = copy.deepcopy(found[0][1].state_dict())
    for one in state["state"].values():  # as a checkpoint has it
        for name, value in one.items():
            one[name] = value.cpu()
    new = [nn.Parameter(one.detach().clone()) for one in found[0][0][:3]]
    resumed = fused_ema_adam(new, lr=1e-2)
    resumed.load_state_dict(state)
    for parameter, old in zip(new, found[0][0][:3], strict=True):
        parameter.grad, old.grad = old.detach().sin(), old.detach().sin()
    resumed.step()
    found[0][1].step()
    assert all(torch.equal(one, old) for one, old in zip(new, found[0][0][:3], strict=True))


def test_the_norm_of_gradients_is_the_cpus_and_clips_them(device: torch.device) -> None:
    own = [nn.Parameter(torch.ones(5, device=device)), nn.Parameter(torch.ones(3, 2))]
    for number, parameter in enumerate(own):
        parameter.grad = torch.full_like(parameter, number + 2.0)
    norm = gradient_norm(own)
    assert norm.item() == pytest.approx((5 * 4 + 6 * 9) ** 0.5)
    clip_gradients(own, 1.0, norm)
    assert gradient_norm(own).item() == pytest.approx(1.0, abs=1e-5)


# Generators


def test_the_devices_generator_goes_on_where_it_was(device: torch.device) -> None:
    seed_generators(5, device)
    torch.rand(3, device=device)
    state = rng_state(device)
    expected = torch.nn.functional.dropout(torch.ones(1000, device=device))
    seed_generators(6, device)
    assert set_rng_state(state, device) == []
    assert torch.equal(torch.nn.functional.dropout(torch.ones(1000, device=device)), expected)
    if device.type != "cpu":
        seed_device(device, 5)
        first = torch.rand(3, device=device)
        seed_device(device, 5)
        assert torch.equal(torch.rand(3, device=device), first)


# Ranks


@pytest.fixture
def one_rank(device: torch.device) -> Iterator[str]:
    backend = group_backend(device)
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    yield backend
    dist.destroy_process_group()


def test_one_rank_of_the_devices_own_backend(device: torch.device, one_rank: str) -> None:
    assert report(device, one_rank, 0, 1, lambda value: [value]).endswith(describe(device)) or device.type != "cpu"
    numbers = torch.arange(6.0, device=device).view(2, 3).t()
    average_replicas([], [])
    model = data_parallel(images_net().to(device), device)
    model(torch.ones(4, 3, 8, 8, device=device)).sum().backward()
    assert all(one.grad is not None for one in model.parameters())
    with torch.no_grad():
        model.module.register_buffer("view", numbers)
        send_first(model.module.buffers())
    assert torch.equal(numbers.cpu(), torch.arange(6.0).view(2, 3).t())

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device)
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh(device.type, (1,))
    for block in (*sharded, sharded):
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    x = torch.randn(4, 8, device=device)
    torch.testing.assert_close(sharded(x), plain(x))
    sharded(x).sum().backward()
    assert gradient_norm(sharded.parameters()).item() > 0


def test_shards_on_the_host_train_as_those_on_the_device(device: torch.device, one_rank: str) -> None:
    found = []
    mesh = init_device_mesh(device.type, (1,))
    for offload in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)) for _ in range(3)))
        shard(net, mesh, reshard_after_forward=True, offload=offload)
        materialise(net, device, torch.device("cpu") if offload else None)
        places = {(one.device.type, one.to_local().device.type) for one in net.parameters()}
        kept = "cpu" if offload else device.type
        assert places == {(kept, kept)} and {one.device.type for one in net.buffers()} == {device.type}
        optimizer = fused_ema_adam(net.parameters(), lr=1e-2)
        for step in range(4):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(device)
            for part in x.chunk(2):  # the second is added to the first on the host
                (net(part) - part).square().mean().backward()
            norm = gradient_norm(net.parameters())
            clip_gradients(net.parameters(), 0.1, norm)
            optimizer.step()
            optimizer.zero_grad()
        assert {value.device.type for state in optimizer.state.values() for value in state.values()} <= {kept, "cpu"}
        with optimizer.averaged():
            output = net(x)
        found.append([output, norm, *(one.full_tensor() for one in net.parameters())])
    for offloaded, plain in zip(*found, strict=True):
        torch.testing.assert_close(offloaded.cpu(), plain.cpu(), rtol=1e-4, atol=1e-5)


def two_on_one_device(team: Team, name: str) -> list[torch.Tensor]:
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = data_parallel(images_net().to(device), device)
    x = torch.full((2, 3, 8, 8), team.rank + 1.0, device=device)
    model(x).sum().backward()
    send_first(model.module.buffers())
    (bias,) = [one.grad for one in model.parameters() if one.grad is not None and one.grad.shape == (1,)]
    average_replicas([model.module], [])
    return [bias.cpu(), *(one.detach().cpu() for one in model.module.buffers())]


def test_two_ranks_on_one_device_over_gloo(device: torch.device) -> None:
    first, second = on_ranks(2, two_on_one_device, str(device))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].item() == 2.0  # both have two samples


def test_a_loss_that_is_no_number_is_told_of_its_own_step(device: torch.device) -> None:
    watch = LossWatch(device)

    def train() -> None:
        for step in range(4):
            loss = torch.full((), torch.inf if step == 2 else 1.0, device=device)
            watch.see(loss, step, lambda step=step: [step])  # type: ignore[misc]
            watch.end_step(step, lambda step=step: [step])  # type: ignore[misc]
        watch.settle()

    with pytest.raises(NotFinite, match="the loss of step 2 is ") as found:
        train()
    assert (found.value.step, found.value.samples) == (2, [2])


def test_a_loss_that_is_no_number_ends_nothing_where_weights_and_gradients_are_finite(device: torch.device) -> None:
    weight = nn.Parameter(torch.ones(3, device=device))
    steps = iter(range(1, 99))
    done = [0]
    watch = LossWatch(
        device, is_harmed=lambda: is_harmed([weight], with_gradients=True), updates=lambda: done[0], allowed_in_a_row=2
    )

    def step(number: int, *, is_used: bool = True) -> None:
        watch.see(torch.full((), torch.nan, device=device), number, lambda: [number])
        done[0] += next(steps) if is_used else 0
        watch.end_step(number, lambda: [number])
        watch.settle()

    for number in range(4):
        step(number)
    assert watch.harmless == 4 and watch.doubt is not None and watch.doubt.step == 0
    step(4, is_used=False)
    step(5, is_used=False)
    with pytest.raises(NotFinite, match="the loss of step 6 is "):
        step(6, is_used=False)
    weight.grad = torch.full((3,), torch.inf, device=device)
    with pytest.raises(NotFinite, match="the loss of step 7 is "):
        step(7)
