"""What a training function returns and logs, and its params, in the forms that JSON and TensorBoard take."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from jobkit.errors import UsageError


def literal(value: Any) -> Any:
    """`value` for OmegaConf to take as it is: what looks like an interpolation was resolved at submission already."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {key: literal(one) for key, one in value.items()}
    if isinstance(value, list):
        return [literal(one) for one in value]
    return value


def to_json(value: Any) -> Any:
    """`value` as JSON has it: one-element tensors become numbers. Raises UsageError for what has no such form."""
    if isinstance(value, torch.Tensor):
        return to_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): to_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(one) for one in value]
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN
    try:
        json.dumps(value)
    except TypeError:
        raise UsageError(
            f"the training function returned a {type(value).__name__}: return what JSON can hold"
        ) from None
    return value


def numbers(result: Any) -> dict[str, float]:
    """The numbers of a result, as metrics for TensorBoard's HPARAMS page."""
    if not isinstance(result, Mapping):
        return {}
    largest = sys.float_info.max
    given = {f"final/{key}": value for key, value in result.items() if isinstance(value, (int, float))}
    return {tag: float(value) for tag, value in given.items() if isinstance(value, float) or abs(value) <= largest}


def flat(params: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested params as `a.b` -> number, text or bool."""
    found: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return found


def number(tag: str, value: Any) -> Any:
    """A value that is logged, if it is one number; a tensor is not read, which would wait for the device.

    Raises UsageError for one that is not: a thread of rank 0 reads it later, where an error is only a line in a log.
    """
    value = whole(tag, value)
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise UsageError(
                f"ctx.log: {tag!r} is a tensor of {value.dtype} {list(value.shape)} and not one number: "
                "log a mean of it, or an element"
            )
    elif not isinstance(value, float):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            what = f"{type(value).__name__} {value!r}"[:80]
            raise UsageError(f"ctx.log: {tag!r} is no number, but {what}") from None
    return value


def whole(tag: str, value: Any) -> Any:
    """A value that is logged; of a DTensor that every rank has the whole of, this rank's copy.

    Raises UsageError for another: to put it together all ranks would have to take part, and rank 0 alone reads it.
    """
    if not isinstance(value, DTensor):
        return value
    if not all(placement.is_replicate() for placement in value.placements):
        raise UsageError(
            f"ctx.log: {tag!r} is a DTensor spread over the ranks ({', '.join(map(str, value.placements))}): "
            "log its .full_tensor(), which all ranks call"
        )
    return value.to_local()
