"""What to write in a script whose training jobkit does not see, so that it is checkpointed and stops."""

from __future__ import annotations

import sys

_LOOP = (
    "for epoch in ctx.epochs(epochs, model=model, optimizer=optimizer):",
    "    for batch in ctx.batches(loader):",
)

_CALLBACKS = {
    ("transformers.trainer",): (
        "from jobkit.huggingface import JobkitCallback",
        "trainer.add_callback(job := JobkitCallback(trainer))",
        "trainer.train(resume_from_checkpoint=job.checkpoint)",
    ),
    ("lightning.pytorch.trainer", "pytorch_lightning.trainer"): (
        "from jobkit.lightning import JobkitCallback",
        "trainer = Trainer(callbacks=[job := JobkitCallback()])",
        "trainer.fit(model, ckpt_path=job.checkpoint)",
    ),
}
"""By the modules of which one has been imported where a script trains with that framework."""


def without_checkpoints() -> str:
    """What to tell, in lines, at the end of a training that no loop of jobkit's has seen."""
    return f"no loop of jobkit's was begun, so there was no checkpoint. {what_to_write()}"


def what_to_write() -> str:
    """The lines that bring a script's training under jobkit: those of the framework that it has imported."""
    found = next((lines for modules, lines in _CALLBACKS.items() if not sys.modules.keys().isdisjoint(modules)), _LOOP)
    return "\n".join(["To have checkpoints, and stops that lose nothing, write:", *(f"    {line}" for line in found)])
