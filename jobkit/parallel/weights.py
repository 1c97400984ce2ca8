"""The weights that a run begins with: the same on all ranks, drawn from the seed, or rank 0's.

parallelizer.py calls this before a module is spread. A module on the meta device is materialised here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobkit.data.seeds import derive_seed, preserved_generators, seed_generators
from jobkit.errors import UsageError
from jobkit.wire.group import RankGroup


def materialise(module: nn.Module, device: torch.device, seed: int) -> nn.Module:
    """Return the module on the device; parameters on the meta device are drawn by the module's own initialisers.

    `init_weights()` of the whole module, else `reset_parameters()` of each part. Raises UsageError for a part that has
    tensors of its own on the meta device and neither of them.
    """
    is_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    if not is_meta:
        return module.to(device)
    module.to_empty(device=device)
    with preserved_generators(device):
        seed_generators(derive_seed(seed, "weights"), device)
        whole = getattr(module, "init_weights", None)
        if callable(whole):
            whole()
            return module
        for name, part in module.named_modules():
            reset = getattr(part, "reset_parameters", None)
            if callable(reset):
                reset()
            elif any(True for _ in part.parameters(recurse=False)) or any(True for _ in part.buffers(recurse=False)):
                raise UsageError(
                    f"{name or 'the module'} ({type(part).__name__}) is on the meta device and has no "
                    "reset_parameters(): give the whole module init_weights()"
                )
    return module


def check_same_module(module: nn.Module, ranks: RankGroup) -> None:
    """Raise UsageError, on all ranks, where a rank has parameters of other names or shapes than rank 0."""
    form = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _tensors(module)]
    forms = ranks.gather(form)
    for rank, other in enumerate(forms):
        if other != forms[0]:
            pairs = zip([*forms[0], None], [*other, None], strict=False)
            first = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
            raise UsageError(
                f"ctx.parallelize: rank 0 has {_words(first[0])}, where rank {rank} has {_words(first[1])}"
            )


def broadcast(module: nn.Module, ranks: RankGroup) -> None:
    """Give all ranks rank 0's parameters and buffers."""
    tensors = [tensor.detach() for _, tensor in _tensors(module)]
    group = dist.group.WORLD
    if tensors and ranks.world_size > 1 and group is not None:
        dist._broadcast_coalesced(group, tensors, 250 << 20, 0)  # type: ignore[attr-defined]


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _words(form: tuple[str, tuple[int, ...], str] | None) -> str:
    return "nothing" if form is None else f"{form[0]} {list(form[1])} {form[2].removeprefix('torch.')}"
