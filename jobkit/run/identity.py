"""Which run a config is: a hash of what decides the result, and of nothing that only says where it runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.run.config import CommConfig, Config, ParallelConfig


@dataclass(frozen=True)
class Owner:
    """Whose a checkpoint is."""

    run: str = ""
    """The name of the run directory that it was written in, for people; empty in one of an older jobkit."""
    identity: str = ""
    """`identity` of its config: other names and numbers of --fresh do not make it another's."""

    def is_other_than(self, other: Owner) -> bool:
        """Whether both are known, and compute different things."""
        return "" not in (self.identity, other.identity) and self.identity != other.identity


def run_name(config: Config) -> str:
    """`<name>-<hash8>`: equal for two configs exactly when they compute the same, and have one name."""
    return f"{config.name}-{identity(config)[:8]}"


def name_in(runs_dir: Path, config: Config) -> str:
    """The name that a config's run has in a runs directory: one from before 1.0 counted as 1 is found again."""
    name, before = run_name(config), f"{config.name}-{_digest(config, config.params)[:8]}"
    is_older = before != name and not (runs_dir / name).exists() and (runs_dir / before).exists()
    return before if is_older else name


def identity(config: Config) -> str:
    """64 hex digits, equal for two configs exactly when they compute the same; 1 and 1.0 are the same.

    Resources, clusters, inputs and the checkpoint interval are left out: a run moves between machines and world sizes.
    """
    return _digest(config, _with_whole_numbers(config.params))


def _with_whole_numbers(value: Any) -> Any:
    """A value with each float that is a whole number as an int: others keep the hash that they had."""
    if isinstance(value, Mapping):
        return {key: _with_whole_numbers(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_whole_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(config: Config, params: Mapping[str, Any]) -> str:
    decides: dict[str, object] = {
        "task": config.task,
        "params": params,
        "seed": config.seed,
        "precision": config.precision,
    }
    if config.command:
        decides["command"] = config.command
    if config.deterministic:  # not where it is off, as in runs from before there was such a key
        decides["deterministic"] = config.deterministic
    if config.start_from.run:
        decides["start_from"] = dataclasses.asdict(config.start_from)
    # Only where they differ from plain DDP, of which there are runs from before there was anything else.
    for key, default in (("parallel", ParallelConfig()), ("comm", CommConfig())):
        value = _keys_of(getattr(config, key))
        if value != _keys_of(default):
            decides[key] = value
    text = json.dumps(decides, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _keys_of(section: ParallelConfig | CommConfig) -> dict[str, object]:
    """A section's keys; without `offload` where it is off, as in runs from before there was such a key."""
    return {key: value for key, value in dataclasses.asdict(section).items() if key != "offload" or value}
