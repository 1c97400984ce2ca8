"""The words of a verification: the interruptions, the first difference, and its usual cause. runs.py prints them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jobkit.run.records import Interruption, InterruptionKind
from jobkit.verify.compare import Difference

WORDS: dict[InterruptionKind, str] = {
    "stop": "stop after {}",
    "memory": "SIGKILL after {}, one step after a snapshot in memory",
    "disk": "SIGKILL after {}, one step after a checkpoint on the disk",
    "evaluation": "stop within the evaluation after {}",
    "epoch end": "stop at the epoch's end after {}",
}


def interruption_words(item: Interruption) -> str:
    """Return an interruption in words: `SIGKILL after 11, one step after a snapshot in memory`."""
    return WORDS[item.kind].format(item.at)


WORDS_OF: dict[str, tuple[str, str]] = {
    "restored state": (
        "restored {name} is not the state that was saved: {values}",
        "{name}: its load_state_dict does not give back what its state_dict holds",
    ),
    "samples": (
        "the samples of step {step} differ: {values}",
        "the data's order is not restored: a loader that nothing tracks, or an order that is made anew",
    ),
    "values": ("step {step}: {samples}{name} {values}", "step {step} reads something that no checkpoint holds"),
    "generators": (
        "step {step}: {samples}values equal; the random generators differ",
        "step {step} draws another number of random values, or draws them from another seed",
    ),
    "state": (
        "step {step}: {samples}values equal; the state of {name} differs",
        "step {step} changes {name} by something that no checkpoint holds",
    ),
    "state at the end": (
        "all steps are equal; the state of {name} differs at the end",
        "the lines after the loop change {name} by something that no checkpoint holds, as the best weights so far",
    ),
    "end": (
        "the loop ends after another number of steps: {values}",
        "the condition that ends it reads something that no checkpoint holds, as a count of bad evaluations",
    ),
    "result": (
        "all steps are equal; the result differs: {name} {values}",
        "the lines after the loop read something that no checkpoint holds, as a best value so far",
    ),
}
"""Kind of a difference -> the difference in words, and the conclusion."""


def difference_lines(difference: Difference, items: Collection[Interruption]) -> list[str]:
    """Return the first difference in words, and the conclusion."""
    line = difference.line
    before = [item for item in items if item.attempt == line.attempt - 1]
    after = f", after the {interruption_words(before[0])}" if before else ""
    facts = {
        "name": _in_words(difference.name),
        "step": line.step - 1,
        "samples": "samples equal; " if difference.reference.samples else "",
        "values": f"{_short(difference.first)} | {_short(difference.second)}",
    }
    kind = "state at the end" if (difference.kind, line.event) == ("state", "end") else difference.kind
    what, conclusion = (words.format(**facts) for words in WORDS_OF[kind])
    first = f"the first difference: {line.step} steps done, rank {line.rank}, attempt {line.attempt}{after}"
    return [first, what, f"=> {conclusion}"]


OF_JOBKIT = {
    "jobkit.gradients.": "the gradients that wait for an update",
    "jobkit.unexchanged.": "the gradients that wait for the other ranks",
    "jobkit.scaler.": "the scale of the loss",
    "jobkit.epochs.": "the place in the epoch",
}


def _in_words(name: str) -> str:
    return next((words for begin, words in OF_JOBKIT.items() if name.startswith(begin)), name)


def relative_words(difference: Difference) -> str:
    """Return how far apart two numbers are: 1e-7 is a sum in another order, 1e-1 another sample."""
    first, second = difference.first, difference.second
    if not (isinstance(first, float) and isinstance(second, float)) or not (first or second):
        return ""
    return f" (a relative {abs(first - second) / max(abs(first), abs(second)):.1e})"


def _short(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
