"""The run that a config is: a hash of the values that decide the result, and of none that only say where it runs.

The submission names the run directory by it; `runs.find` and --fresh compare it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jobkit.config.schema import AUTO, CommConfig, Config, ParallelConfig


def identity(config: Config, start: str = "") -> str:
    """64 hex digits, equal for two configs exactly if they compute the same; 1 and 1.0 are the same.

    Resources, clusters, inputs and checkpoint intervals are left out: a run moves between machines and world sizes.
    `start` is the checkpoint that the run begins with, for --from.
    """
    decides: dict[str, Any] = {
        "task": config.task,
        "params": _with_whole_numbers(config.params),
        # Of `auto` the seed is one of the params, or 0.
        "seed": 0 if config.seed == AUTO else config.seed,
        "precision": config.precision,
    }
    # A key that did not always exist counts where it has another value than its default: runs keep their names.
    if config.command:
        decides["command"] = config.command
    if config.deterministic:
        decides["deterministic"] = config.deterministic
    if start:
        decides["start"] = start
    for key, default in (("parallel", ParallelConfig()), ("comm", CommConfig())):
        section = getattr(config, key)
        if section != default:
            decides[key] = dataclasses.asdict(section)
    text = json.dumps(decides, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def run_name(config: Config, start: str = "") -> str:
    """`<name>-<hash8>`, the name of the run directory and of the job."""
    return f"{config.name}-{identity(config, start)[:8]}"


def _with_whole_numbers(value: Any) -> Any:
    """A value with each float that is a whole number as an int."""
    if isinstance(value, Mapping):
        return {key: _with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
