"""What a Trainer logs, as a run has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.integrations.integration_utils import rewrite_logs


def tags(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Its numbers, under the names that its own TensorBoard callback gives them."""
    numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float, np.number, torch.Tensor))}
    return dict(rewrite_logs(numbers))


def of_all_attempts(logs: dict[str, Any], seconds: float) -> None:
    """The duration, and what is told by the second: Trainer knows this attempt's time and the steps of all."""
    own = logs["train_runtime"]
    logs["train_runtime"] = round(own + seconds, 4)
    for name in logs:
        if name.endswith("_per_second") and own + seconds > 0:
            logs[name] = round(logs[name] * own / (own + seconds), 3)


def result(state: Any) -> dict[str, Any]:
    """The numbers of the training, and of the last evaluation."""
    found: dict[str, Any] = {}
    for entry in state.log_history:
        found.update({name: value for name, value in entry.items() if name == "train_loss" or name.startswith("eval_")})
    timing = ("_runtime", "_per_second", "_time")
    return {name: value for name, value in found.items() if not name.endswith(timing)}
