"""The user's own file, for all projects: clusters and `notify`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit.run.notify import Notify
from jobkit.run.notify import of_value as notify_of
from jobkit.run.places import Places
from jobkit.run.strict import build
from jobkit.run.yamlfile import read_yaml


def user_config_path() -> Path:
    """The user's own file, of clusters and `notify`: $JOBKIT_CONFIG, else jobkit/config.yaml under $XDG_CONFIG_HOME or
    ~/.config."""
    if path := os.environ.get("JOBKIT_CONFIG"):
        return Path(path)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "jobkit" / "config.yaml"


@dataclass(frozen=True, kw_only=True)
class UserConfig:
    """The user's own file, for all projects."""

    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)
    notify: str | dict[str, Any] = ""

    @property
    def notification(self) -> Notify:
        """`notify` as a value."""
        return notify_of(self.notify)


def read_user_config() -> tuple[UserConfig, dict[str, int]]:
    """The user's own file, and the line of each dotted key in it. Raises InputError."""
    path = user_config_path()
    if not path.exists():
        return UserConfig(), {}
    values, lines = read_yaml(path)
    with Places(path=path, lines=lines).locating_errors():
        config = build(UserConfig, values)
        _ = config.notification  # a mistake in it is told now, not when a run has ended
        return config, lines
