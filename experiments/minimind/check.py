"""What a run needs, looked at before anything is queued: see `check:` in docs/config.md. No torch."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from experiments.minimind.documents import documents, tokens_of
from experiments.minimind.tokens import open_tokenizer
from jobkit.errors import InputError, InvalidValue

FIRST = 1000
"""Documents that are looked at: a file of another format is one from its first line on."""


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
        if not list(islice(documents(data), FIRST)):
            raise InputError(f"{data}: no document in it")
    except (InputError, OSError) as error:
        raise InvalidValue("params.data", str(error)) from None
    if not (tokens_of(data).exists() or os.access(data.parent, os.W_OK)):
        problem = f"{data.parent} cannot be written, and the tokens go there: link the file into a folder of yours"
        raise InvalidValue("params.data", problem)
