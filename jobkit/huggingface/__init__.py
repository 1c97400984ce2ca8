"""Hugging Face's Trainer under jobkit: `trainer.add_callback(JobkitCallback(trainer))`. It trains by the
Trainer's own loop, and saves no model the Trainer's way."""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(f"jobkit.huggingface needs {error.name}: pip install transformers accelerate") from error

from jobkit.huggingface.callback import JobkitCallback

__all__ = ["JobkitCallback"]
