"""docs/coming-from.md: what its tables say that jobkit has is there, and is taken."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml
from harness.documents import ROOT

from jobkit.run.experiment import load
from jobkit.train import schedule
from jobkit.worker.context import Context

PAGE = ROOT / "docs" / "coming-from.md"
ROWS = re.findall(r"^\| (.+?) \| (.+?) \|(?: (.*?))? ?\|$", PAGE.read_text(), re.MULTILINE)
TABLE = [(theirs, ours) for theirs, ours, _ in ROWS if ours != "jobkit"]
PLAIN = ("always", "not offered", "follows", "in the model", "in `tensor_plan()`")
"""What stands there instead of a key or a call."""
CALL = re.compile(r"(ctx|schedule)\.(\w+)\((.*)\)")


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_tables_have_what_was_asked_for() -> None:
    theirs = " ".join(name for name, _ in TABLE)
    for name in (
        *("zero_optimization.stage", "offload_optimizer", "offload_param", "train_micro_batch_size_per_gpu"),
        *("--tensor-model-parallel-size", "--sequence-parallel", "--micro-batch-size", "--use-distributed-optimizer"),
    ):
        assert name in theirs
    assert len(TABLE) > 80


@pytest.mark.parametrize(("theirs", "ours"), TABLE, ids=[theirs for theirs, _ in TABLE])
def test_every_key_and_call_exists(theirs: str, ours: str, tmp_path: Path) -> None:
    if ours in PLAIN:
        return
    assert spans(ours), ours
    for span in spans(ours):
        if called := CALL.fullmatch(span):
            owner, name, arguments = called.groups()
            function = getattr({"ctx": Context, "schedule": schedule}[owner], name)
            known = inspect.signature(function).parameters
            for argument in re.findall(r"(\w+)=", arguments):
                takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
                assert argument in known or takes_all, span
        else:
            check_is_taken(yaml.safe_load(span), tmp_path / "toy.yaml")


def check_is_taken(section: dict[str, object], file: Path) -> None:
    """The section is accepted as a part of a YAML."""
    assert isinstance(section, dict)
    file.write_text(yaml.safe_dump({"name": "toy", "task": "mytask:train", **section}))
    config = load(file).config
    for key in section:
        assert hasattr(config, key)


def test_what_is_said_beside_it_is_taken_too(tmp_path: Path) -> None:
    beside = [span for *_, said in ROWS for span in spans(said or "")]
    sections = [span for span in beside if re.match(r"(parallel|comm): \{", span)]
    assert len(sections) == 3
    for section in sections:
        check_is_taken(yaml.safe_load(section), tmp_path / "toy.yaml")


def test_the_layouts_of_the_tables_work() -> None:
    from jobkit.run.config import CommConfig, ParallelConfig, Resources
    from jobkit.run.layout import check
    from jobkit.run.resolve import in_full

    world = Resources(nodes=4, tasks_per_node=8)
    found = [yaml.safe_load(span) for row in ROWS for span in spans(row[1]) if span.startswith("parallel:")]
    assert len(found) > 10
    for section in found:
        check(ParallelConfig(**in_full(section)["parallel"]), CommConfig(), world)
