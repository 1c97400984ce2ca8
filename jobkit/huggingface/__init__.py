"""Hugging Face's Trainer under jobkit: `trainer.add_callback(job := JobkitCallback(trainer))`."""

from __future__ import annotations

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"jobkit.huggingface needs transformers and accelerate ({error}): in the clone of jobkit, "
        "pip install '.[huggingface]'"
    ) from None

from jobkit.huggingface.callback import JobkitCallback

__all__ = ["JobkitCallback"]
