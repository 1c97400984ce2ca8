"""The schema accepts what a person may mean, and names what it refuses: key, value, allowed values, nearest name."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jobkit.config import schema
from jobkit.config.load import load
from jobkit.config.schema import SECTIONS, BestConfig, Config, ContainerConfig, MlflowMirror, Resources
from jobkit.config.strict import build
from jobkit.duration import format_seconds, parse_seconds
from jobkit.errors import InputError


@pytest.fixture(autouse=True)
def _no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JOBKIT_CONFIG", str(tmp_path / "no file"))


def _config(folder: Path, text: str) -> Config:
    file = folder / "toy.yaml"
    file.write_text(f"name: toy\ntask: mytask:train\n{text}\n")
    return load(file).config


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        (90, 5400),
        ("10min", 600),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1 h 30 min", 5400),
        ("1 day", 86400),
        ("2 days", 172800),
        ("30 minutes", 1800),
        ("45 seconds", 45),
        ("1.5h", 5400),
        ("0:30:00", 1800),
        ("2:30", 150),
        ("1-00:00:00", 86400),
        ("1-12", 129600),
    ],
)
def test_durations(text: str | int, seconds: int) -> None:
    assert parse_seconds(text) == seconds
    assert parse_seconds(format_seconds(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "soon", "5 parsecs", "-5", "1h30", "1:2:3:4", "Auto"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError):
        parse_seconds(text)


def test_a_key_that_is_not_written_has_its_default(tmp_path: Path) -> None:
    config = _config(tmp_path, "")
    assert config == Config(name="toy", task="mytask:train")
    assert config.resources.seconds is None
    assert config.resources.fewest_nodes == config.resources.world_size == 1


ACCEPTED: list[tuple[str, str, Any]] = [
    ("resources: {time: 1:00:00}", "resources.seconds", 3600),
    ("resources: {time: 1 day}", "resources.seconds", 86400),
    ("resources: {nodes: 4, min_nodes: 2}", "resources.fewest_nodes", 2),
    ("resources: {nodes: 3, tasks_per_node: 2}", "resources.world_size", 6),
    ("resources: {tasks_per_node: auto}", "resources.gpus_per_task", "auto"),
    ("checkpoint: {every: 500}", "checkpoint.every", 500),
    ("checkpoint: {every: 10min}", "checkpoint.every", "10min"),
    ("checkpoint: {memory: off}", "checkpoint.memory", False),
    ("checkpoint: {memory: 'off'}", "checkpoint.memory", "off"),
    ("checkpoint: {best: {metric: x, mode: max}}", "checkpoint.best", BestConfig(metric="x", mode="max")),
    ("checkpoint: {best: null}", "checkpoint.best", None),
    ("watchdog: off", "watchdog", False),
    ("watchdog: 5", "watchdog", 5),
    ("retry: {crash: unlimited, preemption: 0}", "retry.crash", "unlimited"),
    ("parallel: zero3", "parallel.data", "zero3"),
    ("parallel: pipeline", "parallel.pipeline", "all"),
    ("comm: {hook: none}", "comm.hook", "none"),
    ("seed: null", "seed", None),
    ("seed: auto", "seed", "auto"),
    ("deterministic: warn", "deterministic", "warn"),
    ("preload: [transformers, a.b]", "preload", ["transformers", "a.b"]),
    (
        "container: {prefix: [apptainer, exec, x.sif]}",
        "container",
        ContainerConfig(prefix=["apptainer", "exec", "x.sif"]),
    ),
    ("mirror: {mlflow: {}}", "mirror.mlflow", MlflowMirror()),
    ("after: toy-12345678", "after", ["toy-12345678"]),
    ("verify: {params: {warmup: 3}}", "verify.params", {"warmup": 3}),
    ("on_nan: ignore", "on_nan", "ignore"),
]


@pytest.mark.parametrize(("text", "key", "expected"), ACCEPTED, ids=[text for text, *_ in ACCEPTED])
def test_accepted(tmp_path: Path, text: str, key: str, expected: Any) -> None:
    value: Any = _config(tmp_path, text)
    for name in key.split("."):
        value = getattr(value, name)
    assert value == expected and type(value) is type(expected)


REFUSED: list[tuple[str, str, Any, str]] = [
    ("resources: {nodes: yes}", "resources.nodes", True, "a whole number"),
    ("resources: {nodes: '2'}", "resources.nodes", "2", "a whole number"),
    ("resources: {nodes: 0}", "resources.nodes", 0, "1 or more"),
    ("resources: {gpus_per_task: -1}", "resources.gpus_per_task", -1, "0 or more"),
    ("resources: 5", "resources", 5, "a mapping"),
    ("resources: {time: soon}", "resources.time", "soon", "30min"),
    ("resources: {time: yes}", "resources.time", True, "a text"),
    ("resources: {time: 0}", "resources.time", 0, "30min"),
    ("checkpoint: {every: 0}", "checkpoint.every", 0, "10min"),
    ("checkpoint: {every: '500'}", "checkpoint.every", "500", "10min"),
    ("checkpoint: {memory: on}", "checkpoint.memory", True, "off"),
    ("checkpoint: {best: {metric: x, mode: low}}", "checkpoint.best.mode", "low", "min"),
    ("retry: {crash: -1}", "retry.crash", -1, "unlimited"),
    ("retry: {time_limit: 10min}", "retry.time_limit", "10min", "unlimited"),
    ("watchdog: never", "watchdog", "never", "off"),
    ("watchdog: on", "watchdog", True, "off"),
    ("precision: fp61", "precision", "fp61", "bf16"),
    ("device: gpu", "device", "gpu", "cuda"),
    ("seed: one", "seed", "one", "a whole number"),
    ("inputs: data", "inputs", "data", "a list"),
    ("params: [1]", "params", [1], "a mapping"),
    ("clusters: {slurm: low}", "clusters", {"slurm": "low"}, "a mapping"),
    ("on_nan: rerun", "on_nan", "rerun", "stop or ignore"),
    ("parallel: zero9", "parallel", "zero9", "zero3"),
]


@pytest.mark.parametrize(("text", "key", "found", "allowed"), REFUSED, ids=[text for text, *_ in REFUSED])
def test_refused(tmp_path: Path, text: str, key: str, found: Any, allowed: str) -> None:
    with pytest.raises(InputError) as refused:
        _config(tmp_path, text)
    error = refused.value
    assert (error.key, error.found, error.line) == (key, found, 3)
    assert allowed in error.allowed
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("recources: {nodes: 1}", "recources", "resources"),
        ("checkpoint: {evry: 5}", "checkpoint.evry", "every"),
        ("comm: {bucket_cap: 5}", "comm.bucket_cap", "bucket_cap_mb"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(tmp_path: Path, text: str, key: str, nearest: str) -> None:
    with pytest.raises(InputError) as refused:
        _config(tmp_path, text)
    assert refused.value.key == key and repr(nearest) in refused.value.hint


@pytest.mark.parametrize("key", schema.DROPPED)
def test_a_key_of_the_second_edition_names_what_takes_its_place(tmp_path: Path, key: str) -> None:
    top, _, below = key.partition(".")
    with pytest.raises(InputError) as refused:
        _config(tmp_path, f"{top}: {{{below}: 1}}" if below else f"{top}: 1")
    assert (refused.value.key, refused.value.line, refused.value.hint) == (key, 3, schema.DROPPED[key])


def test_every_field_has_a_sentence_for_the_manual() -> None:
    tree = ast.parse(Path(schema.__file__).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    lacking = {
        (cls.name, field.target.id)  # type: ignore[attr-defined]
        for cls in classes
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    }
    assert lacking <= {
        ("Config", section) for section, keys in SECTIONS.items() if keys
    }  # a section's sentence is its class's


def test_a_value_is_built_as_it_is() -> None:
    values = dataclasses.asdict(Resources(nodes=2, time="2h"))
    assert build(Resources, values) == Resources(nodes=2, time="2h")
