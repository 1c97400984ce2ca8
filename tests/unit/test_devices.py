"""One table of devices, and what a rank makes of it: its device, what it talks over, and a line that says so."""

from __future__ import annotations

import ast
import importlib.util
import socket
import typing
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import jobkit
from jobkit.errors import DistributedError, InputError
from jobkit.run import device_kinds
from jobkit.run.config import Config, Resources
from jobkit.run.device_kinds import KINDS, DeviceKind
from jobkit.run.experiment import load
from jobkit.run.rundir import RunDir
from jobkit.submission.plan import make_plan
from jobkit.train.devices import check_precision, choose_device, group_backend, peak_memory, report
from jobkit.train.devices import describe as description
from jobkit.worker.failure import write_report
from jobkit.worker.launcher import Topology

CPU = torch.device("cpu")
NAMES = [kind.name for kind in KINDS]


def refusal(call: typing.Callable[..., object], *arguments: object) -> str:
    with pytest.raises(DistributedError) as refused:
        call(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# The table


def test_each_kind_has_a_backend_and_the_cpu_comes_last() -> None:
    assert {kind.name: kind.backend for kind in KINDS} == {
        "cuda": "nccl",
        "npu": "hccl",
        "xpu": "xccl",
        "mps": "gloo",
        "cpu": "gloo",
    }
    assert NAMES[-1] == "cpu"


def test_the_yamls_device_is_a_name_of_the_table(tmp_path: Path) -> None:
    file = tmp_path / "toy.yaml"
    for name in ("auto", *NAMES):
        file.write_text(f"name: toy\ntask: mytask:train\ndevice: {name}\n")
        assert load(file).config.device == name
    file.write_text("name: toy\ntask: mytask:train\ndevice: cuba\n")
    with pytest.raises(InputError, match=f"toy.yaml:3: device: found 'cuba', .*{', '.join(NAMES)}.*mean 'cuda'"):
        load(file)


def test_what_autocast_computes_in_is_a_precision_of_the_yaml() -> None:
    precisions = typing.get_args(typing.get_type_hints(Config)["precision"])
    assert all(set(kind.autocast) < set(precisions) for kind in KINDS)


def strings(file: Path) -> Iterator[str]:
    """The string constants of a module that are no docstrings."""
    tree = ast.parse(file.read_text())
    said = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in said:
            yield node.value


def test_no_other_module_knows_what_a_device_talks_over_or_which_variable_shows_it() -> None:
    of_the_table = {kind.backend for kind in KINDS} | {kind.visible for kind in KINDS} - {None}
    assert {"nccl", "ASCEND_RT_VISIBLE_DEVICES"} < of_the_table
    root = Path(jobkit.__file__).parent
    found = {
        (file.name, text)
        for file in root.rglob("*.py")
        if file != root / "run" / "device_kinds.py"
        for text in strings(file)
        if text in of_the_table - {"gloo"}  # which is also what jobkit's own small agreements use, on the CPU
    }
    assert found == set()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[typing.Callable[[str, str], None]]:
    """Installs a package that declares one kind: its name, and where it says that the kind is."""

    def install(name: str, value: str) -> None:
        found = EntryPoints([EntryPoint(name, value, device_kinds.ADDED_BY)])
        monkeypatch.setattr("importlib.metadata.entry_points", lambda **wanted: found.select(**wanted))
        device_kinds._added.cache_clear()

    yield install
    device_kinds._added.cache_clear()


OURS = DeviceKind(name="ours", backend="gloo", visible="OURS_VISIBLE", streams=True)


def test_an_installed_package_adds_a_device(package: typing.Callable[[str, str], None], tmp_path: Path) -> None:
    package("ours", f"{__name__}:OURS")
    file = tmp_path / "toy.yaml"
    file.write_text("name: toy\ntask: mytask:train\ndevice: ours\n")
    assert load(file).config.device == "ours"
    assert device_kinds.kind("ours") is OURS and device_kinds.has_streams("ours")
    assert device_kinds.names() == [*NAMES, "ours"] and device_kinds.none_visible()["OURS_VISIBLE"] == ""
    file.write_text("name: toy\ntask: mytask:train\ndevice: our\n")
    with pytest.raises(InputError, match=r"toy.yaml:3: device: found 'our', .*cpu, ours.*mean 'ours'"):
        load(file)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (f"{__name__}:NAMES", "is no DeviceKind of that name"),
        (f"{__name__}:OURS", "is no DeviceKind of that name"),
        ("no_such_package:KIND", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_what_a_package_declares_wrongly_is_told_in_a_line(
    package: typing.Callable[[str, str], None], tmp_path: Path, value: str, said: str
) -> None:
    package("other", value)
    (tmp_path / "toy.yaml").write_text("name: toy\ntask: mytask:train\ndevice: other\n")
    with pytest.raises(InputError, match=f"device: other: the entry point {value} {said}") as refused:
        load(tmp_path / "toy.yaml")
    assert "\n" not in str(refused.value)


def test_what_a_package_declares_wrongly_is_no_matter_for_other_devices(
    package: typing.Callable[[str, str], None],
) -> None:
    package("other", "no_such_package:KIND")
    assert device_kinds.none_visible()["CUDA_VISIBLE_DEVICES"] == ""


# What a machine has, before there is torch


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", []),
        ("4,5", ["4", "5"]),
        (" 4 , 5 ", ["4", "5"]),
        ("0,-1,1", ["0"]),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,x,1", ["0"]),
        ("0,0", []),
        ("GPU-8932f937,MIG-41b5", ["GPU-8932f937", "MIG-41b5"]),
    ],
)
def test_the_variable_says_which_devices_are_visible(value: str, expected: list[str]) -> None:
    for kind in KINDS:
        if kind.visible is not None:
            assert device_kinds.listed(kind, {kind.visible: value}) == expected


def test_a_kind_whose_devices_have_files_is_counted_by_them(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    kind = DeviceKind(name="npu", backend="hccl", visible="SEEN", files=f"{tmp_path}/davinci[0-9]*")
    assert device_kinds.listed(kind, {}) == ["0", "1"]
    assert device_kinds.listed(kind, {"SEEN": "1"}) == ["1"]


def test_auto_is_the_first_kind_that_the_environment_shows() -> None:
    def chosen(environ: dict[str, str]) -> tuple[str, list[str] | None]:
        kind, found = device_kinds.of_this_machine("auto", environ)
        return kind.name, found

    assert chosen({"CUDA_VISIBLE_DEVICES": "3"}) == ("cuda", ["3"])
    assert chosen({"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "0,1"}) == ("npu", ["0", "1"])
    assert chosen({"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}) == ("cuda", [])


def test_a_device_without_a_device_for_each_rank_is_refused_at_submission() -> None:
    config = Config(name="toy", task="mytask:train", device="cuda")
    for cluster in ("local", "slurm"):
        with pytest.raises(InputError, match=r"device: found 'cuda', but resources.gpus_per_task is 0"):
            make_plan(Path("/runs/toy-1"), config, cluster)


def test_npus_are_counted_by_their_own_variable_at_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    config = Config(
        name="toy", task="mytask:train", device="npu", resources=Resources(tasks_per_node=2, gpus_per_task=1)
    )
    make_plan(Path("/runs/toy-1"), config, "local")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    with pytest.raises(InputError, match="need 2, ASCEND_RT_VISIBLE_DEVICES allows 1"):
        make_plan(Path("/runs/toy-1"), config, "local")


# A rank's device


@pytest.mark.parametrize(("name", "gpus"), [("auto", 0), ("cpu", 0), ("cpu", 1)])
def test_a_run_without_gpus_computes_on_the_cpu(name: str, gpus: int) -> None:
    assert choose_device(name, gpus, 0, 1) == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_rank_that_sees_no_gpu_says_what_it_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    message = refusal(choose_device, name, 1, 1, 2)
    assert "local rank 1 of 2 needs 1 cuda device(s) and sees 0 (CUDA_VISIBLE_DEVICES=4)" in message
    assert "resources.gpus_per_task=0" in message


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this is a Mac")
def test_the_one_device_of_a_mac_is_looked_for() -> None:
    assert "needs 1 mps device(s) and sees 0;" in refusal(choose_device, "mps", 1, 0, 1)


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_a_device_whose_package_is_missing_says_what_to_install() -> None:
    message = refusal(choose_device, "npu", 1, 0, 1)
    assert "device: npu needs the Python package torch_npu" in message
    assert torch.__version__.partition("+")[0] in message


def test_a_device_needs_gpus_per_task() -> None:
    assert "device: cuda, but resources.gpus_per_task is 0" in refusal(choose_device, "cuda", 0, 0, 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_cpu_computes_in_every_precision_that_its_entry_names(precision: str) -> None:
    check_precision(CPU, precision)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    layer = torch.nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=types[precision], enabled=precision != "fp32"):
        output = layer(torch.ones(2, 4))
    assert output.dtype == types[precision]
    output.float().sum().backward()
    assert torch.isfinite(layer.weight.grad).all()  # type: ignore[arg-type]


def test_a_precision_that_the_entry_does_not_name_is_refused() -> None:
    message = refusal(check_precision, CPU, "fp8")
    assert "precision: fp8 is not for cpu; use fp32 or bf16 or fp16" in message


# What ranks talk over


def test_a_backend_comes_with_the_device_and_gloo_always_sends_what_is_on_the_cpu() -> None:
    assert group_backend(CPU) == "gloo"
    assert group_backend(torch.device("mps")) == "cpu:gloo,mps:gloo"
    assert group_backend(torch.device("cuda", 0), "gloo") == "cpu:gloo,cuda:gloo"
    assert group_backend(torch.device("xpu", 0), "cpu:gloo,xpu:gloo") == "cpu:gloo,xpu:gloo"
    if dist.is_nccl_available():
        assert group_backend(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo", "cpu:gloo,mps:gloo"])
def test_torch_takes_what_is_chosen(backend: str) -> None:
    dist.init_process_group(group_backend(CPU, backend), store=HashStore(), rank=0, world_size=1)
    try:
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert torch.equal(ones, torch.ones(3))
    finally:
        dist.destroy_process_group()


def test_a_backend_that_torch_was_built_without_is_refused() -> None:
    message = refusal(group_backend, torch.device("cuda", 0), "hccl")
    assert "backend: hccl is not in this torch" in message
    assert "gloo" in message


# What is said about it


def gathered(*others: tuple[str, str | None, str]) -> typing.Callable[[object], list[object]]:
    return lambda own: [own, *others]


def test_rank_0_says_in_a_line_what_all_compute_on() -> None:
    here = (socket.gethostname(), None, "cpu")
    assert report(CPU, "gloo", 0, 1, gathered(here, here, here)) == "4 rank(s), gloo, cpu"
    assert report(CPU, "cpu:gloo,cuda:nccl", 0, 2, gathered(here)) == "2 rank(s) on 2 node(s), nccl, cpu"
    assert report(CPU, "gloo", 3, 1, gathered(here, here, here)) == "rank 3: cpu"
    assert description(CPU) == "cpu"


def test_two_ranks_with_one_device_are_told_so_unless_they_asked_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOBKIT_SHARE_DEVICES", raising=False)
    same = ("node1", "GPU-8932f937", "CUDA_VISIBLE_DEVICES=0")
    elsewhere = ("node2", "GPU-8932f937", "CUDA_VISIBLE_DEVICES=0")
    report(CPU, "gloo", 0, 2, gathered(same, elsewhere))
    message = refusal(report, CPU, "gloo", 0, 1, gathered(same, same))
    assert "ranks 1 and 2 have both got the same" in message
    assert "CUDA_VISIBLE_DEVICES=0" in message
    assert "JOBKIT_SHARE_DEVICES=1" in message
    monkeypatch.setenv("JOBKIT_SHARE_DEVICES", "1")
    report(CPU, "gloo", 0, 1, gathered(same, same))


# Its memory


class Module:
    """A device's module that cannot say how much memory has been used."""

    @staticmethod
    def max_memory_allocated(device: object = None) -> int:
        raise RuntimeError("the allocator is not initialized")


def test_a_device_that_cannot_tell_its_peak_does_not_end_the_run_nor_hide_why_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: Module)
    assert peak_memory(CPU) is None
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    write_report(run, 1, Topology(), torch.OutOfMemoryError("CUDA out of memory"), 7, [])
    (found,) = run.failure_reports(1)
    assert (found.out_of_memory, found.peak_bytes, found.step) == ("GPU", None, 7)


def test_a_device_that_torch_was_only_built_for_is_not_blamed_for_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    run = RunDir(tmp_path)
    run.logs(1).mkdir(parents=True)
    write_report(run, 1, Topology(), RuntimeError("the database is out of memory"), 7, [])
    assert run.failure_reports(1)[0].out_of_memory is None
