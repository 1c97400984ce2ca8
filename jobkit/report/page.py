"""The report of some runs: one HTML file that loads nothing, runs nothing, and escapes all that runs have written.

    views ──┬─ journal, config, logs ─┐
            └─ logged.py ─ charts.py ─┴─> page.html (Jinja escapes), page.css ─> text of the file

`jobkit report` calls `page`. Nothing is written here, and no value of the environment is read: `${oc.env:}` stays.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import jobkit
from jobkit.config.schema import Config
from jobkit.config.yamlfile import read_yaml
from jobkit.report import charts
from jobkit.report.logged import read_logged
from jobkit.run.accounting import accounts, goodput
from jobkit.run.files import leaves
from jobkit.run.secrets import masked
from jobkit.run.status import Attempt
from jobkit.run.view import View

IMAGE_BYTES, IMAGES_BYTES = 1 << 20, 8 << 20
"""The most that an image, and all of them together, may add to the page."""

LABEL_LENGTH = 40
"""A run is called by the values that it differs in, as long as they are this short; else by its name."""

_MIME = {b"\x89PNG": "image/png", b"GIF8": "image/gif", b"\xff\xd8\xff": "image/jpeg"}


class _Run:
    """A run as the template takes it."""

    def __init__(self, view: View, number: int, now: float) -> None:
        self.view, self.status, self.name = view, view.status, view.run.name
        self.number, self.style, self.label = number, charts.colour(number), self.name
        self.progress, self.logged = view.run.progress(), read_logged(view.run.tensorboard)
        self.spent = accounts(self.status, self.progress, None if view.is_over else now)
        self.goodput = goodput(self.spent)
        submitted = self.status.submitted
        self.config = {
            **dict(leaves(masked(read_yaml(view.run.config_file)[0]))),
            "code": submitted.code if submitted else None,
        }
        self.result = dict(leaves(self.status.result))
        steps = [account.last_step for account in self.spent if account.last_step is not None]
        self.step = max(steps, default=None)
        self.failures = self._failures()

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time since the first submission went, by charts.PARTS."""
        total = dict.fromkeys(charts.PARTS, 0.0)
        for account in self.spent:
            for part, seconds in charts.parts(account).items():
                total[part] += seconds
        if self.spent:  # between attempts in place
            wall = self.spent[-1].until - self.spent[0].began + self.spent[0].queue
            total["waiting"] = max(0.0, wall - sum(account.seconds for account in self.spent))
        return {part: seconds for part, seconds in total.items() if seconds >= 0.05}

    @property
    def words(self) -> list[str]:
        """A text for each attempt, shown on hover."""
        return [f"{self.label}, attempt {attempt.number}: {cause(attempt)}" for attempt in self.status.attempts]

    def _failures(self) -> list[dict[str, Any]]:
        """Return the errors of attempts, the newest first; attempts with the same error are shown together."""
        groups: dict[tuple[Any, ...], list[Attempt]] = {}
        for attempt in self.status.attempts:
            if attempt.ended is not None and attempt.ended.error:
                groups.setdefault((attempt.ended.error, attempt.ended.traceback), []).append(attempt)
        newest_first = sorted(groups.values(), key=lambda group: -group[-1].number)
        return [{"numbers": [attempt.number for attempt in group], "ended": group[-1].ended} for group in newest_first]


def page(views: Sequence[View], now: float) -> str:
    """Return the HTML of a report of these runs, as they are now (seconds since the epoch)."""
    runs = [_Run(view, number, now) for number, view in enumerate(views)]
    keys = list(dict.fromkeys(key for run in runs for key in run.config if key != "name"))
    if len(runs) > 1:
        first = [key for key in keys if len({_text(run.config.get(key)) for run in runs}) > 1]
    else:  # what is not as jobkit has it by itself
        usual = dict(leaves(dataclasses.asdict(Config(name=""))))
        first = [key for key in keys if key.startswith("params.") or runs[0].config[key] != usual.get(key, usual)]
    labels = [" ".join(f"{key.rpartition('.')[2]}={_text(run.config.get(key))}" for key in first) for run in runs]
    if len(runs) > 1 and len(set(labels)) == len(runs) and all(0 < len(label) <= LABEL_LENGTH for label in labels):
        for run, label in zip(runs, labels, strict=True):
            run.label = label
    images, left_out = _images(runs)
    folder = Path(__file__).parent
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        loader=FileSystemLoader(folder),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"text": _text, "length_of": charts.length, "number": charts.number}
    css = (folder / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        css=Markup(css),
        css_hash=base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        runs=runs,
        results=list(dict.fromkeys(key for run in runs for key in run.result)),
        keys=first,
        equal_keys=[key for key in keys if key not in first],
        curves=_curves(runs),
        images=images,
        images_left_out=left_out,
        timeline=_timeline(runs),
        part_names=charts.PARTS,
        version=jobkit.__version__,
        now=moment(now),
        moment=moment,
        cause=cause,
    )


def _curves(runs: Sequence[_Run]) -> dict[bool, list[dict[str, Any]]]:
    """Return the charts of all tags, by whether they are jobkit's own measurements."""
    groups: dict[bool, list[dict[str, Any]]] = {}
    for tag in dict.fromkeys(tag for run in runs for tag in run.logged.scalars):
        having = [run for run in runs if tag in run.logged.scalars]
        svg = charts.curves(tag, [(run.number, run.logged.scalars[tag]) for run in having])
        groups.setdefault(tag.startswith("perf/"), []).append({"tag": tag, "svg": svg, "runs": having})
    return groups


def _timeline(runs: Sequence[_Run]) -> Markup | None:
    rows = [(run.label if len(runs) > 1 else "", run.spent, run.words) for run in runs if run.spent]
    return charts.timeline(rows) if rows else None


def _images(runs: Sequence[_Run]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the last images as data URLs, tag by tag, and the tags of those that have no room or no known format."""
    images, left_out, room = [], [], IMAGES_BYTES
    for tag in dict.fromkeys(tag for run in runs for tag in run.logged.images):
        for run in (run for run in runs if tag in run.logged.images):
            image = run.logged.images[tag]
            mime = next((mime for magic, mime in _MIME.items() if image.data.startswith(magic)), None)
            if mime is None or len(image.data) > min(room, IMAGE_BYTES):
                left_out.append(f"{tag} of {run.label}")
                continue
            room -= len(image.data)
            url = f"data:{mime};base64,{base64.b64encode(image.data).decode()}"
            images.append({"tag": tag, "run": run, "step": image.step, "url": url, "small": image.width < 256})
    return images, left_out


def _text(value: Any) -> str:
    """Return a value of a config or a result as a person reads it."""
    if isinstance(value, float):
        return charts.number(value, 5)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def cause(attempt: Attempt) -> str:
    return attempt.ended.cause.replace("_", " ") if attempt.ended is not None else "its end is not recorded"


def moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
