"""The weights a spread module begins with: rank 0's on every rank, or drawn from the seed where there are none yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import swap_tensors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from jobkit.checkpoint.state import bytes_of
from jobkit.errors import UsageError
from jobkit.train.devices import is_spread_by_hand
from jobkit.train.initialise import Block, blocks_of, is_untouched
from jobkit.train.seeds import derive_seed, preserved_generators, seed_generators


@dataclass
class _Whole:
    """A parameter or buffer of the module as the user built it."""

    names: list[str]
    """More than one where it is tied."""
    shape: torch.Size
    dtype: torch.dtype
    drawn: bool
    """Whether it has no values yet: it is on the meta device."""
    changes: int
    """How often it had been written to: on the meta device, what the module's constructor did to it."""
    value: Tensor | None
    """On rank 0."""

    @property
    def about(self) -> tuple[list[str], list[int], str]:
        return self.names, list(self.shape), str(self.dtype)


class Weights:
    """What a module has before it is spread over the ranks, given to each rank's part of it afterwards.

    Every rank gets the values of rank 0, whatever it has itself, one whole tensor at a time on the device: with
    `if ctx.is_main: load(pretrained)` all ranks train the pretrained weights. What is on the meta device is drawn
    there, block by block, by `init_weights()` or `reset_parameters()`, from the seed and the block's name: the same on
    any number of ranks of one kind of device. Ranks that are not 0 may have all of it on meta, and rank 0 values.
    Tensors of subclasses and sparse ones are left as they are.

    Made, and filled in, on all ranks together. Raises UsageError where the ranks have different modules, or something
    on meta cannot initialise itself.
    """

    def __init__(self, module: nn.Module, device: torch.device, seed: int, rank: int, world_size: int) -> None:
        self._device, self._seed = device, seed
        self._is_main, self._several = rank == 0, world_size > 1
        named = named_tensors(module)
        self._is_needed = self._several or any(tensor.is_meta for tensor in named.values())
        self._wholes = _wholes(named, self._is_main) if self._is_needed else []
        self._blocks: list[Block] = []
        if self._is_needed:
            problem = self._begin(module) if self._is_main else None
            drawn = self._agree(problem)
            for whole, is_drawn in zip(self._wholes, drawn, strict=True):
                whole.drawn = is_drawn
            to_draw = {name for whole in self._wholes if whole.drawn for name in whole.names}
            if to_draw:
                self._blocks = [block for block in blocks_of(module)[0] if block.names & to_draw]

    def _begin(self, module: nn.Module) -> str | None:
        """Rank 0: draw what only the module as a whole can, on the host; the reason where something cannot be drawn."""
        if not any(whole.drawn for whole in self._wholes):
            return None
        blocks, missing = blocks_of(module)
        for name, part in missing:
            return (
                f"{name or 'the model'} ({type(part).__name__}) is on the meta device and cannot initialise itself: "
                "give it a reset_parameters(), the model an init_weights(), or build it with real weights"
            )
        for block in blocks:
            if block.name == "":
                try:
                    drawn = self._drawn(block, torch.device("cpu"))
                except UsageError as error:
                    return str(error)
                for whole, value in drawn:
                    whole.value, whole.drawn = value, False
        return None

    def _agree(self, problem: str | None) -> list[bool]:
        """Which tensors are to be drawn, as rank 0 has it; UsageError, on all ranks, where there is a problem."""
        mine = [whole.about for whole in self._wholes]
        said: list[Any] = [(problem, mine, [whole.drawn for whole in self._wholes])]
        differs = ""
        if self._several:
            dist.broadcast_object_list(said, src=0, device=self._device)
            differs = _difference(said[0][1], mine)
            wrong = torch.tensor(int(bool(differs)), device=self._device)
            dist.all_reduce(wrong)
            if wrong.item() and not differs:
                differs = "another rank's has other tensors"
        problem, _, drawn = said[0]
        if problem:
            raise UsageError(f"ctx.parallelize: {problem}")
        if differs:
            raise UsageError(f"ctx.parallelize: the model is not the same as rank 0's: {differs}")
        return list(drawn)

    def fill(self, module: nn.Module, *, send: bool = True) -> None:
        """Give a spread module, or a stage of it, that has its tensors on the device, their values.

        Without `send`, for DDP, which sends rank 0's itself: only on rank 0.
        """
        targets, here = named_tensors(module), set(module.modules())
        for block in self._blocks:
            if block.parts[0] in here:  # and not on another stage
                for whole, value in self._drawn(block, self._device):
                    _put(whole, value, targets)
        for whole in self._wholes:
            if not whole.drawn and (send or self._is_main):
                _put(whole, self._sent(whole, send), targets)
                whole.value = None  # one tensor after the other is freed

    def _sent(self, whole: _Whole, send: bool) -> Tensor:
        if whole.value is not None:
            value = whole.value.to(self._device).contiguous()
        else:
            value = torch.empty(whole.shape, dtype=whole.dtype, device=self._device)
        if self._several and send and value.numel():
            dist.broadcast(bytes_of(value), src=0)  # bytes: gloo does not know every type
        return value

    def _drawn(self, block: Block, device: torch.device) -> list[tuple[_Whole, Tensor]]:
        """The values of a block's tensors that have none yet."""
        by_name = {name: whole for whole in self._wholes for name in whole.names}
        owned = {name: whole for name, whole in by_name.items() if whole.drawn and name in block.names}
        with preserved_generators(self._device), block.unspread(by_name, device) as values, torch.no_grad():
            seed_generators(derive_seed(self._seed, "init", block.name), self._device)
            for initialise in block.initialisers:
                initialise()
            found = values()
        drawn = []
        for name, whole in owned.items():
            if whole.names[0] != name:
                continue  # a tied one is its first owner's
            value, changes = found[name]
            if is_untouched(value, changes):
                raise UsageError(
                    f"ctx.parallelize: {name} is on the meta device, and what initialises "
                    f"{block.name or 'the model'} leaves it as it is: see to it in init_weights() or reset_parameters()"
                )
            if whole.changes > changes and not block.is_by_model:
                raise UsageError(
                    f"ctx.parallelize: {name} is on the meta device, and was given values by other code than "
                    "reset_parameters(), which would be lost: give the model an init_weights() that does it all, or "
                    "build it with real weights"
                )
            drawn.append((whole, value))
        return drawn


def materialise(module: nn.Module, device: torch.device, shards_on: torch.device | None = None) -> None:
    """Put a module on `device`, in place: what is on meta becomes tensors without values, all else is moved.

    Shards go to `shards_on`, if that is another one. Parameters remain the same objects, so that tied ones stay tied.
    """

    def place_of(tensor: Tensor) -> torch.device:
        return shards_on if shards_on is not None and isinstance(tensor, DTensor) else device

    for tensor in dict.fromkeys(named_tensors(module).values()):
        if tensor.is_meta:
            empty = torch.empty_like(tensor, device=place_of(tensor))
            is_parameter = isinstance(tensor, nn.Parameter)
            swap_tensors(  # type: ignore[no-untyped-call]
                tensor, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            )
    if not is_spread_by_hand(module, device):
        if shards_on is None:
            module.to(device)  # fully_shard looks at its parameters again
        else:  # as `to` does it, with another place for each
            module._apply(lambda tensor: tensor.to(place_of(tensor)))  # type: ignore[no-untyped-call]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those that are not saved too, by each name they have."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _wholes(named: dict[str, Tensor], is_main: bool) -> list[_Whole]:
    found: dict[int, _Whole] = {}
    for name, tensor in named.items():
        if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
            continue
        if id(tensor) not in found:
            # Not the parameter itself, whose data moves to the device: its memory on the host.
            value = tensor.detach() if is_main and not tensor.is_meta else None
            about = tensor.shape, tensor.dtype, tensor.is_meta, tensor._version
            found[id(tensor)] = _Whole([], *about, value)
        found[id(tensor)].names.append(name)
    return list(found.values())


def _difference(first: list[Any], mine: list[Any]) -> str:
    for left, right in zip(first, mine, strict=False):
        if tuple(left) != tuple(right):
            return f"it has {_described(left)}, this rank's {_described(right)}"
    return f"it has {len(first)} tensors, this rank's {len(mine)}" if len(first) != len(mine) else ""


def _described(about: Any) -> str:
    names, shape, dtype = about
    return f"{' and '.join(names)} {shape} {dtype.removeprefix('torch.')}"


def _put(whole: _Whole, value: Tensor, targets: dict[str, Tensor]) -> None:
    """Copy a whole tensor, or this rank's part of it, to where it belongs on this rank."""
    with torch.no_grad():
        for target in {id(targets[name]): targets[name] for name in whole.names if name in targets}.values():
            if isinstance(target, DTensor):
                place = target.device_mesh, target.placements
                part = distribute_tensor(value, *place, src_data_rank=None)  # of what this rank has: nothing is sent
                target.to_local().copy_(part.to_local())
            else:
                target.copy_(value)
