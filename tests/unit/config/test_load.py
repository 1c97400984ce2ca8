"""From a YAML to a Config: values, overrides, demo, interpolation, the user's own clusters, and the place of errors."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest

from jobkit.config.load import Loaded, load, read_resolved, with_run_dir
from jobkit.config.schema import SECTIONS
from jobkit.config.yamlfile import dump, read_yaml
from jobkit.errors import InputError

BASE = "name: toy\ntask: mytask:train\n"
VARIABLE = "JOBKIT_TEST_DATA"


@pytest.fixture(autouse=True)
def user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's own file, which does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("JOBKIT_CONFIG", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "xdg" / "jobkit").mkdir(parents=True)
    return tmp_path / "xdg" / "jobkit" / "config.yaml"


def _load(folder: Path, text: str, *overrides: str) -> Loaded:
    file = folder / "toy.yaml"
    file.write_text(BASE + text)
    return load(file, overrides)


def _refusal(folder: Path, text: str, *overrides: str) -> InputError:
    with pytest.raises(InputError) as refused:
        _load(folder, text, *overrides)
    assert "\n" not in str(refused.value)
    return refused.value


def _reread(folder: Path, loaded: Loaded) -> Any:
    file = folder / "config.yaml"
    file.write_text(dump(loaded.written))
    config = read_resolved(file)
    assert config.seed == loaded.config.random_seed
    return dataclasses.replace(config, seed=loaded.config.seed)


# Values


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1e-3", 0.001),
        ("-.5", -0.5),
        ("1_000", 1000),
        ("0x1f", 31),
        ("007", "007"),
        ("1:00:00", "1:00:00"),
        ("2026-11-26", "2026-11-26"),
        ("'1e-3'", "1e-3"),
        ("yes", True),
        ("-.inf", -math.inf),
        ("null", None),
        ("'None'", "None"),
        ("NONE", "NONE"),
        ("[1, none]", [1, "none"]),
        ("none", "none"),
        ("{a: {b: 1e1}}", {"a": {"b": 10.0}}),
    ],
)
def test_a_value_means_the_same_in_the_file_on_the_command_line_and_in_config_yaml(
    tmp_path: Path, written: str, expected: Any
) -> None:
    for loaded in (_load(tmp_path, f"params: {{v: {written}}}"), _load(tmp_path, "", f"+params.v={written}")):
        assert loaded.config.params == {"v": expected}
        assert type(loaded.config.params["v"]) is type(expected)
        assert _reread(tmp_path, loaded) == loaded.config


def test_the_lines_of_keys_are_known_in_lists_and_merges(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("small: &small\n  width: 8\nlarge:\n  <<: *small\n  depth:\n  - a: 1\n")
    value, places = read_yaml(file)
    assert value["large"] == {"width": 8, "depth": [{"a": 1}]}
    assert [places.by_key[key] for key in ("small.width", "large.depth.0.a")] == [(file, 2), (file, 6)]


# Overrides


def test_an_override_sets_replaces_merges_and_adds(tmp_path: Path) -> None:
    text = "params: {lr: 1e-3, net: {width: 8}, run: '???', clip: null}\nresources: {nodes: 2}\n"
    words = ["+params.net.depth=3", "params.lr=3e-4", "params.run=x", "params.clip=0.5"]
    loaded = _load(tmp_path, text, *words, "resources={nodes: 4}", "name=other", "+params.new.a=1", "name=last")
    net = {"width": 8, "depth": 3}
    assert loaded.config.params == {"lr": 3e-4, "net": net, "run": "x", "clip": 0.5, "new": {"a": 1}}
    assert (loaded.config.resources.nodes, loaded.config.name) == (4, "last")


REFUSED: list[tuple[str, str, str]] = [  # override, key, in the hint
    ("params.learning_rate=3", "params.learning_rate", "'params.lr'"),
    ("params.net.widht=3", "params.net.widht", "'params.net.width'"),
    ("params={lr: 1, batch: 3}", "params.batch", "+params.batch="),
    ("params.net={depth: 3}", "params.net.depth", "+params.net.depth="),
    ("params.lr.x=3", "params.lr.x", "no keys"),
    ("lr=3", "lr", "'params.lr'"),
    ("learning_rate=3", "learning_rate", "'params.lr'"),
    ("nodes=2", "nodes", "'resources.nodes'"),
    ("recources.nodes=2", "recources.nodes", "'resources'"),
    ("resources.node=2", "resources.node", "'nodes'"),
    ("params.lr=1e-3x", "params.lr", "+params.lr="),
    ("params.lr=1,2", "params.lr", "--sweep params.lr=1,2"),
    ("params.lr=yes", "params.lr", ""),
    ("params.flag=flase", "params.flag", ""),
    ("params.w=8,8", "params.w", "params.w=[8,8]"),
    ("params.net=wide", "params.net", ""),
    ("params.lr=", "params.lr", "params.lr=null"),
    ("params.lr=a #3", "params.lr", ""),
    ("params.lr=#fff", "params.lr", ""),
    ("params.lr=[1, 2]", "params.lr", "+params.lr="),
    ("params.lr={a", "params.lr", ""),
    ("params.lr", "", ""),
    ("=3", "", ""),
]


@pytest.mark.parametrize(("override", "key", "hint"), REFUSED, ids=[override for override, *_ in REFUSED])
def test_an_override_that_is_wrong_is_refused_with_the_nearest(
    tmp_path: Path, override: str, key: str, hint: str
) -> None:
    error = _refusal(tmp_path, "params: {lr: 1e-3, net: {width: 8}, w: [1, 2], flag: false}\n", override)
    assert (error.file, error.line, error.key) == ("command line", None, key)
    assert hint in error.hint


def test_a_plus_takes_any_value(tmp_path: Path) -> None:
    assert _load(tmp_path, "params: {lr: 1}", "+params.lr=1e-3x").config.params == {"lr": "1e-3x"}


def test_the_word_none_of_python_is_refused_and_null_named(tmp_path: Path) -> None:
    in_file = _refusal(tmp_path, "params:\n  clip: None\n")
    typed = _refusal(tmp_path, "params: {clip: 1}", "params.clip=None")
    within = _refusal(tmp_path, "params: {net: {clip: 1}}", "params.net={clip: [1, None]}")
    assert (in_file.key, in_file.line) == ("params.clip", 4)
    assert (typed.key, within.key, within.file) == ("params.clip", "params.net.clip.1", "command line")
    assert all("null" in error.allowed for error in (in_file, typed, within))


# Interpolation


def test_the_environment_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "s3cret")
    text = (
        "params:\n  hf_token: ${oc.env:" + VARIABLE + '}\n  again: ["${params.hf_token}/x"]\n  n: 3\n  m: ${params.n}\n'
        "  all: ${params.net}\n  net: {k: '${oc.env:" + VARIABLE + ",no}', pad_token: '<pad>'}\n"
        "clusters: {slurm: {setup: 'export T=${oc.env:" + VARIABLE + "}'}}\n"
    )
    loaded = _load(tmp_path, text)
    assert loaded.config.params["again"] == ["s3cret/x"] and loaded.config.params["all"]["k"] == "s3cret"
    assert "s3cret" not in dump(loaded.written)
    assert loaded.written["params"]["m"] == 3
    assert loaded.written["params"]["net"]["pad_token"] == "<pad>"
    assert _reread(tmp_path, loaded) == loaded.config
    monkeypatch.setenv(VARIABLE, "other")
    assert _reread(tmp_path, loaded).params["again"] == ["other/x"]
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(InputError) as refused:
        _reread(tmp_path, loaded)
    assert refused.value.key == "params.hf_token" and VARIABLE in str(refused.value)
    assert refused.value.file == tmp_path / "config.yaml" and refused.value.line is not None


def test_a_changed_config_is_written_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "auto")
    loaded = _load(tmp_path, "resources: {tasks_per_node: '${oc.env:" + VARIABLE + "}'}\n")
    resources = dataclasses.replace(loaded.config.resources, tasks_per_node=4, gpus_per_task=1)
    counted = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, resources=resources))
    assert _reread(tmp_path, counted).resources == resources


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("params: {seed: 3, shown: '${seed}'}\n", 3),
        ("params: {base: 3, seed: '${params.base}', shown: '${seed}'}\n", 3),
        ("seed: auto\nparams: {seed: 3, shown: '${seed}'}\n", 3),
        ("seed: 0\nparams: {seed: 3, shown: '${seed}'}\n", 0),
        ("seed: 5\nparams: {seed: 3, shown: '${seed}'}\n", 5),
        ("seed: null\nparams: {seed: 3}\n", None),
        ("params: {seed: '${seed}'}\n", 0),
        ("params: {seed: '3'}\n", 0),
        ("params: {seed: 3.0}\n", 0),
        ("params: {seed: true}\n", 0),
    ],
)
def test_a_whole_number_in_the_params_is_the_seed_that_nobody_wrote(
    tmp_path: Path, text: str, expected: int | None
) -> None:
    loaded = _load(tmp_path, text)
    assert loaded.config.random_seed == loaded.written["seed"] == _reread(tmp_path, loaded).random_seed == expected
    assert loaded.config.params.get("shown", expected) == expected


def test_literal_dollars_and_run_dir_stay_texts(tmp_path: Path) -> None:
    assert _load(tmp_path, "params: {of: '${seed}'}\n").config.params == {"of": 0}  # a default that nobody wrote
    loaded = _load(tmp_path, "params: {a: '\\${HOME}/x', b: '${run_dir}/o', c: '${params.b}', d: '${params.a}'}\n")
    assert loaded.config.params == {"a": "${HOME}/x", "b": "${run_dir}/o", "c": "${run_dir}/o", "d": "${HOME}/x"}
    assert _reread(tmp_path, loaded) == loaded.config
    assert with_run_dir({"o": ["${run_dir}/o", 1]}, Path("/r")) == {"o": ["/r/o", 1]}


INTERPOLATIONS = [
    ("params: {a: '${oc.env:" + VARIABLE + "}'}", "params.a", VARIABLE),
    ("params: {alpha: '${params.beta}', bta: 1}", "params.alpha", "'params.bta'"),
    ("params: {a: '${params.b}', b: '${params.a}'}", "params.a", "ecursive"),
    ("params: {a: '???'}", "params.a", "params.a=..."),
    ("params: {run: '???'}\ninputs: ['${params.run}/x']", "params.run", "params.run=..."),
    ("params: {a: ['x ${ y']}", "params.a.0", "\\${"),
    ("params: {a: '${HOME}'}", "params.a", "\\${HOME}"),
    ("params: {a: '${nothing:3}'}", "params.a", "nothing"),
    ("inputs: ['${run_dir}/x']", "inputs.0", "run_dir"),
]


@pytest.mark.parametrize(("text", "key", "said"), INTERPOLATIONS, ids=[text for text, *_ in INTERPOLATIONS])
def test_an_interpolation_that_has_no_value_is_refused(tmp_path: Path, text: str, key: str, said: str) -> None:
    error = _refusal(tmp_path, text)
    assert (error.key, error.line) == (key, 3 if not key.startswith("inputs") else error.line)
    assert said in str(error)


# Demo, clusters, sections


DEMO = "params:\n  steps: 1000\n  data: big\ndemo:\n  unless_env: " + VARIABLE + "\n  params: {steps: 10}\n"


@pytest.mark.parametrize(("value", "steps"), [(None, 10), ("", 10), ("/data", 1000)])
def test_the_demo_is_merged_while_its_variable_is_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, steps: int
) -> None:
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    loaded = _load(tmp_path, DEMO)
    assert loaded.config.params == {"steps": steps, "data": "big"}
    assert len(loaded.notes) == (steps == 10) and all(VARIABLE in note for note in loaded.notes)
    assert _load(tmp_path, DEMO, "params.steps=5").config.params["steps"] == 5


def test_an_error_in_the_demo_has_the_line_of_the_demo(tmp_path: Path) -> None:
    error = _refusal(tmp_path, DEMO + "  seed: x\n")
    assert (error.key, error.line) == ("seed", 9)


def test_clusters_of_the_user_are_known_to_each_experiment(tmp_path: Path, user_file: Path) -> None:
    user_file.write_text("clusters:\n  h100: {partition: h100}\n  slurm: {qos: low, account: a}\n")
    text = "clusters: {slurm: {partition: big, exclusive: false, qos: null, nodes: 2, min-nodes: 1}}\n"
    clusters = _load(tmp_path, text).config.clusters
    ours = {"partition": "big", "exclusive": False, "nodes": 2, "min-nodes": 1}
    assert clusters == {"h100": {"partition": "h100"}, "slurm": ours}
    typed = _load(tmp_path, text, "resources.nodes=3", "resources={min_nodes: 2}", "clusters.slurm.qos=x").config
    assert typed.clusters["slurm"] == {"partition": "big", "exclusive": False, "qos": "x"}


def test_a_mistake_in_the_users_file_is_named_there(tmp_path: Path, user_file: Path) -> None:
    user_file.write_text("clusters:\n  h100:\n    mem: ${params.n}\n")
    error = _refusal(tmp_path, "")
    assert (error.file, error.line, error.key) == (user_file, 3, "clusters.h100.mem")
    user_file.write_text("cluster: {}\n")
    assert _refusal(tmp_path, "").file == user_file


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("name: again", "", 3),
        ("params:\n  a: 1\n  a: 2", "", 5),
        ("params: {a: [1}", "", 3),
        ("params: {a: !mine 1}", "", 3),
        ("command: [python, x.py]", "command", 3),
        ("command: python x.py", "command", 3),
        ("params:\n  lr: 1\n  resources:\n    nodes: 2", "params.resources", 5),
        ("demo: 5", "demo", 3),
        ("demo: {params: {}}", "demo", 3),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_line(tmp_path: Path, text: str, key: str, line: int) -> None:
    error = _refusal(tmp_path, text)
    assert (error.file, error.line, error.key) == (tmp_path / "toy.yaml", line, key)


def test_a_key_of_another_jobkit_is_refused_of_a_person_and_ignored_in_a_runs_own_config(tmp_path: Path) -> None:
    text = "resources: {nodes: 2, moon: full}\nverify_every: 10\nparams: {moon: 1}\n"
    assert _refusal(tmp_path, text).key in ("resources.moon", "verify_every")
    file = tmp_path / "toy.yaml"
    for config in (read_resolved(file), load(file, is_own=True).config):
        assert (config.resources.nodes, config.params) == (2, {"moon": 1})


def test_a_disk_that_is_away_is_no_mistake_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _load(tmp_path, "")
    for number, error in ((errno.ESTALE, OSError), (errno.EACCES, InputError)):

        def read_text(file: Path, encoding: str, number: int = number) -> str:
            raise OSError(number, os.strerror(number), str(file))

        monkeypatch.setattr(Path, "read_text", read_text)
        with pytest.raises(error):
            read_resolved(tmp_path / "toy.yaml")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_bytes(b"name: toy\ntask: \xff\n")
    with pytest.raises(InputError) as refused:
        load(tmp_path / "toy.yaml")
    assert refused.value.line == 2
    for name, hint in (("toy", "'toy.yaml'"), ("tyo.yaml", "'toy.yaml'"), ("params.lr=3", "YAML")):
        with pytest.raises(InputError) as refused:
            load(tmp_path / name)
        assert hint in refused.value.hint
    (tmp_path / "toy.yaml").write_text("")
    with pytest.raises(InputError):
        load(tmp_path / "toy.yaml")


def test_a_later_check_gets_the_place_of_its_key(tmp_path: Path) -> None:
    loaded = _load(tmp_path, "resources:\n  nodes: 2\n", "comm.hook=none")
    places = {
        key: loaded.locate(InputError(key=key)) for key in ("resources.nodes", "resources.time", "comm.hook", "x")
    }
    assert {key: (error.file, error.line) for key, error in places.items()} == {
        "resources.nodes": (tmp_path / "toy.yaml", 4),
        "resources.time": (tmp_path / "toy.yaml", 3),
        "comm.hook": ("command line", None),
        "x": (tmp_path / "toy.yaml", None),
    }


RECIPES = [file for root in Path(__file__).parents[3:5] for file in sorted((root / "experiments").glob("*.yaml"))]


@pytest.mark.parametrize("file", RECIPES, ids=[file.name for file in RECIPES])
@pytest.mark.parametrize("demo", [True, False])
def test_the_recipes_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path, demo: bool) -> None:
    for name in ("COGVIDEO_DATA", "COGVIDEO_WEIGHTS", "IMAGENET_DIR", "MINIMIND_DATA", "MINIMIND_TOKENIZER"):
        monkeypatch.delenv(name, raising=False)
        if not demo or name == "COGVIDEO_WEIGHTS" or "finetune" in file.name:
            monkeypatch.setenv(name, "/data")
    values = {key: value for key, value in read_yaml(file)[0].items() if key in (*SECTIONS, "demo", "sweep")}
    (tmp_path / file.name).write_text(dump(values))
    overrides = ["params.run=runs/x"] if "run" in values["params"] else []
    loaded = load(tmp_path / file.name, overrides)
    assert bool(loaded.notes) == (demo and "demo" in values)
    assert _reread(tmp_path, loaded) == loaded.config
