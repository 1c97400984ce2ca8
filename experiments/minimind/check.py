"""What a run needs, looked at before anything is queued: see `check:` in docs/config.md. No torch."""

from __future__ import annotations

import math
import os
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.minimind.documents import documents, draw_of, tokens_of
from experiments.minimind.tokens import open_tokenizer
from jobkit.errors import InputError, InvalidValue

FIRST = 1000
"""Documents of a large file that are looked at: one of another format is so from its first line on."""
SMALL = 64 << 20
"""Bytes of a file of which all documents are looked at, in a second or two."""


def check(params: dict[str, Any]) -> None:
    """Raise InvalidValue where the data are no documents, or the tokenizer is none for them or for the model."""
    if params["length"] < 3:
        raise InvalidValue("params.length", f"found {params['length']}, expected 3 tokens or more: begin, one, end")
    if not 0 < params["held_out"] < 1:
        raise InvalidValue("params.held_out", f"found {params['held_out']}, expected a part: more than 0, less than 1")
    try:
        ends = params["begin_of_text"], params["end_of_text"]
        open_tokenizer(params["tokenizer"], *ends, params["model"]["vocabulary"])
    except InputError as error:
        raise InvalidValue("params.tokenizer", str(error)) from None
    if params["topics"]:
        return  # they are written when the run begins
    data = Path(params["data"])
    try:
        is_small = data.stat().st_size <= SMALL
        draws = {draw_of(text) for text in islice(documents(data), None if is_small else FIRST)}
        if not draws:
            raise InputError(f"{data}: no document in it")
    except (InputError, OSError) as error:
        raise InvalidValue("params.data", str(error)) from None
    if is_small:
        _check_held_out(data, params["held_out"], draws)
    if not (tokens_of(data).exists() or os.access(data.parent, os.W_OK)):
        problem = f"{data.parent} cannot be written, and the tokens go there: link the file into a folder of yours"
        raise InvalidValue("params.data", problem)


def _check_held_out(data: Path, part: float, draws: set[float]) -> None:
    """Raise InvalidValue where none of the documents, whose `draw_of` these are, or all of them are for validation."""
    count, held_out = len(draws), sum(draw < part for draw in draws)
    if count < 2:
        raise InvalidValue("params.data", f"{data}: one document in it, expected 2 or more: one is for validation")
    if held_out in (0, count):
        digits = 6
        least, most = (
            math.ceil(min(draws) * 10**digits + 1) / 10**digits,
            math.floor(max(draws) * 10**digits) / 10**digits,
        )
        raise InvalidValue(
            "params.held_out",
            f"with {part:g}, {held_out} of {count} documents of {data} are for validation: give {least:g} to {most:g}",
        )
