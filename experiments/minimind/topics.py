"""The small data set: the help texts that come with Python (pydoc_data.topics), a paragraph a document."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from pydoc_data.topics import topics


def write_topics(file: Path) -> None:
    """Make the .jsonl file whole, unless it is there already; each paragraph once."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    paragraphs = (paragraph for topic in topics.values() for paragraph in re.split(r"\n\s*\n", topic))
    distinct = dict.fromkeys(paragraph for paragraph in paragraphs if paragraph.strip())
    with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as temporary:
        temporary.writelines(json.dumps({"text": paragraph}, ensure_ascii=False) + "\n" for paragraph in distinct)
        os.fchmod(temporary.fileno(), 0o644)
    Path(temporary.name).replace(file)
