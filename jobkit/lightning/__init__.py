"""PyTorch Lightning's Trainer under jobkit: one callback. `pip install '.[lightning]'` in the clone."""

from __future__ import annotations

from importlib.util import find_spec

from jobkit.errors import InputError

if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    raise InputError(
        "jobkit.lightning: Lightning is not installed here: in the clone of jobkit, pip install '.[lightning]'"
    )

from jobkit.lightning.callback import JobkitCallback

__all__ = ["JobkitCallback"]
