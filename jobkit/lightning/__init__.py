"""PyTorch Lightning's Trainer under jobkit: one callback. `pip install 'jobkit[lightning]'`."""

from __future__ import annotations

from importlib.util import find_spec

from jobkit.errors import InputError

if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    raise InputError("jobkit.lightning: Lightning is not installed here: pip install 'jobkit[lightning]'")

from jobkit.lightning.callback import JobkitCallback

__all__ = ["JobkitCallback"]
