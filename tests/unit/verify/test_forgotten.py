"""What verify calls forgotten, from the traces of runs, as tables; and what it says to type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobkit.run.records import About, Seen
from jobkit.verify.compare import Difference, TraceLine
from jobkit.verify.forgotten import Forgotten, as_json, forgotten, hint_lines, late_lines, lines_of, too_late, typed
from jobkit.verify.source import assigned, mentioned, uses

CODE = """
class Trainer:
    def __init__(self):
        self.center = None

    def fit(self, ctx):
        best, count, worst = 0, 0, 0
        ctx.track(model=self.model)
        for step in ctx.steps(3):
            self.center = 0.9 * self.center
            count += 1
            best = max(best, step)
            worst = max(worst, step)
            if count > 9:
                break
            ctx.log({"train/loss": best * 2})
        return {"worst": worst}
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(CODE)
    return tmp_path / "train.py"


def about(name: str = "ema", **fields: Any) -> About:
    values = {
        "type": "Ema",
        "way": "track",
        "owner": name,
        "name": name,
        "file": "train.py",
        "scope": "",
        "place": "in main()",
    }
    return About(**{**values, **fields})


def seen(digest: str, kind: Any = "state", **fields: Any) -> Seen:
    return Seen(**{"kind": kind, "digest": digest, "is_same": True, "is_scalar": False, "size": 4, **fields})


def run(*attempts: Mapping[int, Seen | None], ways: Mapping[str, About] | None = None) -> dict[int, list[TraceLine]]:
    """Return the trace of a run with one thing, `ema`; each attempt by its boundaries, the first one restored."""
    places = []
    for attempt, boundaries in enumerate(attempts, start=1):
        for number, (step, thing) in enumerate(boundaries.items()):
            event: Any = "boundary" if number else "restored"
            things = {"ema": thing} if thing is not None else {}
            one = {"ema": about()} if ways is None else ways
            places.append(TraceLine(rank=0, attempt=attempt, step=step, event=event, seen=things, about=one))
    return {0: places}


STRAIGHT = run({step: seen(f"d{step}") for step in range(5)})


def interrupted(last: str, **fields: Any) -> dict[int, list[TraceLine]]:
    before = {step: seen(f"d{step}", **fields) for step in range(3)}
    return run(before, {2: seen("d0", **fields), 3: seen("?", **fields), 4: seen(last, **fields)})


def test_what_changed_and_differs_at_the_last_boundary_is_a_finding() -> None:
    (item,) = forgotten(STRAIGHT, interrupted("?"), STRAIGHT)
    assert (item.expression, item.is_finding, item.step, item.first, item.second) == ("ema", True, 4, "d4", "?")


@pytest.mark.parametrize(
    ("second", "again"),
    [
        (interrupted("d4"), STRAIGHT),  # it is made anew from what is restored
        (interrupted("?"), run({step: seen(f"e{step}") for step in range(5)})),  # two straight runs differ: a time
        (run({0: seen("d0"), 1: seen("?"), 2: seen("d2")}, {2: seen("d0"), 4: seen("?")}), STRAIGHT),  # before it
    ],
)
def test_what_is_the_programs_own_or_comes_back_is_none(second: Any, again: Any) -> None:
    assert forgotten(STRAIGHT, second, again) == []


def test_the_order_of_a_set_within_a_module_does_not_excuse_the_module() -> None:
    def with_set(trace: dict[int, list[TraceLine]], order: str) -> dict[int, list[TraceLine]]:
        names = {"ema.names[0]": seen(order, "value")}
        ways = {"ema": about(), "ema.names[0]": about("names")}
        return {0: [replace(place, seen={**place.seen, **names}, about=ways) for place in trace[0]]}

    (item,) = forgotten(with_set(STRAIGHT, "a"), with_set(interrupted("?"), "b"), with_set(STRAIGHT, "b"))
    assert item.is_finding


def test_what_never_changes_is_none() -> None:
    constant = run({step: seen("d") for step in range(5)})
    other = run({step: seen("d") for step in range(3)}, {step: seen("?") for step in range(2, 5)})
    assert forgotten(constant, other, constant) == [], "a first value may depend on the process"


@pytest.mark.parametrize(
    ("fields", "is_finding"),
    [
        ({"kind": "tensor"}, True),
        ({"kind": "generator"}, True),
        ({"kind": "tensor", "is_same": False}, True),  # shadow[name] = ...
        ({"kind": "tensor", "is_same": False, "is_scalar": True}, False),  # the mean of a bar
        ({"kind": "tensor", "is_scalar": True}, True),
        ({"kind": "value"}, False),
    ],
)
def test_plain_values_and_numbers_that_are_made_anew_are_hints(fields: Any, is_finding: bool) -> None:
    straight = run({step: seen(f"d{step}", **fields) for step in range(5)})
    (item,) = forgotten(straight, interrupted("?", **fields), straight)
    assert item.is_finding is is_finding


def test_a_cache_that_has_grown_otherwise_is_a_hint() -> None:
    straight = run({step: seen(f"d{step}", kind="tensor") for step in range(5)})
    (item,) = forgotten(straight, interrupted("?", kind="tensor", size=5), straight)
    assert not item.is_finding


def test_what_was_equal_again_after_a_restart_is_made_anew_and_a_hint() -> None:
    second = run(
        {0: seen("d0"), 1: seen("d1")},
        {1: seen("d0"), 2: seen("?"), 3: seen("d3")},
        {3: seen("d0"), 4: seen("?")},
    )
    (item,) = forgotten(STRAIGHT, second, STRAIGHT)
    assert not item.is_finding


def test_what_a_condition_reads_is_not_made_anew(code: Path) -> None:
    ways = {"ema": about("count", file=str(code), scope="fit")}
    straight = run({step: seen(f"d{step}") for step in range(5)}, ways=ways)
    second = run(
        {0: seen("d0"), 1: seen("d1")}, {1: seen("d0"), 2: seen("?"), 3: seen("d3")}, {3: seen("d0"), 4: seen("?")}
    )
    (item,) = forgotten(straight, second, straight)
    assert item.is_finding


def test_what_changed_after_the_last_interruption_only_was_not_exercised() -> None:
    late = run({0: seen("d0"), 1: seen("d0"), 2: seen("d0"), 3: seen("d1"), 4: seen("d2")})
    second = run({0: seen("d0"), 1: seen("d0"), 2: seen("d0")}, {2: seen("d0"), 3: seen("d1"), 4: seen("d2")})
    assert forgotten(late, second) == []
    assert [item.expression for item in too_late(late, second)] == ["ema"]
    assert "ema (Ema, train.py) changed after" in late_lines(too_late(late, second), Path())[0]
    assert too_late(STRAIGHT, interrupted("d4")) == []


def test_a_best_score_that_was_beaten_again_is_a_hint() -> None:
    straight = run({step: seen("0.5", "value") for step in range(5)} | {0: seen("inf", "value")})
    second = run({0: seen("inf", "value")}, {1: seen("inf", "value"), 2: seen("inf", "value"), 3: seen("0.5", "value")})
    (item,) = forgotten(straight, second)
    assert (item.is_finding, item.step, item.first, item.second) == (False, 2, "0.5", "inf")


def test_before_a_difference_the_boundary_in_the_same_attempt_counts() -> None:
    trace = interrupted("?")
    difference = Difference(
        kind="values", name="loss", first=1, second=2, line=trace[0][4], reference=STRAIGHT[0][3]
    )  # fmt: skip
    (item,) = forgotten(STRAIGHT, trace, at=difference)
    assert (item.step, item.first, item.second) == (2, "d2", "d0")


def thing(
    way: Any, owner: str, names: list[str], *, is_finding: bool = True, holder: str = "", keeper: str = ""
) -> Forgotten:
    return Forgotten(
        expression=owner,
        about=about(way=way, owner=owner, name=names[0], holder=holder, keeper=keeper),
        names=names,
        is_finding=is_finding,
        rank=0,
        step=1,
        first="1",
        second="2",
    )


TYPED = {
    "ctx.track(ema=ema) before": thing("track", "ema", ["ema"]),
    "ctx.track(swa_model=self.swa_model) before": thing("track", "self.swa_model", ["swa_model"]),
    "ctx.track(trainer=jobkit.attributes(self, \"center\", \"n\"))": thing(
        "attributes", "self", ["center", "n"], holder="Trainer"
    ),
    "ctx.track(model_centers=jobkit.attributes(model, \"centers\"))": thing("attributes", "model", ["centers"]),
    "ctx.track(loss=jobkit.attributes(meters['loss'], \"sum\"))": thing("attributes", "meters['loss']", ["sum"]),
    "ctx.track(rng=jobkit.attributes(env.rng.bit_generator, \"state\"))": thing("bit_generator", "env.rng", ["rng"]),
    "state = ctx.values(queue=queue) before the loop, in main()": thing("values", "queue", ["queue"]),
    "state = ctx.values(best=best) before the loop, in main(); then state.best in place of best": thing(
        "values", "best", ["best"], is_finding=False
    ),
    "loader = ctx.loader(dataset, global_batch_size=...) in place of self.dl": thing("loader", "self.dl", ["dl"]),
    "keep shadow in the state_dict of ema, and take it": thing("track", "ema.shadow", ["shadow"], keeper="ema"),
    "whose state_dict has the state of dice": thing("own_state", "dice", ["dice"]),
}  # fmt: skip


@pytest.mark.parametrize("text", TYPED)
def test_what_to_type(text: str) -> None:
    assert text in typed(TYPED[text])
    assert text in "\n".join(lines_of([TYPED[text]], Path()))
    assert as_json(TYPED[text], Path())["to_type"] == typed(TYPED[text])


def test_all_plain_values_are_in_one_call_and_in_the_one_that_is_there() -> None:
    items = [thing("values", name, [name], is_finding=False) for name in ("best", "bad")]
    call = "=> state = ctx.values(best=best, bad=bad) before the loop, in main(); then state.best in place of best, "
    assert lines_of(items, Path())[-1].startswith(f"{call}state.bad in place of bad; ")
    items = [replace(item, taken=["values"]) for item in items]
    assert "=> add best=best, bad=bad to ctx.values, and use state.best in place of best" in lines_of(items, Path())[-1]


@pytest.mark.parametrize(
    ("others", "given"),
    [
        ([seen("d4"), seen("d4")], "ctx.track(ema=ema) "),
        ([seen("e4"), seen("f4")], 'ctx.track(per_rank={"ema": ema}) '),
        ([None, seen("None", "value")], 'ctx.track(per_rank={"ema": ema if ctx.rank == 0 else torch.nn.Identity()}) '),
    ],
)
def test_the_state_of_each_rank_and_of_one_rank_is_typed_so(others: Sequence[Seen | None], given: str) -> None:
    straight, second = dict(STRAIGHT), dict(interrupted("?"))
    for rank, other in enumerate(others, start=1):
        straight[rank] = second[rank] = run({0: other, 4: other})[0]
    (item,) = forgotten(straight, second)
    assert typed(item).startswith(given)


def test_hints_share_a_line() -> None:
    items = [thing("values", f"count_{number}", ["n"], is_finding=False) for number in range(6)]
    (line,) = hint_lines(items, Path())
    assert "count_0" in line
    assert "2 more" in line
    assert hint_lines([], Path()) == []


def test_the_place_in_the_code_is_where_a_name_is_assigned(code: Path) -> None:
    assert assigned(code, "center", "", code.parent) == "train.py:4"
    assert assigned(code, "best", "fit", code.parent) == "train.py:7"
    assert assigned(code, "elsewhere", "fit", code.parent) == "train.py"
    assert mentioned([code], "model", code.parent) == "train.py:8"
    assert mentioned([code], "train/loss", code.parent) == "train.py:16"


def test_what_only_changes_itself_is_not_read(code: Path) -> None:
    assert uses(code, "count", "fit") == {"condition"}
    assert uses(code, "best", "fit") == {"value"}
    assert uses(code, "worst", "fit") == {"result"}
    assert uses(code, "center", "") == set()


BUFFER = """
class Buffer:
    def __init__(self, size):
        self.items, self.place, self.is_full, self.size, self.rate = [0] * size, 0, False, size, 2

    def add(self, item):
        rate = self.rate
        self.items[self.place % rate] = item
        self.sums[item].mul_(self.rate)
        self.place += 1
        self.is_full |= self.place == self.size
"""


def test_attributes_that_methods_change_later_are_in_the_line_too(tmp_path: Path) -> None:
    file = tmp_path / "buffer.py"
    file.write_text(BUFFER)
    fields = {"way": "attributes", "owner": "buffer", "file": str(file), "holder": "Buffer"}
    ways = {f"buffer.{name}": about(name, **fields) for name in ("items", "place", "is_full", "size", "rate")}

    def places(attempt: int, *values: tuple[int, str]) -> list[TraceLine]:
        fixed = {
            "buffer.items": seen("0", "tensor"),
            "buffer.is_full": seen("False", "value"),
            "buffer.size": seen("9"),
        }
        return [
            TraceLine(
                rank=0,
                attempt=attempt,
                step=step,
                event="boundary" if number else "restored",
                seen={"buffer.place": seen(value, "value"), **fixed},
                about=ways,
            )
            for number, (step, value) in enumerate(values)
        ]

    straight = {0: places(1, (0, "0"), (1, "1"), (2, "2"))}
    second = {0: [*places(1, (0, "0"), (1, "1")), *places(2, (1, "0"), (2, "1"))]}
    (item,) = forgotten(straight, second)
    assert item.names == ["place", "items", "is_full"]


def test_a_tensor_that_is_not_there_before_the_loop_and_made_anew_is_no_finding() -> None:
    fields = {"kind": "tensor", "is_same": False}
    straight = run({0: None, **{step: seen(f"d{step}", **fields) for step in range(1, 5)}})
    second = run({0: None, 1: seen("d1", **fields)}, {1: None, 2: seen("?", **fields), 3: seen("?", **fields)})
    (item,) = forgotten(straight, second)
    assert not item.is_finding


@pytest.mark.parametrize(("kind", "first"), [("values", "best"), ("end", "count"), ("result", "worst")])
def test_the_name_of_a_difference_is_what_the_code_reads_so(code: Path, kind: Any, first: str) -> None:
    names = ("count", "worst", "best")
    ways = {name: about(name, way="values", file=str(code), scope="fit") for name in names}

    def trace(second: str) -> dict[int, list[TraceLine]]:
        values = {name: seen(second, "value") for name in names}
        return {
            0: [TraceLine(rank=0, attempt=2, step=step, event="boundary", seen=values, about=ways) for step in (1, 2)]
        }

    straight = {0: [TraceLine(rank=0, attempt=1, step=0, event="restored", seen=trace("0")[0][0].seen), *trace("1")[0]]}
    other = trace("2")
    difference = Difference(kind=kind, name="x", first=1, second=2, line=other[0][1], reference=straight[0][2])
    assert forgotten(straight, other, at=difference)[0].expression == first
