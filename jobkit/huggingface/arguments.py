"""Which run a Trainer's training is: the training arguments that decide its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_pt_utils import AcceleratorConfig

_NOT_RESULT = (
    ("output_dir", "resume_from_checkpoint", "local_rank", "use_cpu", "deepspeed_plugin")
    + ("run_name", "project", "report_to", "disable_tqdm", "debug", "include_num_input_tokens_seen")
    + ("enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "ignore_data_skip", "skip_memory_metrics")
    + ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers")
    + ("dataloader_prefetch_factor", "dataloader_multiprocessing_context")
)
"""Training arguments that say where a run is, what is reported of it and how fast it is."""

_NOT_RESULT_BEGINNINGS = ("logging_", "log_", "hub_", "push_to_hub", "save_", "ddp_", "trackio_", "do_")
_PATH_ENDS = ("_dir", "_path", "_file", "_folder")


def parameters(args: Any) -> dict[str, Any]:
    """The training arguments that decide a result, and not where, or how fast, it is made.

    Only those that are not the default, so that a newer transformers with more of them has the same runs.
    """
    given, found = args.to_dict(), {}
    usual = AcceleratorConfig().to_dict()
    of_accelerate = given.get("accelerator_config") or {}
    given["accelerator_config"] = {name: one for name, one in of_accelerate.items() if one != usual[name]} or None
    for field in dataclasses.fields(args):
        name, value = field.name, given.get(field.name)
        left_out = name in _NOT_RESULT or name.startswith(_NOT_RESULT_BEGINNINGS) or name.endswith(_PATH_ENDS)
        is_path = isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute())
        if not (left_out or is_path or _is_default(field, value)):
            found[name] = _plain(value)
    return found


def _is_default(field: Any, value: Any) -> bool:
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return value is None or value == getattr(default, "value", default) or (default is None and value is False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
