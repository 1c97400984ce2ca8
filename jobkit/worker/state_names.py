"""How a checkpoint names what it has of tracked objects."""

from __future__ import annotations

PART = "#"
"""Between a tracked object's name and the number of a part: of a pipeline's stage, or of zero1's rank."""

VALUES = "#values"
"""The name of ctx.values."""

EPOCHS = "epochs"
"""Of the position of a loop over epochs in a checkpoint: each rank's own, and in the manifest that of rank 0."""

LOSS_SCALE = "loss_scale"
"""The name of fp16's, which jobkit tracks itself."""

GRADIENTS = "#gradients"
"""After the name of a module: the gradients that the next step adds to."""

BESIDE = "#beside"
"""After the name of an object: what is no part of its state, and is needed to restore it."""

ATTRIBUTES = "#attributes"
"""After the name of a module: what its first rank's have as attributes, for another number of ranks."""


def is_state(key: str, name: str) -> bool:
    """Whether a checkpoint has the state of an object, or a part of it, by a key."""
    beside = (GRADIENTS, BESIDE, ATTRIBUTES)
    return key.split(PART)[0] == name and not any(one in key for one in beside)
