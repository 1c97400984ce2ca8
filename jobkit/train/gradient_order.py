"""The order in which DDP's gradients become ready, which its buckets follow: learnt once, and kept by a resumed run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jobkit.train.names import named_parameters
from jobkit.train.pipeline import Pipeline


class GradientOrder:
    """The order of one DDP module, from its first synchronised backward pass on.

    DDP begins with one bucket, and after that pass lays its buckets out in the order in which gradients became ready on
    the first rank of its group: the ones that are ready are sent while others are still computed. Where an element
    stands in a bucket decides in which order the ranks' gradients are added, so that a resumed run, whose first step
    would use the first layout again, would differ from the uninterrupted one in the last bit: `settle` it is given
    the order of.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model: Any = model  # what it needs of DDP is not public
        self._is_first = dist.get_rank(model.process_group) == 0
        self._known: list[str] | None = None
        self._seen: list[str] = []
        self._hooks: list[Any] = []
        if not has_order(model):
            return
        if model.static_graph:
            self._hooks.append(model.register_forward_pre_hook(lambda *_: self._settle_static_graph()))
        if self._is_first:
            for name, parameter in _reduced(model).items():
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(partial(self._ready, name)))

    def known(self) -> list[str] | None:
        """Names of the parameters, by when their gradients became ready; None before, and on all but the first rank.

        To be called between two backward passes.
        """
        if self._known is None and self._seen:
            # DDP follows the first pass. In a static graph's a gradient may be added to several times: the last counts.
            last = list(dict.fromkeys(reversed(self._seen)))[::-1]
            order = last if self.model.static_graph else list(dict.fromkeys(self._seen))
            unused = [name for name in _reduced(self.model) if name not in set(order)]
            self._seen.clear()
            if not unused or self.model.static_graph:  # else DDP will say what is wrong
                self._known = [*order, *unused]
        if self._known is not None:
            self._forget_hooks()
        return self._known if self._is_first else None

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
        found, names = box[0], {parameter: name for name, parameter in _reduced(model).items()}
        if found is None or set(found) != set(names.values()):
            return
        self._known = found
        self._forget_hooks()
        place = {name: number for number, name in enumerate(found)}
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

    def _ready(self, name: str, _: Tensor) -> None:
        if self._known is None and self.model.require_backward_grad_sync:  # of what is only accumulated DDP takes none
            self._seen.append(name)

    def _settle_static_graph(self) -> None:
        """Before the second step: DDP itself would do it a step later, and a resumed run another step later still."""
        # Without gradients ranks need not come here together, as in an evaluation.
        if torch.is_grad_enabled() and self.model._static_graph_delay_allreduce_enqueued:
            self.settle(self.known())

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def settle_stage(model: DistributedDataParallel) -> None:
    """Lay the buckets of a pipeline's stage out before its first step, in reverse order of registration. Collective.

    The schedule's passes come in between what DDP looks at. A stage's blocks are computed in the order of registration.
    """
    GradientOrder(model).settle(list(_reduced(model))[::-1])


def orders_of(value: Any) -> list[GradientOrder]:
    """One for each DDP module that `value` is, or has in it, but for a pipeline's stage."""
    modules = value.modules() if isinstance(value, nn.Module) and not isinstance(value, Pipeline) else ()
    return [GradientOrder(module) for module in modules if isinstance(module, DistributedDataParallel)]


def known_orders(orders: Sequence[GradientOrder]) -> list[list[str] | None]:
    """What each has learnt, for a checkpoint."""
    return [order.known() for order in orders]


def settle_all(orders: Sequence[GradientOrder], known: Sequence[Sequence[str] | None]) -> None:
    """Settle each as `known_orders` was, on all ranks, also where a rank has none of them. Collective."""
    for order, names in zip_longest(orders, known[: len(orders)]):
        order.settle(names)


def has_order(model: Any) -> bool:
    """Whether DDP lays the buckets of this module out by the order of its gradients, and that can be done for it.

    It does not where it looks for unused parameters. What has been set up in a reducer, as PyTorch's own built-in
    compression, optimizers that step in backward, DDP's mixed precision, would be lost with it.
    """
    if model.find_unused_parameters and not model.static_graph:
        return False
    special = model._use_python_reducer or model.mixed_precision is not None or model._delay_all_reduce_params
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters())
    built_in_hook = bool(model._get_ddp_logging_data().get("comm_hook")) and not model._comm_hooks
    return not (special or in_backward or built_in_hook)


def _reduced(model: Any) -> dict[str, nn.Parameter]:
    """The parameters that DDP's reducer has, by the name that they have without torch.compile."""
    parameters, _ = model._build_params_for_reducer()
    names = {parameter: name for name, parameter in named_parameters(model.module).items()}
    return {names[parameter]: parameter for parameter in parameters}
