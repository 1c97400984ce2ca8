"""Which run a config is: a hash of what decides the result, and of nothing that only says where it runs."""

from __future__ import annotations

import hashlib
import json

from jobkit.run.config import Config


def run_name(config: Config) -> str:
    """`<name>-<hash8>`: equal for two configs exactly when they compute the same.

    Resources, clusters, inputs and the checkpoint interval are left out: a run moves between machines and world sizes.
    """
    decides = {
        "task": config.task,
        "params": config.params,
        "seed": config.seed,
        "precision": config.precision,
    }
    text = json.dumps(decides, sort_keys=True, separators=(",", ":"), default=str)
    return f"{config.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
