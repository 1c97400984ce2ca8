"""AdamW and an exponential moving average of the weights in one optimizer. A training function calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from jobkit.log import log


class EmaAdamW(torch.optim.AdamW):
    """torch's AdamW, which after each update also moves an average of each parameter, `state[p]["ema"]`.

    The average starts as the parameter before its first update; each update moves it by

        ema = d ema + (1 - d) p        d = min(ema_decay, (1 + n) / (10 + n))

    where n is how often this parameter has been updated, this update included: 1 at the first, with d = 2 / 11. That is
    AdamW's own `step` of the parameter, so a resumed run goes on exactly. As in AdamW a parameter without a gradient is
    left alone, its average too, and an update that a GradScaler skips does not count. The average is float32 where the
    parameter is of fewer bits, and sharded as the parameter is. Nothing here waits for the device.

    Fused where the device of the parameters has such a kernel; elsewhere AdamW without it takes the same steps but for
    rounding, and keeps the average. `fused` is None for that; False never uses the kernel, True raises ValueError where
    it cannot be used.

    AdamW: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101. The decay's growth is that of TensorFlow's
    ExponentialMovingAverage with num_updates.
    """

    _trained: list[tuple[Tensor, Tensor]] | None = None
    """Inside `averaged`: the parameters there are averages of, and the values they had."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        ema_decay: float = 0.9999,
        fused: bool | None = None,
    ) -> None:
        if not 0.0 <= ema_decay < 1.0:
            raise ValueError(f"ema_decay: found {ema_decay}, expected 0 or more and less than 1")
        super().__init__(params, lr, betas, eps, weight_decay)
        self.defaults["ema_decay"] = ema_decay
        for group in self.param_groups:
            group.setdefault("ema_decay", ema_decay)
        self._use_fused(fused)
        self._listen()

    def _use_fused(self, fused: bool | None) -> None:
        for group in self.param_groups:
            reason = why_not_fused(group["params"])
            if fused and reason:
                raise ValueError(f"fused=True: there is no fused AdamW {reason}; fused=None uses it where there is")
            if fused is None and reason:
                _warn_once(f"no fused AdamW {reason}: using the plain one; the moving average is kept")
            # With False, torch would not take its multi-tensor kernels either.
            group["fused"] = True if fused is not False and reason is None else None
        # What torch's own AdamW says to a GradScaler: call step anyway, the kernel looks for infinities itself.
        self._step_supports_amp_scaling = all(group["fused"] for group in self.param_groups)

    def _listen(self) -> None:
        # A hook, not a `step` of our own: torch wraps each class's `step`, and hooks would be called once for each.
        if self._move_averages not in self._optimizer_step_post_hooks.values():
            self.register_step_post_hook(self._move_averages)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._listen()  # a copy of an optimizer comes without its hooks

    def _init_group(self, group: dict[str, Any], params_with_grad: list[Tensor], *lists: Any) -> bool:
        """Called by torch in each step, when gradients are there and before anything is updated."""
        if self._trained is not None:
            raise RuntimeError("optimizer.step() inside averaged(): the parameters are their averages there")
        has_complex: bool = super()._init_group(group, params_with_grad, *lists)  # type: ignore[no-untyped-call]
        for parameter in params_with_grad:
            if "ema" not in self.state[parameter]:
                self.state[parameter]["ema"] = parameter.detach().to(_average_type(parameter), copy=True)
        return has_complex

    @torch.no_grad()
    def _move_averages(self, *_: Any) -> None:
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not updated:
                continue
            averages = [_local(self.state[parameter]["ema"]) for parameter in updated]
            values = [_local(parameter).to(average) for parameter, average in zip(updated, averages, strict=True)]
            steps = [self.state[parameter]["step"] for parameter in updated]
            weights = _weights(steps, group["ema_decay"], getattr(self, "found_inf", None))
            torch._foreach_lerp_(averages, values, weights)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While inside, the parameters hold their averages; afterwards, also by an exception, what they held before.

        A parameter that was never updated is its own average. Takes the memory of one more copy of the parameters.
        Raises RuntimeError inside itself. Modules that keep copies of sharded parameters from one forward to the next
        (fully_shard without reshard_after_forward) must reshard at both ends.
        """
        if self._trained is not None:
            raise RuntimeError("averaged() inside averaged(): the parameters are their averages already")
        averages = {parameter: state["ema"] for parameter, state in self.state.items() if "ema" in state}
        with torch.no_grad():
            self._trained = [(parameter, _local(parameter).clone()) for parameter in averages]
            try:
                for parameter, average in averages.items():
                    _local(parameter).copy_(_local(average))
                with torch.enable_grad():
                    yield
            finally:
                for parameter, value in self._trained:
                    _local(parameter).copy_(value)
                self._trained = None

    has_plain_state = True
    """For the checkpoint: tensors by parameter and options by group are all of the state."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`, of an optimizer with or without the fused kernel."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        options = [(group["fused"], group["ema_decay"]) for group in self.param_groups]
        super().load_state_dict(dict(state_dict))
        for group, (fused, ema_decay) in zip(self.param_groups, options, strict=True):
            group["fused"] = fused  # as this device has it, not the one that the state was saved on
            group.setdefault("ema_decay", ema_decay)  # a plain AdamW's state is taken, too
        parameters = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        for key, (group, parameter) in zip(saved, parameters, strict=True):
            if key not in state_dict["state"]:
                continue
            state = self.state[parameter]
            state["step"] = state["step"].to("cpu" if group["fused"] is None else parameter.device, torch.float32)
            if (average := state_dict["state"][key].get("ema")) is not None:  # torch gave it the parameter's type
                state["ema"] = average.to(parameter.device, _average_type(parameter))


FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Devices for which torch has a fused AdamW."""

fused_ema_adam = EmaAdamW
"""The name that a training function uses."""


def why_not_fused(parameters: Sequence[Tensor]) -> str | None:
    """Return why these parameters cannot have a fused AdamW, as `on npu`; None where they can."""
    for name in {parameter.device.type for parameter in parameters}:
        if name not in FUSED_DEVICES:
            return f"on {name}"
    if not all(parameter.is_floating_point() for parameter in parameters):
        return "for complex numbers"
    if len({parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in parameters}) > 1:
        return "for whole and sharded parameters in one group"
    return None


def _weights(steps: list[Tensor], decay: float, found_inf: Tensor | None) -> list[float] | list[Tensor]:
    """Return 1 - min(decay, (1 + n) / (10 + n)) for each n; 0 where a GradScaler skipped the update.

    torch's get_ema_multi_avg_fn takes one number for all; here each parameter has its own count, which on a device
    stays a tensor: to read it would be to wait for the device. On the CPU, where AdamW keeps its counts unless it is
    fused, numbers.
    """
    if steps[0].is_cpu:
        skipped = found_inf is not None and bool(found_inf)
        return [0.0 if skipped else max(1.0 - decay, 9.0 / (10.0 + step.item())) for step in steps]
    weights = list(torch._foreach_add(steps, 10.0))
    torch._foreach_reciprocal_(weights)
    torch._foreach_mul_(weights, 9.0)
    torch._foreach_clamp_min_(weights, 1.0 - decay)
    if found_inf is not None:
        torch._foreach_mul_(weights, 1.0 - found_inf)
    return weights


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, for work that goes element by element."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _average_type(parameter: Tensor) -> torch.dtype:
    """At least float32: in bfloat16, steps of 1e-4 of a difference would be lost."""
    return torch.promote_types(parameter.dtype, torch.float32)


@cache
def _warn_once(line: str) -> None:
    log.warning(line)
