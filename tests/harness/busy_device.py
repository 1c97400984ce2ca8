"""A device that is not there: its tensors have values once somebody waits for them, or once it is said to be done.

device = BusyDevice(monkeypatch)
loss = device.tensor(3.0)          # loss.device.type is "cuda"
device.is_done = True
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


class BusyDevice:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_done = False
        self.waits = 0
        """How often somebody waited for it."""
        module = SimpleNamespace(Event=lambda: _Event(self), current_stream=lambda device: "stream")
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def tensor(self, value: float) -> torch.Tensor:
        return torch.tensor(value).as_subclass(_OnDevice)


class _OnDevice(torch.Tensor):
    device = torch.device("cuda", 1)  # type: ignore[assignment]


class _Event:
    def __init__(self, device: BusyDevice) -> None:
        self._device = device

    def record(self, stream: str) -> None:
        assert stream == "stream"

    def query(self) -> bool:
        return self._device.is_done

    def synchronize(self) -> None:
        self._device.waits += not self._device.is_done
