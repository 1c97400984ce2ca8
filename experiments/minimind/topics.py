"""The small data set: the help texts that come with Python (pydoc_data.topics), a paragraph a document."""

from __future__ import annotations

import json
import re
from pathlib import Path
from pydoc_data.topics import topics

from jobkit.run.files import write_atomic


def write_topics(file: Path) -> None:
    """Make the .jsonl file whole, unless it is there already; each paragraph once."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    paragraphs = (paragraph for topic in topics.values() for paragraph in re.split(r"\n\s*\n", topic))
    distinct = dict.fromkeys(paragraph for paragraph in paragraphs if paragraph.strip())
    lines = (json.dumps({"text": paragraph}, ensure_ascii=False) + "\n" for paragraph in distinct)
    write_atomic(file, "".join(lines))
