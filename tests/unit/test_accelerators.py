"""What breaks first on a GPU, with pretended devices: which calls are made, in which order, and for which device."""

from __future__ import annotations

import copy
import mmap
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jobkit.checkpoint import slot, staging
from jobkit.group import RankGroup
from jobkit.run.config import CommConfig, Config, ParallelConfig
from jobkit.run.layout import factor
from jobkit.train import parallel
from jobkit.train.data_parallel import DistributedDataParallel, data_parallel
from jobkit.train.devices import is_spread_by_hand
from jobkit.train.engine import Engine
from jobkit.train.gradients import scale_gradients
from jobkit.train.nested import map_tensors
from jobkit.train.optim import fused_ema_adam
from jobkit.train.optimizer_state import optimizer_state, parameter_names
from jobkit.train.parallel import Parallel
from jobkit.train.seeds import seed_generators
from jobkit.worker import failure
from jobkit.worker.object_states import ObjectStates
from jobkit.worker.pending_gradients import set_gradients

CPU = torch.device("cpu")
CUDA = [torch.device("cuda", number) for number in range(2)]


def module_on(*devices: torch.device) -> Any:
    return SimpleNamespace(parameters=lambda: [SimpleNamespace(device=device) for device in devices])


ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists(), reason="this machine has a GPU")
def test_without_a_gpu_the_tests_for_one_say_so_in_a_line() -> None:
    done = subprocess.run([ROOT / "tools" / "test", "cuda"], text=True, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: this machine has no NVIDIA GPU (no /dev/nvidia0): run it where there is one\n"


# Copies to the host


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to tensors of the CPU, as if that was a device with streams."""
    found: list[str] = []
    copy = torch.Tensor.copy_

    def noted(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        found.append("copy beside" if non_blocking else "copy")
        return copy(self, source)

    def stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: found.append("wait for the copies"))

    def all_at_once(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            noted(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    monkeypatch.setattr(torch, "_foreach_copy_", all_at_once)
    module = SimpleNamespace(synchronize=lambda device: found.append("wait for all streams"), current_stream=stream)
    monkeypatch.setattr(staging.torch, "get_device_module", lambda device: module)
    return found


def test_a_checkpoint_waits_for_whatever_stream_computes_and_for_its_own_copies(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "has_streams", lambda kind: True)
    monkeypatch.setattr(staging, "_memory", lambda size, pin: torch.empty(size, dtype=torch.uint8))
    copies = staging.HostBuffers().copy({"a": torch.ones(3), "b": torch.zeros(2)})
    assert calls == ["wait for all streams", "copy beside", "copy beside", "wait for the copies"]
    assert torch.equal(copies["a"], torch.ones(3))


def test_from_a_device_without_streams_a_copy_is_complete_when_it_returns(calls: list[str]) -> None:
    staging.HostBuffers().copy({"a": torch.ones(3)})
    assert calls == ["copy"]


def test_memory_that_cannot_be_pinned_leaves_no_error_for_torch_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[str] = []
    library = tmp_path / "libcudart-0.so.12"
    library.write_bytes(b"not a library")
    monkeypatch.setattr(slot.torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 712))
    monkeypatch.setattr(slot.torch.cuda, "device", lambda device: nullcontext())

    def library_of(name: str) -> Any:
        return SimpleNamespace(cudaGetLastError=lambda: cleared.append(name))

    monkeypatch.setattr(slot.ctypes, "CDLL", library_of)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        slot._pin(torch.zeros(8, dtype=torch.uint8), CUDA[0])
    assert cleared == [str(library)]


# Several devices in a rank


def test_a_model_that_is_spread_over_a_ranks_devices_by_hand_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_spread_by_hand(module_on(*CUDA), CUDA[0])
    assert not is_spread_by_hand(module_on(CUDA[0], CUDA[0], torch.device("cpu")), CUDA[0])
    assert not is_spread_by_hand(nn.Linear(2, 2), torch.device("cpu"))
    asked: list[Any] = []
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda self, module, **options: asked.append(options))
    for module, device in (
        (module_on(*CUDA), CUDA[0]),
        (module_on(CUDA[1]), CUDA[1]),
        (module_on(torch.device("mps")), torch.device("mps")),
    ):
        data_parallel(module, device)
    assert [options["device_ids"] for options in asked] == [None, [1], None]


def test_gradients_on_several_devices_are_scaled_device_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    lists: list[set[str]] = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda found, factor: lists.append({one.device.type for one in found}))
    parameters = [nn.Parameter(torch.ones(2, device=device)) for device in ("cpu", "meta", "cpu")]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    scale_gradients(parameters, torch.tensor(0.5))
    assert lists == [{"cpu"}, {"meta"}]


# Random numbers


def test_only_the_generators_of_a_ranks_own_devices_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[str] = []
    current: list[torch.device] = []

    class Device(nullcontext[None]):
        def __init__(self, device: torch.device) -> None:
            super().__init__()
            current[:] = [device]

    module = SimpleNamespace(device=Device, manual_seed=lambda seed: seeded.append(f"{current[0]}: {seed}"))
    monkeypatch.setattr("jobkit.checkpoint.state._module", lambda device: module)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: seeded.append("all"))
    seed_generators(7, torch.device("cpu"), CUDA[1])
    assert seeded == ["cuda:1: 7"]
    assert torch.initial_seed() == 7


def test_sharded_tensors_draw_from_each_ranks_generator_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    own = SimpleNamespace(
        _rng_tracker=None,
        is_rng_supported_mesh=lambda mesh: True,
        OffsetBasedRNGTracker=lambda mesh, **options: made.append(options) or "a tracker",
    )
    monkeypatch.setattr(parallel, "_random", own)
    for kind in ("cpu", "cuda", "cuda"):
        parallel._keep_generators(SimpleNamespace(device_type=kind))  # type: ignore[arg-type]
    assert made == [{"run_state_sync": False}]
    assert own._rng_tracker == "a tracker"


# Layouts


def copied(tree: Any) -> Any:
    """As a checkpoint has it."""
    return map_tensors(lambda one: one.detach().clone(memory_format=torch.contiguous_format), tree)


def test_a_channels_last_model_goes_on_with_a_fused_optimizer_as_it_would_have() -> None:
    """Fused kernels pair elements up as they lie in memory, and what a checkpoint has is contiguous."""
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    resumed = copy.deepcopy(net)
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=0.1, fused=True) for one in (net, resumed))

    def step(model: nn.Conv2d, own: torch.optim.Optimizer) -> None:
        model(torch.arange(75.0).view(1, 3, 5, 5).sin()).sin().sum().backward()
        own.step()

    step(net, optimizer)
    saved = copied(optimizer_state(optimizer, parameter_names([net])))
    gradients = copied({name: one.grad for name, one in net.named_parameters()})
    parallel = Parallel(factor(ParallelConfig(), 1, 1), ParallelConfig(), CommConfig(), CPU)
    states = ObjectStates(parallel, RankGroup.alone(), None)
    states.modules.append(resumed)
    states.name_parameters({})
    states.add_optimizer("optimizer", other)
    states.load(resumed, copied(net.state_dict()))
    states.load(other, saved)
    set_gradients(resumed, gradients)
    assert resumed.weight.grad is not None
    assert resumed.weight.grad.stride() == resumed.weight.stride()
    step(net, optimizer)  # adds to the gradients that are there
    step(resumed, other)
    assert torch.equal(net.weight, resumed.weight)


# Precision and memory


def test_under_autocast_too_the_averages_are_what_the_model_computes_with() -> None:
    engine = Engine(Config(name="toy", task="mytask:train", precision="bf16"), torch.device("cpu"))
    model = engine.parallelize(nn.Linear(4, 1))
    optimizer = fused_ema_adam(model.parameters(), lr=0.5)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    optimizer.step()
    with torch.no_grad(), engine.averaged(optimizer), engine.autocast():
        expected = model(x)
    with engine.autocast():
        trained = model(x)
        with engine.averaged(optimizer):
            assert torch.equal(model(x), expected)
        assert torch.equal(model(x), trained)
    assert not torch.equal(trained, expected)


def test_the_peak_is_that_of_the_device_that_ran_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace(max_memory_allocated=lambda: 5))
    assert failure._memory(torch.OutOfMemoryError()) == {"out_of_memory": "GPU", "peak_bytes": 5}
    monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace())
    assert failure._memory(torch.OutOfMemoryError()) == {"out_of_memory": "GPU", "peak_bytes": None}


@pytest.mark.parametrize(
    ("kind", "message", "where"),
    [
        ("npu", "NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity)", "npu"),
        ("mps", "MPS backend out of memory (MPS allocated: 4.60 GB, max allowed: 9.07 GB)", "mps"),
        ("cuda", "CUDA error: out of memory", "GPU"),
        ("cuda", "size mismatch", None),
        (None, "a queue that is out of memory slots", None),
    ],
)
def test_a_device_whose_error_has_no_class_of_its_own_is_known_by_what_it_says(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, message: str, where: str | None
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and SimpleNamespace(type=kind))
    monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace(max_memory_allocated=lambda: 5))
    found = failure._memory(RuntimeError(message))
    assert found.get("out_of_memory") == where
    assert (found["peak_bytes"] == 5) == (where is not None)
