"""`${run_dir}` in `command:` and `params`: stays as it is in the config, and is the run directory in the job.

So the run's hash, config.yaml and `--dry-run` do not depend on where runs live.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jobkit.errors import InvalidValue, nearest
from jobkit.run.config import Config
from jobkit.run.references import with_values
from jobkit.run.rundir import NOT_FOR_SCRIPTS, RunDir

RUN_DIR = "${run_dir}"
"""What stands for the run directory."""

_JOBKITS_OWN = re.compile(rf"\$\{{run_dir\}}/+({'|'.join(NOT_FOR_SCRIPTS)})(?![\w.-])")

_REFERENCE = re.compile(r"\$\{([A-Za-z_]+)\}")


def place_outputs(config: Config, run: RunDir) -> Config:
    """The config as a rank has it: with the path of the run directory, and what it takes from other runs. Makes the
    folder for a script's own outputs."""
    config = with_values(config, run)
    if not any(RUN_DIR in text for _, text in _texts(_given(config))):
        return config
    with contextlib.suppress(OSError):  # whoever writes into it says why it is not there
        run.outputs.mkdir(parents=True, exist_ok=True)
    path = str(run.path)
    return dataclasses.replace(config, command=_placed(config.command, path), params=_placed(config.params, path))


def check_outputs(config: Config) -> None:
    """Raise InvalidValue for a text that leads a script's outputs into a folder of jobkit's own."""
    for key, text in _texts(_given(config)):
        if found := _JOBKITS_OWN.search(text):
            raise InvalidValue(
                key, f"found {found[0]}, which is jobkit's own; outputs of yours: {RUN_DIR}/outputs/{found[1]}"
            )


def refuse_misspelt(params: Mapping[str, Any]) -> None:
    """Raise InvalidValue for a name in params of a script that is nearly `${run_dir}`, as a YAML's load does."""
    for key, text in _texts({"params": params}):
        for name in _REFERENCE.findall(text):
            if name != "run_dir" and (hint := nearest(name, ["run_dir"])):
                raise InvalidValue(key, f"found ${{{name}}}: there is no such key{hint}")


def _given(config: Config) -> dict[str, Any]:
    return {"command": config.command, "params": config.params}


def _placed(value: Any, path: str) -> Any:
    if isinstance(value, str):
        return value.replace(RUN_DIR, path)
    if isinstance(value, Mapping):
        return {key: _placed(one, path) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_placed(one, path) for one in value]
    return value


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of each text in a config's values."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _texts(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one, key)
