"""What a person writes in a YAML is what the program gets, and what is wrong is named with its place."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import InputError
from jobkit.run.config import (
    UNLIMITED,
    CheckpointConfig,
    CommConfig,
    Config,
    MirrorConfig,
    MlflowMirror,
    ParallelConfig,
    Resources,
    RetryConfig,
    StartFrom,
    WandbMirror,
    read_resolved,
)
from jobkit.run.duration import format_seconds, parse_seconds
from jobkit.run.experiment import LoadedConfig, load
from jobkit.run.identity import name_in, run_name
from jobkit.run.yamlfile import parse_value, read_yaml

BASE = "name: toy\ntask: mytask:train\n"
VARIABLE = "JOBKIT_TEST_DATA"


@pytest.fixture(autouse=True)
def nothing_of_the_developers_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JOBKIT_CONFIG", str(tmp_path / "none.yaml"))
    monkeypatch.delenv(VARIABLE, raising=False)


def loaded(folder: Path, text: str, *overrides: str, demo: bool | None = None) -> LoadedConfig:
    file = folder / "toy.yaml"
    file.write_text(text)
    return load(file, overrides, demo)


def params(folder: Path, text: str, *overrides: str) -> dict[str, Any]:
    return loaded(folder, BASE + text, *overrides).config.params


def refusal(folder: Path, text: str, *overrides: str, demo: bool | None = None) -> str:
    """The message of the InputError, without the folder, in one line."""
    with pytest.raises(InputError) as refused:
        loaded(folder, text, *overrides, demo=demo)
    message = str(refused.value).replace(f"{folder}/", "")
    assert "\n" not in message, message
    return message


# Values


def test_what_is_not_written_has_its_default(tmp_path: Path) -> None:
    config = loaded(tmp_path, BASE).config
    assert config == Config(name="toy", task="mytask:train")
    assert (config.seed, config.precision, config.params, config.inputs, config.clusters) == (0, "fp32", {}, [], {})
    assert config.resources == Resources(nodes=1, tasks_per_node=1, gpus_per_task=0, cpus_per_task=1, time="auto")
    assert config.checkpoint == CheckpointConfig(every="auto", memory="auto", keep=3, mtbf="auto")
    assert config.watchdog == "auto"
    assert config.retry == RetryConfig(preemption=UNLIMITED, time_limit=3, node_failure=10, crash=3, exclude_after=2)


ACCEPTED: list[tuple[str, Any]] = [
    ("resources.time=auto", "auto"),
    ("resources.time=30min", "30min"),
    ("checkpoint.mtbf=auto", "auto"),
    ("checkpoint.mtbf=8h", "8h"),
    ("checkpoint.mtbf=90", 90),
    ("checkpoint.memory=auto", "auto"),
    ('checkpoint.memory="off"', "off"),
    ("checkpoint.memory=200", 200),
    ("checkpoint.memory=30s", "30s"),
    ("watchdog=auto", "auto"),
    ('watchdog="off"', "off"),
    ("watchdog=10min", "10min"),
    ("watchdog=5", 5),
    ("retry.crash=0", 0),
    ("retry.crash=unlimited", UNLIMITED),
    ("retry.preemption=5", 5),
    ("retry.time_limit=unlimited", UNLIMITED),
    ("retry.node_failure=100", 100),
    ("retry.exclude_after=1", 1),
]


@pytest.mark.parametrize(("override", "expected"), ACCEPTED, ids=[override for override, _ in ACCEPTED])
def test_what_is_allowed_is_taken_as_it_is_written(tmp_path: Path, override: str, expected: Any) -> None:
    found: Any = loaded(tmp_path, BASE, override).config
    for name in override.partition("=")[0].split("."):
        found = getattr(found, name)
    assert found == expected
    assert type(found) is type(expected)


def test_a_watchdog_may_be_off_without_quotes(tmp_path: Path) -> None:
    for text in ("off", "'off'", '"off"'):
        assert loaded(tmp_path, f"{BASE}watchdog: {text}\n").config.watchdog in ("off", False)
    assert loaded(tmp_path, BASE, "watchdog=off").config.watchdog in ("off", False)


def test_a_time_that_is_auto_is_an_hour_where_slurm_asks(tmp_path: Path) -> None:
    assert loaded(tmp_path, BASE + "resources: {time: auto}\n").config.resources.seconds == 3600


VALUES = [
    ("1e-3", 0.001),
    ("1E5", 100000.0),
    ("-.5", -0.5),
    ("1_000", 1000),
    ("0x1f", 31),
    ("007", "007"),
    ("12:30", "12:30"),
    ("1:00:00", "1:00:00"),
    ("'1e-3'", "1e-3"),
    ("yes", True),
    ("-.inf", -math.inf),
    ("null", None),
    ("[1, a]", [1, "a"]),
    ("{a: {b: 1e1}}", {"a": {"b": 10.0}}),
]


@pytest.mark.parametrize(("written", "expected"), VALUES)
def test_a_value_means_the_same_in_the_file_and_on_the_command_line(
    tmp_path: Path, written: str, expected: Any
) -> None:
    for found in (params(tmp_path, f"params: {{v: {written}}}"), params(tmp_path, "", f"+params.v={written}")):
        assert found == {"v": expected}
        assert type(found["v"]) is type(expected)
    assert parse_value(written) == expected


def test_not_a_number_is_a_number(tmp_path: Path) -> None:
    assert math.isnan(params(tmp_path, "params: {v: .nan}")["v"])


def test_an_unquoted_time_is_a_time(tmp_path: Path) -> None:
    assert loaded(tmp_path, BASE + "resources: {time: 1:00:00}").config.resources.seconds == 3600
    assert loaded(tmp_path, BASE, "resources.time=2:30").config.resources.seconds == 150


def test_a_merge_key_takes_over_what_an_anchor_holds(tmp_path: Path) -> None:
    text = "params:\n  small: &small {width: 8, depth: 2}\n  large: {<<: *small, depth: 9}\n"
    assert params(tmp_path, text)["large"] == {"width": 8, "depth": 9}


def test_what_a_merge_key_takes_over_has_the_line_where_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "toy.yaml"
    file.write_text("small: &small\n  width: 8\n  depth: 2\nlarge:\n  <<: *small\n  depth: 9\n")
    lines = read_yaml(file)[1]
    assert (lines["large.width"], lines["large.depth"]) == (2, 6)


# Overrides and interpolation


def test_an_override_replaces_a_value_and_may_add_to_params(tmp_path: Path) -> None:
    text = BASE + "params: {lr: 1e-3, net: {width: 8}}\nresources: {nodes: 2}\n"
    config = loaded(tmp_path, text, "+params.net.depth=3", "params.lr=3e-4", "resources.nodes=4", "name=other").config
    assert config.params == {"lr": 3e-4, "net": {"width": 8, "depth": 3}}
    assert (config.resources.nodes, config.name) == (4, "other")


def test_a_plus_adds_to_params_or_sets_what_is_there(tmp_path: Path) -> None:
    assert params(tmp_path, "", "+params.a=1") == {"a": 1}
    assert params(tmp_path, "params: {a: 1}", "+params.a=2") == {"a": 2}
    assert params(tmp_path, "params: {}", "+params.net={width: 8}", "params.net={width: 9}") == {"net": {"width": 9}}
    assert params(tmp_path, "params: {net: {a: 1}}", "+params.net.b.c=2") == {"net": {"a": 1, "b": {"c": 2}}}
    assert loaded(tmp_path, BASE, "+seed=3").config.seed == 3


def test_an_override_may_go_into_what_is_a_list_to_be_given_or_taken_from_elsewhere(tmp_path: Path) -> None:
    assert params(tmp_path, "params: {sizes: [1, 2]}", "params.sizes[1]=5") == {"sizes": [1, 5]}
    assert params(tmp_path, "params: {run: '???'}", "params.run=x") == {"run": "x"}
    assert params(tmp_path, "params: {net: null}", "params.net={width: 8}") == {"net": {"width": 8}}
    assert params(tmp_path, "params: {net: '???'}", "params.net={width: 8}") == {"net": {"width": 8}}


NEW = [
    ("params.learning_rate=3", "params.learning_rate: there is no such key; did you mean 'params.lr'?"),
    ("params.learning_rate=3", "(params has: lr, net; to add one: +params.learning_rate=...)"),
    ("params.net.widht=3", "params.net.widht: there is no such key; did you mean 'params.net.width'?"),
    ("params={lr: 1, batch: 3}", "command line: params.batch: there is no such key (params has: lr, net;"),
    ("params.net={depth: 3}", "command line: params.net.depth: there is no such key"),
    ("params.lr.x=3", "params.lr.x: there is no such key (params.lr has no keys;"),
    ("params.other[0]=3", "params.other: there is no such key"),
    ("lr=3", "command line: lr: unknown key; did you mean 'params.lr'? (allowed: name, task"),
    ("learning_rate=3", "did you mean 'params.lr'?"),
    ("nodes=2", "did you mean 'resources.nodes'?"),
    ("recources.nodes=2", "did you mean 'resources'?"),
]


@pytest.mark.parametrize(("override", "said"), NEW)
def test_an_override_of_what_is_not_in_the_file_is_refused_with_the_nearest_name(
    tmp_path: Path, override: str, said: str
) -> None:
    assert said in refusal(tmp_path, BASE + "params: {lr: 1e-3, net: {width: 8}}\n", override)


KINDS = """\
params:
  lr: 1e-3
  steps: 300
  compile: false
  widths: [8, 8]
  text: sgd
  clip: null
  net: {width: 8}
"""

OTHER_KINDS = [
    ("params.lr=1e-3x", "params.lr: found the text '1e-3x', expected a number, as 0.001 (+params.lr takes any value)"),
    ("params.lr=None", "params.lr: found the text 'None'"),
    ("params.lr='3'", "params.lr: found the text '3'"),
    ("params.lr=1,2", "a run for each: --sweep params.lr=1,2; a list: params.lr=[1,2]"),
    ("params.steps=yes", "params.steps: found True, expected a number, as 300"),
    ("params.steps={a: 1}", "params.steps: found {'a': 1}, expected a number"),
    ("params.compile=flase", "params.compile: found the text 'flase', expected true or false"),
    ("params.widths=8,8", "expected a list, as [8, 8]; params.widths=[8,8]"),
    ("params.widths=[8,8x]", "params.widths: found the text '8x', expected a number, as 8"),
    ("params.widths=8", "params.widths: found 8, expected a list, as [8, 8]; params.widths=[8]"),
    ("params.widths[1]=8x", "params.widths[1]: found the text '8x'"),
    ("params.widths.1=8x", "params.widths.1: found the text '8x'"),
    ("params.net={width: 8x}", "params.net.width: found the text '8x'"),
    ("params.net=wide", "params.net: found the text 'wide', expected a mapping"),
    ("params.text=Q: why", "params.text: found {'Q': 'why'}, expected a text"),
    ("params.clip=None", "params.clip: found the text 'None', expected null, or a value"),
    ("params.lr=", "command line: 'params.lr=': no value; none: params.lr=null"),
    ("params.text=a #3", "command line: 'params.text=a #3': the value is not valid YAML; quote it"),
]


@pytest.mark.parametrize(("override", "said"), OTHER_KINDS)
def test_a_value_of_another_kind_than_the_file_s_is_refused(tmp_path: Path, override: str, said: str) -> None:
    assert said in refusal(tmp_path, BASE + KINDS, override)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("params.lr=1", 1),
        ("params.lr=null", None),
        ("params.lr=[1,2]", [1, 2]),
        ("+params.lr=1e-3x", "1e-3x"),
        ("params.lr=${params.steps}", 300),
        ("params.steps=1e4", 10000.0),
        ("params.compile=1", 1),
        ("params.compile=yes", True),
        ("params.widths=[]", []),
        ("params.widths=[1.5]", [1.5]),
        ("params.text=3", 3),
        ("params.text='a: b'", "a: b"),
        ("params.clip=auto", "auto"),
        ("params.clip=0.5", 0.5),
    ],
)
def test_a_value_that_may_be_meant_is_taken(tmp_path: Path, override: str, expected: Any) -> None:
    config = loaded(tmp_path, BASE + KINDS, override).config
    assert config.params[override.partition("=")[0].rpartition(".")[2]] == expected


def test_a_section_that_was_indented_under_params_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, BASE + "params:\n  lr: 1\n  resources:\n    nodes: 2\n")
    assert said.startswith("toy.yaml:5: params.resources: resources is a section of its own")
    assert "params.checkpoint" in refusal(tmp_path, BASE, "+params.checkpoint.every=5")
    assert params(tmp_path, "params: {checkpoint: {path: x}, parallel: true, resources: null}")


def test_the_last_override_of_a_key_counts(tmp_path: Path) -> None:
    assert params(tmp_path, "", "+params.a=1", "params.a=2") == {"a": 2}


def test_interpolations_are_resolved_after_the_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/data")
    text = "params: {root: '${oc.env:" + VARIABLE + "}', file: '${params.root}/x'}\ninputs: ['${params.file}']\n"
    assert loaded(tmp_path, BASE + text).config.inputs == ["/data/x"]
    assert loaded(tmp_path, BASE + text, "params.root=/elsewhere").config.inputs == ["/elsewhere/x"]
    assert params(tmp_path, "", "+params.a=1", "+params.b=${params.a}") == {"a": 1, "b": 1}


def test_an_interpolation_may_have_a_default(tmp_path: Path) -> None:
    assert params(tmp_path, "params: {v: '${oc.env:" + VARIABLE + ",none}'}") == {"v": "none"}


@pytest.mark.parametrize("written", ["{v}", " {v}", "'{v}'", '"{v}"', " '{v}', none", "{v},none"])
@pytest.mark.parametrize("before", ["", "it's \t", "a " * 33])  # YAML quotes them each way, and breaks lines
def test_a_variable_of_the_shell_is_seen_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, before: str
) -> None:
    monkeypatch.setenv(VARIABLE, "here")
    for name in ("oc.env", " oc.env "):
        value = f"{before}${{{name}:{written.format(v=VARIABLE)}}}"
        found = loaded(tmp_path, BASE + f"params: {json.dumps({'v': value})}\n")
        assert found.of_environment and found.config.params == {"v": f"{before}here"}


# The demo

DEMO = BASE + "params: {steps: 1000, data: big}\ndemo:\n  unless_env: " + VARIABLE + "\n  params: {steps: 10}\n"


@pytest.mark.parametrize(
    ("value", "forced", "steps"),
    [
        (None, None, 10),
        ("", None, 10),
        ("/data", None, 1000),
        (None, False, 1000),
        ("/data", True, 10),
        (None, True, 10),
        ("/data", False, 1000),
    ],
)
def test_the_demo_is_merged_unless_the_variable_is_set_or_the_command_line_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, forced: bool | None, steps: int
) -> None:
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    found = loaded(tmp_path, DEMO, demo=forced)
    assert found.config.params == {"steps": steps, "data": "big"}
    assert len(found.notes) == (steps == 10)
    assert all("small recipe" in note for note in found.notes)


def test_a_demo_without_a_condition_waits_to_be_asked_for(tmp_path: Path) -> None:
    text = BASE + "demo: {seed: 7}\n"
    assert [loaded(tmp_path, text, demo=demo).config.seed for demo in (None, False, True)] == [0, 0, 7]


def test_an_override_beats_the_demo(tmp_path: Path) -> None:
    assert loaded(tmp_path, DEMO, "params.steps=5").config.params["steps"] == 5


# Refusals

ALLOWED_KEYS = "allowed: name, task, command, params"
REFUSED = [
    ("recources: {nodes: 1}", ["toy.yaml:3: recources", "did you mean 'resources'?", ALLOWED_KEYS]),
    ("resources:\n  nodes: 1\n  node: 1", ["toy.yaml:5: resources.node:", "did you mean 'nodes'?", "tasks_per_node"]),
    ("checkpoint: {evry: 5}", ["toy.yaml:3: checkpoint.evry", "did you mean 'every'?"]),
    ("1: 2", ["toy.yaml:3: 1: unknown key"]),
    ("command: [python, train.py]", ["toy.yaml:3: command", "a task as well"]),
    (
        "params: {run: '???'}\ninputs: ['${params.run}/x']",
        ["toy.yaml:3: params.run: missing", "params.run=..."],
    ),
    ("resources: {nodes: yes}", ["toy.yaml:3: resources.nodes: found True", "a whole number"]),
    ('resources: {nodes: "2"}', ["toy.yaml:3: resources.nodes: found '2'", "a whole number"]),
    ("resources: {nodes: 1.5}", ["found 1.5", "a whole number"]),
    ("resources: {nodes: -1}", ["toy.yaml:3: resources.nodes: found -1", "1 or more"]),
    ("resources: {tasks_per_node: 0}", ["resources.tasks_per_node: found 0", "1 or more"]),
    ("resources: {gpus_per_task: -1}", ["resources.gpus_per_task: found -1", "0 or more"]),
    ("resources: {cpus_per_task: 0}", ["resources.cpus_per_task: found 0", "1 or more"]),
    ("resources: 5", ["toy.yaml:3: resources: found 5", "a mapping with nodes"]),
    ("resources: {time: soon}", ["toy.yaml:3: resources.time: found 'soon'", "30min", "1:30:00"]),
    ("resources: {time: 0}", ["resources.time: found 0"]),
    ("resources: {time: -5}", ["resources.time: found -5"]),
    ("resources: {time: 5 parsecs}", ["resources.time: found '5 parsecs'"]),
    ("checkpoint: {every: 0}", ["checkpoint.every: found 0", "auto"]),
    ("checkpoint: {every: often}", ["checkpoint.every: found 'often'", "10min"]),
    ("checkpoint: {memory: 0}", ["checkpoint.memory: found 0", "auto, off, a number of steps above 0, or a time"]),
    ("checkpoint: {memory: on}", ["checkpoint.memory: found True", "auto, off"]),
    ("checkpoint: {memory: often}", ["checkpoint.memory: found 'often'", "30s"]),
    ("checkpoint: {mtbf: 0}", ["toy.yaml:3: checkpoint.mtbf: found 0", "auto, or a time like 8h"]),
    ("checkpoint: {mtbf: rarely}", ["checkpoint.mtbf: found 'rarely'", "auto, or a time like 8h"]),
    ("checkpoint: {mtbf: 1.5}", ["checkpoint.mtbf: found 1.5", "a text or a whole number"]),
    (
        "checkpoint: {mtfb: 8h}",
        ["toy.yaml:3: checkpoint.mtfb", "did you mean 'mtbf'?", "every, memory, weights, keep, mtbf"],
    ),
    ("resources: {time: yes}", ["toy.yaml:3: resources.time: found True", "a text or a whole number"]),
    ("resources: {time: Auto}", ["resources.time: found 'Auto'", "30min"]),
    ("resources: {time: unlimited}", ["resources.time: found 'unlimited'", "30min"]),
    ("retry: {crash: -1}", ["toy.yaml:3: retry.crash: found -1", "unlimited, or a number of", "0 or more"]),
    ("retry: {crash: often}", ["retry.crash: found 'often'", "unlimited, or a number"]),
    ("retry: {crash: '3'}", ["retry.crash: found '3'", "unlimited, or a number"]),
    ("retry: {crash: 1.5}", ["retry.crash: found 1.5", "a text or a whole number"]),
    ("retry: {crash: yes}", ["retry.crash: found True", "a text or a whole number"]),
    ("retry: {preemption: -2}", ["toy.yaml:3: retry.preemption: found -2", "unlimited"]),
    ("retry: {time_limit: 10min}", ["retry.time_limit: found '10min'", "unlimited"]),
    ("retry: {node_failure: never}", ["retry.node_failure: found 'never'", "unlimited"]),
    ("retry: {exclude_after: 0}", ["retry.exclude_after: found 0", "1 or more"]),
    ("retry: {exclude_after: unlimited}", ["retry.exclude_after: found 'unlimited'", "a whole number"]),
    ("retry:\n  crash: 1\n  crashes: 1", ["toy.yaml:5: retry.crashes", "did you mean 'crash'?", "allowed: preemption"]),
    ("retry: 3", ["toy.yaml:3: retry: found 3", "a mapping with preemption"]),
    ("watchdog: 0", ["toy.yaml:3: watchdog: found 0", "auto, off, or a time like 10min"]),
    ("watchdog: never", ["watchdog: found 'never'", "auto, off, or a time like 10min"]),
    ("watchdog: {every: 5}", ["watchdog: found {'every': 5}", "a text or a whole number"]),
    ("watchdgo: 5min", ["toy.yaml:3: watchdgo", "did you mean 'watchdog'?"]),
    ("checkpoint: {keep: 0}", ["checkpoint.keep: found 0", "1 or more"]),
    ("precision: fp61", ["toy.yaml:3: precision: found 'fp61'", "allowed: fp32, bf16"]),
    ("precision: 16", ["precision: found 16", "fp32, bf16"]),
    ("seed: one", ["toy.yaml:3: seed: found 'one'", "a whole number"]),
    ("inputs: data", ["toy.yaml:3: inputs: found 'data'", "a list"]),
    ("params: [1]", ["toy.yaml:3: params: found [1]", "a mapping"]),
    ("clusters: {slurm: low}", ["toy.yaml:3: clusters", "a mapping"]),
    ("name: again", ["toy.yaml:3", "'name' occurs twice"]),
    ("params:\n  a: 1\n  a: 2", ["toy.yaml:5", "'a' occurs twice"]),
    ("params: {a: '${oc.env:JOBKIT_TEST_DATA}'}", ["toy.yaml:3: params.a: Environment variable 'JOBKIT_TEST_DATA'"]),
    ("params: {a: '${params.b}'}", ["toy.yaml:3: params.a", "params.b"]),
    ("params: {a: '${params.b}', b: '${params.a}'}", ["toy.yaml:3: params", "ecursive"]),
    ("params: {a: '???'}", ["toy.yaml:3: params.a"]),
    ("params: {a: [1}", ["toy.yaml:3: not valid YAML"]),
    ("params: {a: !mine 1}", ["toy.yaml:3: not valid YAML", "!mine"]),
    ("demo: 5", ["toy.yaml:3: demo: found 5", "a mapping"]),
    ("demo: {unless_env: 5}", ["toy.yaml:3: demo.unless_env: found 5"]),
]


@pytest.mark.parametrize(("text", "said"), REFUSED, ids=[text for text, _ in REFUSED])
def test_a_mistake_is_named_with_its_place_and_what_is_allowed(tmp_path: Path, text: str, said: list[str]) -> None:
    message = refusal(tmp_path, f"{BASE}{text}\n")
    for part in said:
        assert part in message


# YAML that is fine by the standard, but holds what a config cannot.
NOT_PLAIN = [
    "params: {null: 1}",
    "params: !!set {a, b}",
    "params: {? [a] : 1}",
    "null: 1",
    "params: {a: '${'}",
    "params: {a: 0x_}",
    "params: {a: \x01}",
]


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_what_a_config_cannot_hold_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, f"{BASE}{text}\n").startswith("toy.yaml")


@pytest.mark.parametrize("text", [text for text in NOT_PLAIN if text.startswith("params: {")])
def test_a_mistake_is_refused_in_one_line_where_a_demo_is_merged_too(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, f"{BASE}{text}\ndemo: {{seed: 1}}\n", demo=True).startswith("toy.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected `key: value` lines"),
        ("- a\n- b\n", "found list"),
        ("just words", "found str"),
        ("name: a\n---\nname: b\n", "not valid YAML"),
        ("\tname: a", "toy.yaml:1: not valid YAML"),
        ("task: m:f\n", "name: missing"),
        ("name: toy\n", "task: missing"),
        ("name: ../toy\ntask: m:f\n", "toy.yaml:1: name: found '../toy', expected letters"),
        ("name: toy\ntask: train\n", "toy.yaml:2: task: found 'train', expected module:callable"),
    ],
)
def test_a_file_that_is_not_an_experiment_is_refused(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith("toy.yaml")
    assert said in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.yaml", tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(InputError, match=str(path)):
            load(path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("fast", "expected key=value"),
        ("=5", "expected key=value"),
        ("a b=5", "expected key=value"),
        ("++params.a=1", "expected key=value"),
        ("params.a=[1", "not valid YAML"),
        ("params.a=*x", "not valid YAML"),
        ("+params.a=${", "params.a"),
        ("nodes=2", "command line: nodes: unknown key"),
        ("resources.node=2", "did you mean 'nodes'?"),
        ("resources.nodes=0", "command line: resources.nodes: found 0, expected 1 or more"),
        ("resources.nodes='2'", "command line: resources.nodes: found '2'"),
        ("params=5", "command line: params: found 5"),
        ("name.x=1", "name"),
        pytest.param(
            "resources={nodes: 0}",
            "command line: resources",
        ),
    ],
)
def test_an_override_that_is_wrong_is_refused_as_the_command_lines(tmp_path: Path, override: str, said: str) -> None:
    assert said in refusal(tmp_path, BASE, override)


def test_a_mistake_in_the_demo_is_named_there(tmp_path: Path) -> None:
    text = f"{BASE}resources: {{nodes: 2}}\ndemo:\n  resources: {{nodes: 0}}\n"
    assert refusal(tmp_path, text, demo=True).startswith("toy.yaml:5: demo.resources.nodes: found 0")


def test_a_demo_that_is_not_there_cannot_be_asked_for(tmp_path: Path) -> None:
    assert "--demo" in refusal(tmp_path, BASE, demo=True)


# The resolved config in the run directory

TRICKY = [
    *["1e-3", "1:00:00", "12:30", "yes", "no", "on", "y", "null", "~", "", "0x1f", "0o17", "0b1", "007", "1_000"],
    *["1.", ".5", ".inf", ".nan", "nan", "+1", "1E5", "2024-01-01", "2024-01-01 10:00:00", "=", "<<", "???"],
    *["${x}", "${oc.env:HOME}", "\\${x}", "a: b", "# c", "- x", "a\nb", "a\n", " lead", "trail ", "é", "\u2028"],
    *["\x07", "*a", "&a", "!x", "%x", "@x", "`x", "{a}", "[a", "'", '"', "\t", "\r\n", "😀", "word " * 50],
    *[math.inf, -math.inf, 1e-20, 1e22, 10**30, 0.1, 1.0, -0.0, True, None, [], {}, [[1, [2]]]],
    *[{"1": 1, "yes": 2, "1:00": 3}],
]


@pytest.mark.parametrize("value", TRICKY, ids=[repr(value)[:30] for value in TRICKY])
def test_the_resolved_config_is_read_back_as_it_was(tmp_path: Path, value: Any) -> None:
    config = Config(name="toy", task="mytask:train", params={"v": value, "nested": {"v": [value]}})
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    again = read_resolved(file)
    assert again == config
    assert type(again.params["v"]) is type(value)


def test_a_text_with_a_dollar_and_a_brace_is_read_back(tmp_path: Path) -> None:
    config = loaded(tmp_path, BASE + "params: {shell: '\\${', day: 1}\n").config
    assert config.params["shell"] == "${"
    for one in (config, Config(name="toy", command=["python", "train.py"])):
        (tmp_path / "config.yaml").write_text(one.to_yaml())
        assert read_resolved(tmp_path / "config.yaml") == one


def test_not_a_number_is_read_back_from_the_resolved_config(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(Config(name="toy", task="m:f", params={"v": math.nan}).to_yaml())
    assert repr(read_resolved(file).params["v"]) == "nan"


def test_every_field_is_read_back_from_the_resolved_config(tmp_path: Path) -> None:
    config = Config(
        name="toy",
        task="m:f",
        inputs=["/data"],
        check="m:look",
        seed=3,
        precision="bf16",
        parallel=ParallelConfig(data="hsdp", offload=True, shards=2, tensor=3, pipeline="all", microbatches=4),
        deterministic="warn",
        comm=CommConfig(hook="powersgd", powersgd_rank=2, powersgd_start=5, bucket_cap_mb=50, local_sgd=8),
        device="cuda",
        backend="gloo",
        resources=Resources(nodes=2, tasks_per_node=3, gpus_per_task=1, cpus_per_task=4, time="1:00:00"),
        checkpoint=CheckpointConfig(every="10min", memory="30s", keep=2, mtbf="8h"),
        retry=RetryConfig(preemption=9, time_limit=UNLIMITED, node_failure=0, crash=1, exclude_after=5),
        watchdog="off",
        clusters={"h100": {"partition": "h100", "setup": ["module load cuda"]}},
        start_from=StartFrom(run="toy-12345678", step=7, weights_only=True),
        on_nan="off",
        verify_every=100,
        mirror=MirrorConfig(wandb=WandbMirror(project="p", mode="offline"), mlflow=MlflowMirror(uri="file:///m")),
        after=["toy-12345678"],
    )
    defaults = Config(name="", task="")
    changed = {f.name for f in dataclasses.fields(Config) if getattr(config, f.name) != getattr(defaults, f.name)}
    assert changed | {"params", "command"} == {f.name for f in dataclasses.fields(Config)}
    for one in (config, Config(name="toy", command=["python", "train.py"])):
        (tmp_path / "config.yaml").write_text(one.to_yaml())
        assert read_resolved(tmp_path / "config.yaml") == one


# The user's own clusters


def test_the_users_own_file_adds_clusters_and_the_yaml_beats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.yaml"
    monkeypatch.setenv("JOBKIT_CONFIG", str(own))
    own.write_text("clusters: {h100: {partition: h100}, slurm: {partition: mine}}\n")
    found = loaded(tmp_path, BASE + "clusters: {slurm: {partition: low}}\n").config.clusters
    assert found == {"h100": {"partition": "h100"}, "slurm": {"partition": "low"}}


@pytest.mark.parametrize(
    ("typed", "left"),
    [
        ([], {"nodes": 8, "cpus-per-task": 4, "partition": "low"}),
        (["resources.nodes=2"], {"cpus-per-task": 4, "partition": "low"}),
        (["resources={nodes: 2, cpus_per_task: 1}"], {"partition": "low"}),
        (["resources.nodes=2", "clusters.a.nodes=3"], {"nodes": 3, "cpus-per-task": 4, "partition": "low"}),
        (["clusters.a={nodes: 3}", "resources.nodes=2"], {"nodes": 3, "cpus-per-task": 4, "partition": "low"}),
        (["resources={nodes: 2}", "clusters={a: {nodes: 3}}"], {"nodes": 3, "cpus-per-task": 4, "partition": "low"}),
    ],
)
def test_what_is_typed_of_resources_beats_an_entry_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], left: dict[str, Any]
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("clusters: {mine: {nodes: 5}}\n")
    monkeypatch.setenv("JOBKIT_CONFIG", str(own))
    text = BASE + "clusters: {a: {nodes: 8, cpus-per-task: 4, partition: low}}\n"
    found = loaded(tmp_path, text, *typed).config.clusters
    assert found == {"a": left, "mine": {} if typed else {"nodes": 5}}


def test_the_users_own_file_is_looked_for_where_the_desktop_standard_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobkit").mkdir()
    (tmp_path / "jobkit/config.yaml").write_text("clusters: {a: {}}\n")
    monkeypatch.delenv("JOBKIT_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert loaded(tmp_path, BASE).config.clusters == {"a": {}}


def test_a_mistake_in_the_users_own_file_is_named_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.yaml"
    monkeypatch.setenv("JOBKIT_CONFIG", str(own))
    own.write_text("cluster: {a: {}}\n")
    message = refusal(tmp_path, BASE)
    assert message.startswith("own.yaml:1: cluster: unknown key")
    assert "did you mean 'clusters'?" in message


# Times


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("30min", 1800),
        ("1.5h", 5400),
        ("2 h", 7200),
        ("2d", 172800),
        (45, 2700),
        ("45", 2700),
        ("2:30", 150),
        ("1:30:00", 5400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:15", 131415),
    ],
)
def test_times_are_read_as_sbatch_reads_them_and_in_words(text: str | int, seconds: int) -> None:
    assert parse_seconds(text) == seconds
    assert parse_seconds(format_seconds(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", 0, -1, "0:00:00", "1:2:3:4", "1h30", "5 parsecs", "1-", "infinite"])
def test_what_is_no_time_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match="1:30:00"):
        parse_seconds(text)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (86399, "23:59:59")])
def test_times_are_written_in_sbatchs_form(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
    assert format_seconds(86400 + seconds).startswith("1-")


# Identity


def test_a_whole_number_is_one_value_however_it_is_written() -> None:
    def name(value: Any) -> str:
        return run_name(Config(name="toy", task="m:f", params={"v": value, "nested": [{"v": value}]}))

    assert name(1) == name(1.0) == name(1e0)
    assert name(100000) == name(1e5)
    different = [name(value) for value in (1, True, "1", "1.0", 1.5, -1, 0, False, math.nan, math.inf, None)]
    assert len(set(different)) == len(different)


def test_a_run_from_before_whole_numbers_were_one_value_is_found_again(tmp_path: Path) -> None:
    config = Config(name="toy", task="mytask:train", params={"lr": 1.0})
    assert name_in(tmp_path, config) == run_name(config) == "toy-efbd578f"
    (tmp_path / "toy-5775e16c").mkdir()
    assert name_in(tmp_path, config) == "toy-5775e16c"
    (tmp_path / run_name(config)).mkdir()
    assert name_in(tmp_path, config) == run_name(config)


ONE = Config(name="toy", task="m:f", params={"lr": 1e-3, "net": {"width": 8, "depth": 2}})


@pytest.mark.parametrize(
    "changed",
    [
        {"params": {"lr": 2e-3, "net": {"width": 8, "depth": 2}}},
        {"params": {"lr": 1e-3, "net": {"width": 8, "depth": 2}, "new": None}},
        {"params": {"lr": "0.001", "net": {"width": 8, "depth": 2}}},
        {"task": "m:g"},
        {"seed": 1},
        {"precision": "bf16"},
        {"deterministic": True},
        {"deterministic": "warn"},
        {"name": "other"},
    ],
    ids=str,
)
def test_what_decides_the_result_makes_another_run(changed: dict[str, Any]) -> None:
    assert run_name(dataclasses.replace(ONE, **changed)) != run_name(ONE)


@pytest.mark.parametrize(
    "changed",
    [
        {"resources": Resources(nodes=4, tasks_per_node=8, gpus_per_task=1, cpus_per_task=2, time="2d")},
        {"clusters": {"slurm": {"partition": "high"}}},
        {"checkpoint": CheckpointConfig(every=5, memory=False, keep=1)},
        {"inputs": ["/data"]},
        {"check": "m:look"},
        {"params": {"net": {"depth": 2, "width": 8}, "lr": 0.001}},
    ],
    ids=str,
)
def test_what_only_says_where_and_how_it_runs_makes_the_same_run(changed: dict[str, Any]) -> None:
    assert run_name(dataclasses.replace(ONE, **changed)) == run_name(ONE)


def test_a_run_from_before_a_key_was_there_keeps_its_directory() -> None:
    toy = Config(name="toy", task="mytask:train", params={"steps": 3})
    assert run_name(toy) == "toy-759c531a"
    zero3 = dataclasses.replace(toy, parallel=ParallelConfig(data="zero3"))
    assert run_name(zero3) == "toy-4dac41d3"
    offloaded = dataclasses.replace(toy, parallel=ParallelConfig(data="zero3", offload=True))
    assert run_name(offloaded) not in (run_name(toy), run_name(zero3))


def test_a_run_is_called_by_its_name_and_eight_digits(tmp_path: Path) -> None:
    assert run_name(ONE).startswith("toy-")
    assert len(run_name(ONE)) == len("toy-") + 8
    (tmp_path / "config.yaml").write_text(ONE.to_yaml())
    assert run_name(read_resolved(tmp_path / "config.yaml")) == run_name(ONE)


def test_every_key_is_a_text_and_so_is_a_date(tmp_path: Path) -> None:
    config = loaded(tmp_path, f"{BASE}params: {{1: a, b: 2024-01-01}}\n").config
    assert config.params == {"1": "a", "b": "2024-01-01"}
    assert run_name(config)
