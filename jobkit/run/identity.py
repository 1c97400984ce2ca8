"""Which run a config is: a hash of what decides the result, and of nothing that only says where it runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

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


def identity(config: Config) -> str:
    """64 hex digits, equal for two configs exactly when they compute the same.

    Resources, clusters, inputs and the checkpoint interval are left out: a run moves between machines and world sizes.
    """
    decides: dict[str, object] = {
        "task": config.task,
        "params": config.params,
        "seed": config.seed,
        "precision": config.precision,
    }
    if config.command:
        decides["command"] = config.command
    if config.deterministic:  # not where it is off, as in runs from before there was such a key
        decides["deterministic"] = config.deterministic
    # Only where they differ from plain DDP, of which there are runs from before there was anything else.
    for key, default in (("parallel", ParallelConfig()), ("comm", CommConfig())):
        value = dataclasses.asdict(getattr(config, key))
        if value != dataclasses.asdict(default):
            decides[key] = value
    text = json.dumps(decides, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
