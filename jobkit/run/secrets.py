"""Values that are nobody else's business, told by their names: shown as ***, and named at the first submission.

    params {lr: 1, hf: {token: "abc"}} --masked--> {lr: 1, hf: {token: "***"}}

The files of a run hold them as they were written. `${oc.env:NAME}` stays an expression there, and is shown. Every
command that shows params calls it, and the submission that names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from jobkit.run.files import leaves

MASK = "***"

_SECRET = re.compile(r"(^|_)token$|(_|^api)key$|password|passwd|passphrase|secret|credential")

_OPEN = re.compile(r"|.*\$\{.*|<.*>|\[.*\]", re.DOTALL)
"""Texts that are no secrets: none, an expression, a tokenizer's `<pad>` or `[CLS]`."""


@cache
def is_secret(name: str) -> bool:
    """Return whether a dotted name says that its value is secret: `params.hf_token`, `db.password`, `apiKey`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()
    return any(_SECRET.search(part) for part in words.split("."))


def masked(value: Any, name: str = "") -> Any:
    """Return a value as it may be shown: each text below a secret name as ***. Numbers and expressions are no secrets.

    masked("abc", "params.token")     # "***"
    """
    if isinstance(value, dict):  # a list of ten thousand runs has mostly numbers
        return {
            key: masked(item, f"{name}.{key}") if type(item) in (str, dict, list) else item
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [masked(item, name) for item in value]
    return MASK if isinstance(value, str) and not _OPEN.fullmatch(value) and is_secret(name) else value


def masked_word(word: str) -> str:
    """Return `key=value` as it may be shown."""
    key, sign, value = word.partition("=")
    return f"{key}{sign}{masked(value, key)}"


def masked_status(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of status.json with the params as they may be shown."""
    submitted = status.get("submitted") or {}
    config = submitted.get("config") or {}
    if not config.get("params"):
        return dict(status)
    config = {**config, "params": masked(config["params"])}
    return {**status, "submitted": {**submitted, "config": config}}


def warning(params: Mapping[str, Any]) -> str:
    """Return a line about the secrets of a run that its directory holds; empty without any."""
    names = [name for name, value in leaves(params, "params.") if masked(value, name) != value]
    lies = f"warning: {', '.join(names)}: in clear text in the run directory, readable as your umask says"
    return f"{lies}; ${{oc.env:NAME}} instead never reaches the disk" if names else ""
