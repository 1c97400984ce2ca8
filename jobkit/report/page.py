"""The page about one or several runs: what the template shows of them, as plain values, and the HTML made of it.

The page needs nothing from anywhere else. Whatever a run holds is text in it: the template escapes all values, and the
page's own policy lets a browser run no other script than the one that is written here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import jobkit
from jobkit.errors import InputError
from jobkit.report import charts, timeline
from jobkit.report.logged import Image, Logged, finite, read
from jobkit.report.timeline import duration
from jobkit.run.accounting import Account
from jobkit.run.command_line import to_type
from jobkit.run.config import Config
from jobkit.run.continuation import how_to_continue
from jobkit.run.events import Event
from jobkit.run.files import is_there
from jobkit.run.journal import Entry
from jobkit.run.rundir import RunDir
from jobkit.run.status import CAUSES, Attempt, State, Status
from jobkit.run.yamlfile import read_yaml

TEMPLATES = Path(__file__).parent

IMAGE_BYTES = 1 << 20
"""A larger image is left out of the page, and named."""

IMAGES_BYTES = 8 << 20
"""Of all images of a page: it is to be sent by mail, and opened on a telephone."""

LOG_LINES = 30
"""How many of the last lines of rank 0's errors are shown of a run that failed."""

SAMPLES = 64
"""How many ids of a failed rank's batch are shown."""

LOG_BYTES = 64 << 10

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""What a terminal takes for colours and movements, and other characters that are not to be seen."""

_HASH = re.compile(r"[0-9a-f]{8}(?:-\d+)?$")
"""The end of a run's name that tells it from others of its config's name."""

CARDS = 6
"""Of more runs a page has a table, and what it says of each by itself is folded up."""

MAIN_KEYS = ("task", "params", "seed")
"""Beginnings of the keys of a config that are shown whatever their values; others where they are not the defaults."""

LAST_TAGS = ("perf/", "final/")
"""Beginnings of tags whose charts come last: jobkit's own."""

GOODPUT = {
    "useful": "new steps",
    "repeated": "steps done again",
    "checkpoints": "held up by checkpoints",
    "startup": "start-up",
    "ending": "endings",
    "waiting": "in the queue, or nothing under way",
}
"""Where the time since the first start went -> what it means."""


SPENT = {
    "queue": "queue",
    "startup": "start-up",
    "useful": "new steps",
    "repeated": "repeated",
    "checkpoints": "checkpoints",
    "ending": "ending",
}
"""Parts of an attempt's account, as a table has room for them."""


@dataclass(frozen=True)
class Shown:
    """One run of the page."""

    run: RunDir
    status: Status
    events: list[Entry]
    config: dict[str, Any]
    """Dotted key -> value, masked."""
    logged: Logged


def collect(run: RunDir, status: Status) -> Shown:
    """All that the page shows of a run; `status` is as its scheduler was asked about it."""
    config: dict[str, Any] = {}
    if is_there(run.config_file):
        with suppress(InputError):  # a damaged one: the rest of the run can be shown
            config = _flat(read_yaml(run.config_file)[0])
    return Shown(run, status, run.journal.read(), config, read(run.tensorboard))


def page(shown: Sequence[Shown]) -> str:
    """The HTML about some runs."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"duration": duration, "moment": _moment, "value": _value}
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    drawn = _charts(shown)
    images, left_out = _images(shown)
    runs = [_run(number, one, shown) for number, one in enumerate(shown)]
    for run, label in zip(runs, _unique([(run["about"], run["name"]) for run in runs]), strict=True):
        run["label"] = label
    used_parts = {part for run in runs if run["timeline"] for part in run["timeline"].parts}
    return environment.get_template("template.html").render(
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=shown[0].run.name if len(shown) == 1 else f"{len(shown)} runs",
        runs=runs,
        many=len(runs) > CARDS,
        config=(config := _table([one.config for one in shown])),
        main_config=_not_default(config),
        results=_table([_result(one.status) for one in shown]),
        versions=_table([_versions(one.status) for one in shown]),
        charts=[one for one in drawn if not one.tag.startswith(LAST_TAGS)],
        own_charts=[one for one in drawn if one.tag.startswith(LAST_TAGS)],
        chart_data=[_data(one) for one in drawn],
        size=charts,
        images=images,
        left_out=left_out,
        parts=timeline.PARTS,
        used_parts=[part for part in timeline.PARTS if part in used_parts],
        spent=SPENT,
        timeline_size=timeline,
        goodput_parts=GOODPUT,
        causes=CAUSES,
        now=time.time(),
        version=jobkit.__version__,
    )


# One run


def _run(number: int, one: Shown, all_shown: Sequence[Shown]) -> dict[str, Any]:
    status = one.status
    return {
        "number": number,
        "name": one.run.name,
        "about": _about(one, all_shown),
        "path": str(one.run.path),
        "status": status,
        "state": status.state.value,
        "timeline": timeline.timeline(status, one.events),
        "attempts": [_attempt(attempt) for attempt in status.attempts],
        "goodput": _goodput(status),
        "first": status.attempts[0].started if status.attempts else status.queued,
        "code": _code(one),
        "slow": _stragglers(one.events),
        "nodes": sorted({node for attempt in status.attempts for node in attempt.nodes}),
        "failures": _failures(one.run, status),
        "start": _start(status),
        "error": _clean(status.error) if status.error else None,
        "log": _log_end(one.run, status) if status.state == State.FAILED else "",
        "result": _result_line(status),
        "not_finite": {
            tag: missing for tag, points in one.logged.scalars.items() if (missing := len(points) - len(finite(points)))
        },
        "to_type": to_type_next(one.run, status),
    }


def to_type_next(run: RunDir, status: Status) -> list[tuple[str, str]]:
    """(command, what it does) for whoever has read the page."""
    name = run.name
    found: list[tuple[str, str]] = []
    if status.state in (State.INTERRUPTED, State.FAILED, State.CANCELLED):
        found.append((how_to_continue(run, status), "continues it"))
    if status.state.is_under_way:
        found.append((to_type("logs", "-f", name), "shows its output as it comes"))
        found.append((to_type("cancel", name), "stops it, with a checkpoint"))
    elif status.attempts:
        found.append((to_type("logs", name), "shows what rank 0 printed"))
    if is_there(run.tensorboard):
        found.append((to_type("board", name), "shows its curves in TensorBoard"))
    found.append((to_type("status", name), "how it stands now"))
    return found


def _about(one: Shown, all_shown: Sequence[Shown]) -> str:
    """What tells a run from the others of the page: its params that differ, else its name."""
    keys = [key for key in one.config if key.startswith("params.") or key == "seed"]
    differing = [key for key in keys if len({_value(other.config.get(key)) for other in all_shown}) > 1]
    return ", ".join(f"{key.removeprefix('params.')}={_value(one.config[key])}" for key in differing[:4])


def _unique(runs: Sequence[tuple[str, str]]) -> list[str]:
    """What each run is called beside the others, of what tells it from them and its name: no two alike."""
    labels = [about or name for about, name in runs]
    often = Counter(labels)
    longer = [
        f"{about}, {name[-len(match[0]) :] if (match := _HASH.search(name)) else name}"
        if often[label] > 1 and about
        else label
        for label, (about, name) in zip(labels, runs, strict=True)
    ]
    seen: Counter[str] = Counter()
    for at, label in enumerate(longer):  # two runs directories have runs of one name
        seen[label] += 1
        longer[at] = f"{label} ({seen[label]})" if seen[label] > 1 else label
    return longer


def _attempt(attempt: Attempt) -> dict[str, Any]:
    account = attempt.account
    spent = {} if account is None else {name: getattr(account, name) for name in SPENT}
    return {
        "attempt": attempt,
        "seconds": (attempt.ended or time.time()) - attempt.started,
        "spent": {name: seconds for name, seconds in spent.items() if seconds >= 0.05},
        "restart": {
            part.name: seconds
            for part in (fields(attempt.restart) if attempt.restart else ())
            if (seconds := getattr(attempt.restart, part.name)) is not None
        },
        "error": _clean(attempt.failure.error) if attempt.failure and attempt.failure.error else None,
    }


def _goodput(status: Status) -> dict[str, Any] | None:
    """What part of the time since the first start each of GOODPUT has; None before there is any."""
    accounts: list[Account] = [one.account for one in status.attempts if one.account]
    if status.goodput is None or not accounts:
        return None
    wall = max(account.until for account in accounts) - status.attempts[0].started
    names = ("useful", "repeated", "checkpoints", "startup", "ending")
    seconds = {name: sum(getattr(account, name) for account in accounts) for name in names}
    seconds["waiting"] = max(0.0, wall - sum(seconds.values()))
    parts, at = [], 0.0
    for name, spent in seconds.items():
        part = spent / wall if wall > 0 else 0.0
        if part > 0.0005:
            parts.append({"name": name, "at": at, "part": part, "seconds": spent})
            at += part
    return {"total": status.goodput, "wall": wall, "parts": parts}


def _code(one: Shown) -> list[dict[str, Any]]:
    """The code of each submission, and how it differs from that of the one before."""
    return [
        {
            "time": event.get("time"),
            "digest": str(event.get("code", "")),
            "changes": [str(line) for line in event.get("code_changes") or []],
            "command": str(event.get("command", "")),
            "where": f"{event.get('cluster')}",
        }
        for event in one.events
        if event["event"] == Event.SUBMITTING
    ]


def _versions(status: Status) -> dict[str, str]:
    """The newest that an attempt has told of."""
    return next((one.versions for one in reversed(status.attempts) if one.versions), {})


def _stragglers(events: Sequence[Entry]) -> list[dict[str, Any]]:
    """Every rank that was slow, by rank and host: how often, and how slow at worst."""
    found: dict[tuple[Any, Any], dict[str, Any]] = {}
    for event in events:
        if event["event"] == Event.STRAGGLER:
            key = (event.get("rank"), event.get("host"))
            one = found.setdefault(key, {"rank": key[0], "host": key[1], "times": 0, "factor": 0.0})
            one["times"] += 1
            one["factor"] = max(one["factor"], float(event.get("factor") or 0.0))
    return list(found.values())


def _start(status: Status) -> str:
    """Of a run that starts from another: from which step of which."""
    start = status.start_from or {}
    what = "weights" if start.get("weights_only") else "state"
    return f"{what} of step {start.get('step')} of {start['run']}" if start.get("run") else ""


def _failures(run: RunDir, status: Status) -> list[dict[str, Any]]:
    """What is known of the attempts that failed; those that failed alike in a row are one."""
    found: list[dict[str, Any]] = []
    for attempt in status.attempts:
        if (failure := attempt.failure) is None:
            continue
        places = {"rank": failure.rank, "step": failure.step, "node": failure.node}
        samples = failure.samples or []
        one = {
            "error": _clean(failure.error or attempt.cause or ""),
            "where": {name: value for name, value in places.items() if value is not None},
            "samples": samples[:SAMPLES],
            "more_samples": max(0, len(samples) - SAMPLES),
            "traceback": _clean(failure.traceback or ""),
        }
        if found and all(found[-1][key] == value for key, value in one.items()):
            found[-1]["attempts"].append(attempt.id)
            found[-1]["logs"] = str(run.logs(attempt.id))
        else:
            found.append(one | {"attempts": [attempt.id], "logs": str(run.logs(attempt.id))})
    return found


def _log_end(run: RunDir, status: Status) -> str:
    """The last lines of rank 0's errors."""
    if status.attempt is None:
        return ""
    try:
        with run.rank_log(status.attempt.id, 0, "err").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return _clean("\n".join(text.splitlines()[-LOG_LINES:]))


# Several runs


def _result_line(status: Status) -> str | None:
    if isinstance(status.result, Mapping):
        return ", ".join(f"{name} {_value(value)}" for name, value in _result(status).items())
    return None if status.result is None else json.dumps(status.result)


def _result(status: Status) -> dict[str, Any]:
    return _flat(status.result) if isinstance(status.result, Mapping) else {}


def _table(columns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of what several runs have under the same names; each says whether they differ."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = []
    for name in names:
        values = [_value(column[name]) if name in column else None for column in columns]
        rows.append({"name": name, "values": values, "differs": len(set(values)) > 1})
    return rows


def _not_default(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the rows of a config those that a person has chosen."""
    defaults = {name: _value(value) for name, value in _flat(asdict(Config(name=""))).items()}
    return [
        row
        for row in rows
        if row["name"].startswith(MAIN_KEYS)
        or (row["name"] != "name" and any(value != defaults.get(row["name"]) for value in row["values"]))
    ]


def _charts(shown: Sequence[Shown]) -> list[charts.Chart]:
    """A chart for each tag, by name, jobkit's own last."""
    tags = {tag for one in shown for tag in one.logged.scalars}
    return [
        charts.chart(
            tag,
            {number: one.logged.scalars[tag] for number, one in enumerate(shown) if tag in one.logged.scalars},
        )
        for tag in sorted(tags, key=lambda tag: (tag.startswith(LAST_TAGS), tag))
    ]


def _data(chart: charts.Chart) -> dict[str, Any]:
    """What the script that shows values needs of a chart."""
    return {"frame": chart.frame, "curves": [{"run": one.run, "points": one.points} for one in chart.curves]}


def _images(shown: Sequence[Shown]) -> tuple[list[dict[str, Any]], list[str]]:
    """By tag the last image of each run, as far as there is room for them; and the names of those left out."""
    by_tag, left_out, taken = [], [], 0
    for tag in sorted({tag for one in shown for tag in one.logged.images}):
        images: list[dict[str, Any]] = []
        for number, one in enumerate(shown):
            image = one.logged.images.get(tag)
            if image is None:
                continue
            if len(image.data) > IMAGE_BYTES or taken + len(image.data) > IMAGES_BYTES:
                left_out.append(f"{tag} of {one.run.name}")
                continue
            taken += len(image.data)
            images.append({"run": number, "image": image, "source": _as_address(image)})
        if images:
            by_tag.append({"tag": tag, "images": images})
    return by_tag, left_out


def _as_address(image: Image) -> str:
    return f"data:{image.type};base64,{base64.b64encode(image.data).decode()}"


# Texts


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _clean(text: str) -> str:
    return _ESCAPES.sub("", text)


def _moment(seconds: float | None) -> str:
    """A time of this machine's clock, to the second."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M:%S")
