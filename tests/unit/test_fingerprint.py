"""What a fingerprint of the state sees of a module's attributes, which an evaluation may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jobkit.checkpoint.summary import digest
from jobkit.worker.fingerprint import StateWatch


class Net(nn.Module):
    def __init__(self, count: Callable[[Any], None]) -> None:
        super().__init__()
        self.linear, self.calls, self.seen, self.sum = nn.Linear(2, 2), 0, [0], torch.zeros(1)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        self.count(self)
        return self.linear(x)  # type: ignore[no-any-return]


def counts(net: Any) -> None:
    net.calls += 1


def appends(net: Any) -> None:
    net.seen.append(1)


def adds(net: Any) -> None:
    net.sum.add_(1)


def does_nothing(net: Any) -> None:
    pass


@pytest.mark.parametrize(("change", "is_seen"), [(counts, True), (appends, True), (adds, True), (does_nothing, False)])
def test_a_forward_that_changes_an_attribute_in_an_evaluation_is_seen(change: Any, is_seen: bool) -> None:
    net, watch = Net(change), StateWatch([])
    watch.track([net])
    before = watch.take()
    net.eval()
    net(torch.zeros(1, 2))
    assert (watch.take() != before) == is_seen


def test_a_digest_tells_where_a_value_ends_and_the_next_path_begins() -> None:
    first = {"a": ("int", b"1"), "b": ("int", b"2")}
    parts = [repr((path, kind, len(value))).encode() + value for path, (kind, value) in first.items()]
    second = {"a": ("int", b"1" + parts[1])}
    assert digest(first) == digest(dict(reversed(first.items()))) != digest(second)
