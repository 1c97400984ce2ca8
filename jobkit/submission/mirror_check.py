"""Whether the packages of the services that a config copies curves to are there. They are not imported."""

from __future__ import annotations

from importlib.util import find_spec

from jobkit.errors import InvalidValue
from jobkit.run.command_line import to_install
from jobkit.run.config import MirrorConfig

PACKAGES = {"mlflow": "mlflow-skinny"}
"""Packages of the registry that are not called as what is imported: this one is all of mlflow that is needed."""


def check_mirrors(mirror: MirrorConfig) -> None:
    """Raise InvalidValue, with what to install, where one is not."""
    for service in mirror.chosen:
        spec = find_spec(service)
        if spec is None or spec.origin is None:  # without a file it is only a folder of that name, as W&B makes one
            found = f"the package {service} is not installed here"
            raise InvalidValue(f"mirror.{service}", f"{found}: {to_install(PACKAGES.get(service, service))}")
