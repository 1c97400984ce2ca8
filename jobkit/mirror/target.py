"""What a service must be able to do for a run's curves to be copied to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Point:
    """One value of a curve."""

    tag: str
    step: int
    value: float
    time: float
    """When it was logged, in seconds since the epoch."""


@dataclass
class Sent:
    """What a service has been sent of a run: kept in its run directory."""

    id: str = ""
    """The service's own id of the run, where that is not the one it was given."""
    steps: dict[str, int] = field(default_factory=dict)
    """By tag the newest step: nothing up to there is sent again."""
    rows: int = 0
    """How many steps with values, for a service that counts them."""


class Target(Protocol):
    """A service, connected to one run's page there. Each method may raise whatever the service's package raises."""

    sent: Sent
    """As the service has it: what it can be asked about is from there, the rest as it was kept."""

    def send(self, points: Sequence[Point]) -> None:
        """Add points, which are newer than `sent` and in the order of their steps; `sent` follows."""

    def finish(self, result: Any) -> None:
        """The run has finished: say so, with what its function returned."""

    def close(self) -> None:
        """Wait until what was sent is there; the run may go on in another attempt."""
