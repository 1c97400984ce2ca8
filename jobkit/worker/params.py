"""What scripts pass as params, as vars(args): values for a YAML, the same on all ranks."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from jobkit.errors import InputError
from jobkit.group import RankGroup
from jobkit.run import secrets
from jobkit.run.config import Config

_OF_THE_LAUNCHER = ("local_rank", "local-rank")
"""Arguments that torch.distributed.launch gives each rank; they say nothing of what is computed."""

_PLAIN = (bool, int, float, str, type(None))


def plain_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` as plain values: paths, devices, dtypes, enums, tuples and sets of them become texts and lists.

    Without the arguments that launchers add. Raises InputError for a value that is none.
    """
    return {str(key): _plain(str(key), value) for key, value in params.items() if key not in _OF_THE_LAUNCHER}


def own_arguments() -> dict[str, Any]:
    """What the script was called with, as params, where a framework's own settings do not say which model it trains.

    Without the arguments of launchers; none where it is no script, as under Submitit.
    """
    if not sys.argv[0].endswith(".py") or "submitit" in Path(sys.argv[0]).parts:
        return {}
    given, words = [], iter(sys.argv[1:])
    for word in words:
        name = word.partition("=")[0].lstrip("-")
        if word.startswith("--") and name in _OF_THE_LAUNCHER:
            if "=" not in word:
                next(words, None)
        else:
            given.append(word)
    return {"arguments": given} if given else {}


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (PurePath, torch.device, torch.dtype)):
        return str(value)
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", one) for name, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(key, one) for one in value), key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(f"{key}[{number}]", one) for number, one in enumerate(value)]
    raise InputError(
        f"jobkit.init(params=...): {key} is a {type(value).__name__}, allowed are numbers, texts, paths, None, and "
        "lists and dicts of such, by which the run is known; leave it out"
    )


def check_same_run(group: RankGroup, config: Config) -> None:
    """Raise InputError on every rank where one of them was given another run. Collective."""
    everyones = group.gather((config.name, {key: repr(value) for key, value in secrets.masked(config.params).items()}))
    name, params = everyones[0]
    for rank, (other_name, others) in enumerate(everyones):
        if other_name != name:
            raise InputError(f"jobkit.init: the run is {name!r} on rank 0 and {other_name!r} on rank {rank}")
        differing = sorted(key for key in params.keys() | others.keys() if params.get(key) != others.get(key))
        if differing:
            key = differing[0]
            raise InputError(
                f"jobkit.init(params=...): {key} is {params.get(key, 'missing')} on rank 0 and "
                f"{others.get(key, 'missing')} on rank {rank}: all ranks are one run; leave out what differs by rank"
            )
