"""The order in which DDP's gradients become ready, which its buckets follow: learnt once, and kept by a resumed run.

parallelizer.py makes one for each DDP module, whoever made that; a checkpoint holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jobkit.checkpoint.leaves import plain_module
from jobkit.log import log


class GradientOrder:
    """The order of one DDP module, from its first synchronised backward pass on.

    DDP begins with one bucket, and after that pass lays its buckets out in the order in which gradients became ready on
    the first rank of its group: the ones that are ready are sent while others are still computed. Where an element
    stands in a bucket decides in which order the ranks' gradients are added, so that a resumed run, whose first step
    would use the first layout again, would differ from the uninterrupted one in the last bit: `fix_bucket_order`
    gives it the order.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)  # a script may make another one in its place
        self.members = members_of(model)
        """The ranks that add their gradients up."""
        self._is_first = dist.get_rank(model.process_group) == 0
        self._order: list[str] | None = None
        self._seen: dict[str, None] = {}
        """In their order: of a static graph's gradients, which may be added to several times, the last one counts."""
        self._hooks: list[Any] = []
        self._hook: Any = None
        """The hook of a static graph: all ranks have it until they have laid the buckets out together."""
        if not has_order(model):
            return
        if model.static_graph:
            self._hook = model.register_forward_pre_hook(lambda *_: self._fix_static_graph())
        if self._is_first:
            for name, parameter in _reduced(model).items():
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(partial(self._ready, name)))

    @property
    def model(self) -> Any:
        """The DDP module, whose reducer is not public; None once nobody has it."""
        return self._model()

    def learnt(self) -> list[str] | None:
        """Return the parameters in the order in which gradients became ready; None on all but the first rank.

        To be called between two backward passes.
        """
        if self._order is None and self._seen:
            order = list(self._seen)
            unused = [name for name in _reduced(self.model) if name not in self._seen]
            self._seen.clear()
            if not unused or self.model.static_graph:  # else DDP will say what is wrong
                self._order = [*order, *unused]
        if self._order is not None:
            self._forget_hooks()
        return self._order if self._is_first else None

    def fix_bucket_order(self, order: Sequence[str] | None, in_buckets: Sequence[str] | None = None) -> bool:
        """Lay the buckets out for an order that was learnt before, given on the first rank of the group. Collective.

        Return False where there is none, or where it is one of other parameters. In a restore `in_buckets` names the
        parameters whose gradients lie in the buckets: as zeros, to be filled. PyTorch lays a reducer's buckets out
        once: its parameters are given to a new one in that order, which is then told that all of them are ready.
        """
        model = self.model
        if not has_order(model):
            return False
        box = [list(order) if order is not None else None]
        dist.broadcast_object_list(box, group=model.process_group, group_src=0)
        chosen, names = box[0], {parameter: name for name, parameter in _reduced(model).items()}
        if chosen is None or set(chosen) != set(names.values()):
            return False
        self._order = chosen
        self._forget_hooks()
        if self._hook is not None:
            self._hook.remove()
        place = {name: number for number, name in enumerate(chosen)}
        listed = sorted(zip(*model._build_params_for_reducer(), strict=True), key=lambda pair: place[names[pair[0]]])
        parameters, sparse = [parameter for parameter, _ in listed], [is_sparse for _, is_sparse in listed]
        if in_buckets is not None:  # a new reducer takes the gradients that are there into its buckets
            for parameter, name in names.items():
                parameter.grad = torch.zeros_like(parameter) if name in in_buckets else None
        model.reducer = model.logger = None  # first: they hold a bucket for every gradient
        model._ddp_init_helper(
            parameters, sparse, model._build_debug_param_to_name_mapping(parameters), model.static_graph
        )
        for hook, state in model._comm_hooks:
            model.logger._set_comm_hook_name(hook.__qualname__)
            dist._register_comm_hook(model.reducer, state, hook)  # type: ignore[attr-defined]
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()
        model._has_rebuilt_buckets = True
        if model.static_graph:  # the new reducer has not seen the graph yet
            model.static_graph = False
            model._set_static_graph()
        return True

    def in_buckets(self) -> list[str]:
        """Return the parameters whose gradients lie in DDP's buckets, as with `gradient_as_bucket_view`.

        None where a communication hook divides: it takes the others as they are.
        """
        if not self.model.gradient_as_bucket_view or self.model._comm_hooks:
            return []
        gradients = ((name, parameter.grad) for name, parameter in plain_module(self.model).named_parameters())
        return [name for name, gradient in gradients if gradient is not None and gradient._is_view()]

    def put_in_buckets(self, names: Sequence[str]) -> None:
        """Let gradients lie in the buckets of a DDP whose buckets are not laid out, as zeros. Collective.

        DDP divides these by the number of ranks, and multiplies others by its inverse: not the same on three ranks. It
        takes a gradient into its bucket in a backward pass, so there is one of zeros.
        """
        model = self.model
        if not names:
            return
        if model.static_graph or model.mixed_precision is not None or any(model._build_params_for_reducer()[1]):
            self._say_inexact("gradient_as_bucket_view and zero_grad(set_to_none=False)", "rounds gradients otherwise")
            return
        reduced = _reduced(model)
        for parameter in reduced.values():
            parameter.grad = None
        outputs = [parameter.view_as(parameter) for parameter in reduced.values()]  # DDP may look which it leads to
        model.reducer.prepare_for_backward(outputs)
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        self._seen.clear()  # that pass has no order
        for name, parameter in reduced.items():
            if name not in names:
                parameter.grad = None

    def say_if_lost(self) -> None:
        """Warn where a run will not be exact. The sum of two ranks is the same in any order."""
        words = _obstacle(self.model) if _follows_order(self.model) else None
        if words:
            self._say_inexact(words, "adds gradients up in another order")

    def _say_inexact(self, words: str, act: str) -> None:
        if self._is_first and len(self.members) > 2:
            log.warning(
                "DistributedDataParallel with %s: an attempt that continues %s, and on three ranks or more the run is "
                "not exact",
                *(words, act),
            )

    def fix_in_reverse(self) -> None:
        """Lay the buckets of a pipeline's stage out before its first step: a schedule runs in between DDP's own looks.

        The blocks of a stage are computed in the order of registration. Collective.
        """
        self.fix_bucket_order(list(_reduced(self.model))[::-1])

    def _ready(self, name: str, _: Tensor) -> None:
        model = self.model  # of what is only accumulated DDP takes none
        if self._order is None and model is not None and model.require_backward_grad_sync:
            if model.static_graph:
                self._seen.pop(name, None)
            self._seen[name] = None

    def _fix_static_graph(self) -> None:
        """Before the second step: DDP itself would do it a step later, and a resumed run another step later still."""
        # Without gradients ranks need not come here together, as in an evaluation.
        if torch.is_grad_enabled() and self.model._static_graph_delay_allreduce_enqueued:
            self.fix_bucket_order(self.learnt())

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def members_of(model: DistributedDataParallel) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(model.process_group))


def has_order(model: Any) -> bool:
    """Return whether DDP lays buckets out by the order of this module's gradients, and takes a new layout."""
    return _follows_order(model) and _obstacle(model) is None


def _follows_order(model: Any) -> bool:
    """DDP does not where it looks for unused parameters, and where torch.compile adds the gradients up."""
    return (model.static_graph or not model.find_unused_parameters) and not model._use_python_reducer


def _obstacle(model: Any) -> str | None:
    """Return what a new reducer would lose, so that DDP keeps its own; None where that is nothing."""
    if model._delay_all_reduce_params:
        return "delay_all_reduce_named_params"
    if model.mixed_precision is not None:
        return "mixed_precision"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        return "an optimizer that steps in backward"
    if model._get_ddp_logging_data().get("comm_hook") and not model._comm_hooks:
        return "a built-in communication hook"
    return None


def _reduced(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that DDP's reducer has, by the name that they have without torch.compile."""
    parameters, _ = model._build_params_for_reducer()
    names = {parameter: name for name, parameter in plain_module(model).named_parameters()}
    return {names[parameter]: parameter for parameter in parameters}
