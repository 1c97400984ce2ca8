"""The order in which DDP's gradients become ready, which its buckets follow: learnt once, and kept by a resumed run.

spread.py makes one for each DDP module; a checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jobkit.checkpoint.live import plain_module


class GradientOrder:
    """The order of one DDP module, from its first synchronised backward pass on.

    DDP begins with one bucket, and after that pass lays its buckets out in the order in which gradients became ready on
    the first rank of its group: the ones that are ready are sent while others are still computed. Where an element
    stands in a bucket decides in which order the ranks' gradients are added, so that a resumed run, whose first step
    would use the first layout again, would differ from the uninterrupted one in the last bit: `settle` gives it the
    order.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model: Any = model  # its reducer is not public
        self._is_first = dist.get_rank(model.process_group) == 0
        self._order: list[str] | None = None
        self._seen: list[str] = []
        self._hooks: list[Any] = []
        self._settling: Any = None
        """The hook of a static graph: all ranks have it until they have settled together."""
        if not has_order(model):
            return
        if model.static_graph:
            self._settling = model.register_forward_pre_hook(lambda *_: self._settle_static_graph())
        if self._is_first:
            for name, parameter in _reduced(model).items():
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(partial(self._ready, name)))

    def learnt(self) -> list[str] | None:
        """Return the parameters in the order in which gradients became ready; None on all but the first rank.

        To be called between two backward passes.
        """
        if self._order is None and self._seen:
            # DDP follows the first pass. In a static graph's a gradient may be added to several times: the last counts.
            last = list(dict.fromkeys(reversed(self._seen)))[::-1]
            order = last if self.model.static_graph else list(dict.fromkeys(self._seen))
            unused = [name for name in _reduced(self.model) if name not in set(order)]
            self._seen.clear()
            if not unused or self.model.static_graph:  # else DDP will say what is wrong
                self._order = [*order, *unused]
        if self._order is not None:
            self._forget_hooks()
        return self._order if self._is_first else None

    def settle(self, order: Sequence[str] | None) -> None:
        """Lay the buckets out for an order that was learnt before, given on the first rank of the group. Collective.

        Nothing happens where there is none, or where it is one of other parameters. PyTorch lays a reducer's buckets
        out once: its parameters are given to a new one in that order, which is then told that all of them are ready.
        """
        model = self.model
        if not has_order(model):
            return
        box = [list(order) if order is not None else None]
        dist.broadcast_object_list(box, group=model.process_group, group_src=0)
        chosen, names = box[0], {parameter: name for name, parameter in _reduced(model).items()}
        if chosen is None or set(chosen) != set(names.values()):
            return
        self._order = chosen
        self._forget_hooks()
        if self._settling is not None:
            self._settling.remove()
        place = {name: number for number, name in enumerate(chosen)}
        listed = sorted(zip(*model._build_params_for_reducer(), strict=True), key=lambda pair: place[names[pair[0]]])
        parameters, sparse = [parameter for parameter, _ in listed], [is_sparse for _, is_sparse in listed]
        model.reducer = model.logger = None  # first: they hold a bucket for every gradient
        model._ddp_init_helper(
            parameters, sparse, model._build_debug_param_to_name_mapping(parameters), model.static_graph
        )
        for hook, state in model._comm_hooks:
            model.logger._set_comm_hook_name(hook.__qualname__)
            dist._register_comm_hook(model.reducer, state, hook)  # type: ignore[attr-defined]
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()
        if model.static_graph:  # the new reducer has not seen the graph yet
            model.static_graph = False
            model._set_static_graph()

    def settle_in_reverse(self) -> None:
        """Lay the buckets of a pipeline's stage out before its first step: a schedule runs in between DDP's own looks.

        The blocks of a stage are computed in the order of registration. Collective.
        """
        self.settle(list(_reduced(self.model))[::-1])

    def _ready(self, name: str, _: Tensor) -> None:
        if self._order is None and self.model.require_backward_grad_sync:  # of what is only accumulated DDP takes none
            self._seen.append(name)

    def _settle_static_graph(self) -> None:
        """Before the second step: DDP itself would do it a step later, and a resumed run another step later still."""
        # Without gradients ranks need not come here together, as in an evaluation.
        if torch.is_grad_enabled() and self.model._static_graph_delay_allreduce_enqueued:
            self.settle(self.learnt())

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def has_order(model: Any) -> bool:
    """Return whether DDP lays buckets out by the order of this module's gradients, and takes a new layout.

    DDP does not where it looks for unused parameters. A new reducer would lose the built-in compression, optimizers
    that step in backward, and DDP's mixed precision.
    """
    if model.find_unused_parameters and not model.static_graph:
        return False
    special = model._use_python_reducer or model.mixed_precision is not None or model._delay_all_reduce_params
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters())
    built_in_hook = bool(model._get_ddp_logging_data().get("comm_hook")) and not model._comm_hooks
    return not (special or in_backward or built_in_hook)


def _reduced(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that DDP's reducer has, by the name that they have without torch.compile."""
    parameters, _ = model._build_params_for_reducer()
    names = {parameter: name for name, parameter in plain_module(model).named_parameters()}
    return {names[parameter]: parameter for parameter in parameters}
