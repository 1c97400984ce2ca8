"""Which files the clips of a folder are in. No torch: a submission looks at them, too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from jobkit.run.files import files_below

SUFFIXES = (".safetensors", ".npz")


def clips_in(folder: Path) -> Iterator[tuple[bytes, bytes]]:
    """The file names of each clip, of the latent and of the text: those that its manifest.jsonl has, or else all.

    Raises ValueError, which names the line, for one that is no `{"latent": file, "text": file}`; empty ones count as
    none.
    """
    manifest = folder / "manifest.jsonl"
    if not manifest.exists():
        # Names with a dot, which are left out, are the captions of tools/prepare_video.py.
        names = (os.fsencode(path.relative_to(folder)) for path in files_below(folder) if path.suffix in SUFFIXES)
        yield from ((name, name) for name in names)
        return
    with manifest.open("rb") as lines:  # UTF-8, whatever the locale of a node is
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                entry = json.loads(line)
                yield entry["latent"].encode(), entry["text"].encode()
            except (ValueError, TypeError, KeyError, AttributeError):
                found = line.decode(errors="replace").strip()[:80]
                raise ValueError(
                    f'{manifest}:{number}: found {found}, expected {{"latent": file, "text": file}}'
                ) from None
