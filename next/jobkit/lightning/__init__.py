"""Lightning's Trainer under jobkit: `from jobkit.lightning import JobkitCallback`."""

from __future__ import annotations

from importlib.util import find_spec

from jobkit.errors import InputError

if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    raise InputError("jobkit.lightning: Lightning is not installed here; pip install 'lightning>=2.6'")

from jobkit.lightning.callback import JobkitCallback

__all__ = ["JobkitCallback"]
