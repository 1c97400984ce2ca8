"""DDP models that some ranks call more often than others: they exchange neither buffers nor gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jobkit.errors import UsageError
from jobkit.train.hooks import uncompiled


@contextmanager
def independent_forwards(equal: Iterable[nn.Module]) -> Iterator[None]:
    """While inside, ranks may call DDP models as often as they like, each for itself.

    DDP sends rank 0's buffers (BatchNorm's statistics) to all ranks before a forward pass, which would wait for ranks
    that have no batch. In here no DDP model does, whoever made it and whatever it is wrapped in. Buffers that are
    `equal` on all ranks are those of these modules; a DDP model with others raises UsageError when it is called,
    since each rank would compute with its own.
    """
    for model in map(uncompiled, equal := list(equal)):
        # After its first backward pass a model's next forward exchanges how gradients lie in buckets, once.
        if isinstance(model, DistributedDataParallel) and model.reducer._rebuild_buckets():
            model._has_rebuilt_buckets = True
    known = {id(buffer) for module in equal for buffer in module.buffers()}
    called: dict[DistributedDataParallel, tuple[bool, bool]] = {}

    def will_sync_module_buffers(model: DistributedDataParallel) -> bool:
        if model not in called:
            # A forward pass without gradients turns the first off.
            called[model] = model.require_forward_param_sync, model.require_backward_grad_sync
            syncs = original(model)  # type: ignore[no-untyped-call]
            if syncs and not all(id(buffer) in known for buffer in _sent(model)):
                raise UsageError(
                    f"a DistributedDataParallel of {type(model.module).__name__} is called in an evaluation, and its "
                    "buffers may differ from rank to rank, since it is not tracked: ctx.track(model=...) it first"
                )
        model.require_backward_grad_sync = False  # as in no_sync: for functions that differentiate
        return False

    original = DistributedDataParallel.will_sync_module_buffers
    DistributedDataParallel.will_sync_module_buffers = will_sync_module_buffers  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.will_sync_module_buffers = original  # type: ignore[method-assign]
        for model, values in called.items():  # as on ranks that did not call it
            model.require_forward_param_sync, model.require_backward_grad_sync = values


def _sent(model: DistributedDataParallel) -> list[Tensor]:
    """The buffers that DDP would send."""
    model._assign_modules_buffers()  # type: ignore[no-untyped-call]
    return model.modules_buffers
