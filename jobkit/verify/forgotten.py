"""What a program has and tracks nowhere, judged from the traces of its runs.

    straight, interrupted (and straight again) --forgotten--> Forgotten each: findings and hints

A finding is an object with a state, a generator or a tensor that the training changed, that is the same in two straight
runs and another after the interruptions: it is lost, although perhaps nothing of what is compared depends on it, as on
an average of the weights. A hint is a plain value: most are counters and bars. Where something that is compared
differs, what differs before it is its name. runs.py calls it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from pathlib import Path
from typing import Any

from jobkit.run.records import About, Seen
from jobkit.verify.compare import ORDER, Difference, Trace, TraceLine, pairs
from jobkit.verify.source import Use, assigned, changed_by_methods, is_of_a_for, uses

MOST_NAMED = 4
"""Hints in an answer."""

NO_NAMES = ("self", "cls", "per_rank")
"""Words that ctx.track takes for something else, or for nothing."""

UNSET = Seen(kind="value", digest="not set", is_same=False, is_scalar=True, size=0)

OF_CONTAINER, DIGEST = re.compile(r"\w+ of \d+"), re.compile(r"[0-9a-f]{32}")
"""Texts of things that were seen."""

PAGE = "docs/verify.md#what-to-type"


@dataclass(kw_only=True)
class Forgotten:
    """One thing to declare, with all that differs within it."""

    expression: str
    """The first that differs, as `ema.shadow['0.weight']`."""
    about: About
    names: list[str] = field(default_factory=list)
    """The attributes that differ, for jobkit.attributes."""
    members: Sequence[str] = ()
    """All attributes of the owner that the training changes."""
    taken: Collection[str] = ()
    """Names that are tracked already."""
    per_rank: bool | None = False
    """True if each rank has one of its own, None if some have none."""
    is_finding: bool = False
    is_same: bool = True
    """True if it is one object at two boundaries."""
    is_unlikely: bool = False
    """True if each step overwrites it, or if its owner has times."""
    rank: int
    step: int
    """Steps done where it differs."""
    first: str
    second: str
    """Digests, or texts of plain values."""


def forgotten(first: Trace, second: Trace, again: Trace | None = None, at: Difference | None = None) -> list[Forgotten]:
    """Return what differs after a restart, findings first; with `at`, what differs just before that difference.

    A finding differs at the last boundary of both runs. What differs before the first interruption, or in `again`,
    another straight run, is the program's own.
    """
    groups: dict[tuple[str, str], list[Forgotten]] = {}
    for rank in second:
        lines = first.get(rank, ())
        own_changes = _changing(lines, [line for line in second[rank] if line.attempt == 1])
        own_changes |= _changing(lines, again.get(rank, ())) if again is not None else set()
        both = _after_restarts(lines, second[rank]) if at is None else _before(lines, second[rank], at)
        for item in _of_rank(lines, both, own_changes, at):
            groups.setdefault((item.about.way, item.about.owner), []).append(item)
    items = [_one_of(group) for group in groups.values()]
    items = [replace(item, per_rank=_of_ranks(first, item.expression)) for item in items]
    return sorted(items, key=lambda item: (not item.is_finding, *_unlikely(item, at)))


def _of_ranks(first: Trace, name: str) -> bool | None:
    """Return whether each rank has a thing of its own; None where some ranks have none."""
    last = [next((line for line in reversed(lines) if line.seen), None) for lines in first.values()]
    things = [line.seen.get(name) if line is not None else None for line in last]
    digests = {thing.digest if thing is not None else None for thing in things}
    if None in digests or len({thing.kind for thing in things if thing is not None}) > 1:
        return None
    return len(digests) > 1


def _of_rank(
    lines: Sequence[TraceLine],
    both: Sequence[tuple[TraceLine, TraceLine]],
    own_changes: Collection[str],
    at: Difference | None,
) -> Iterator[Forgotten]:
    """Yield each name that differs at boundaries of a straight and an interrupted run, the last boundary first."""
    about = {name: described for line in lines for name, described in line.about.items()}
    with_times = {about[name].owner for name in own_changes if name in about}
    members = _members(lines, own_changes, about)
    recovered, named = _recovered(both) if at is None else set[str](), set[str]()
    for number, (straight, interrupted) in enumerate(reversed(both)):
        for name in _lost(lines, straight, interrupted):
            within = straight.seen[name].kind == "value" and any(
                other.startswith((f"{name}[", f"{name}.")) for other in own_changes
            )
            if name in named or name in own_changes or within:
                continue
            named.add(name)
            mine, theirs, is_scratch = straight.seen[name], interrupted.seen[name], _is_back(name, at, interrupted.rank)
            if number and mine.kind != "value":
                continue  # it was equal again: a best score may be beaten again, a tensor is made anew
            if is_scratch and not about[name].holder and is_of_a_for(*_variable(about[name])):
                continue
            is_scratch |= not mine.is_same and name not in lines[0].seen  # it cannot be declared before the loop
            is_finding = _is_finding(mine, theirs) and (mine.is_same or not is_scratch)
            yield Forgotten(
                expression=name,
                about=about[name],
                names=[about[name].name],
                members=members.get(about[name].owner, []),
                taken={path.partition(".")[0] for path in straight.state},
                is_same=mine.is_same,
                is_finding=is_finding and number == 0 and not (name in recovered and not _decides(about[name])),
                is_unlikely=is_scratch or about[name].owner in with_times,
                rank=interrupted.rank,
                step=interrupted.step,
                first=mine.digest,
                second=theirs.digest,
            )


def too_late(first: Trace, second: Trace) -> list[Forgotten]:
    """Return what would be findings on rank 0, but changed after the last interruption only: nothing could be lost."""
    lines = [line for line in first[0] if line.seen]
    begins = max(line.step for line in second[0] if line.event == "restored")
    about = {name: described for line in lines for name, described in line.about.items()}
    changed = []
    for name, item in lines[-1].seen.items() if lines else ():
        before = {line.seen[name].digest for line in lines if line.step <= begins and name in line.seen}
        if len(before) == 1 and item.digest not in before and item.is_same and _is_finding(item, item):
            changed.append(Forgotten(expression=name, about=about[name], rank=0, step=begins, first="", second=""))
    return changed


def _one_of(group: Sequence[Forgotten]) -> Forgotten:
    """Return one thing to declare for all that differ of one owner: of containers their content, not their length."""
    likely = [item for item in group if not item.is_unlikely] or group
    head = next((item for item in likely if item.is_finding), likely[0])
    named = [item for item in likely if item is head or item.is_finding or not OF_CONTAINER.fullmatch(item.first)]
    members = head.members if head.about.way == "attributes" else []
    return replace(head, names=list(dict.fromkeys([*(item.about.name for item in named), *members])))


def _members(
    lines: Sequence[TraceLine], own_changes: Collection[str], about: Mapping[str, About]
) -> dict[str, list[str]]:
    """Return the attributes of each owner that its methods change, perhaps later than in these steps: those that are
    there when the loop begins, for they are declared before it."""
    members: dict[str, list[str]] = {}
    for name, seen in lines[0].seen.items() if lines else ():
        item = about[name]
        is_plain = seen.kind in ("value", "tensor") and not OF_CONTAINER.fullmatch(seen.digest)
        is_own = name == f"{item.owner}.{item.name}" and name not in own_changes
        if is_plain and is_own and item.name in changed_by_methods(Path(item.file), item.holder):
            members.setdefault(item.owner, []).append(item.name)
    return members


def _is_back(name: str, at: Difference | None, rank: int) -> bool:
    """Return whether a thing is the same in both runs where the difference shows: then each step overwrites it."""
    if at is None or at.line.rank != rank:
        return False
    straight, interrupted = at.reference.seen.get(name), at.line.seen.get(name)
    return straight is not None and interrupted is not None and straight.digest == interrupted.digest


def _unlikely(item: Forgotten, at: Difference | None) -> tuple[bool, ...]:
    """Return an order of what may be the cause of a difference: it itself; what the code reads as the difference is
    made; what it reads."""
    found_uses = set[Use]().union(*(uses(*_variable(replace(item.about, name=name))) for name in item.names))
    if at is None:  # a plain value that decides or ends something comes before one that is logged
        return item.is_unlikely, not found_uses & {"condition", "result"}, not found_uses
    is_it = (item.first, item.second) == (str(at.first), str(at.second))
    use_of_end: dict[str, Use] = {"end": "condition", "result": "result"}
    return not is_it, use_of_end.get(at.kind, "value") not in found_uses, item.is_unlikely, not found_uses


def _changing(first: Sequence[TraceLine], second: Sequence[TraceLine]) -> set[str]:
    """Return the names of what differs between two runs that nothing interrupted."""
    return {
        name
        for line, other in pairs(first, second)
        for name in line.seen.keys() & other.seen.keys()
        if line.seen[name].digest != other.seen[name].digest
    }


def _after_restarts(first: Sequence[TraceLine], second: Sequence[TraceLine]) -> list[tuple[TraceLine, TraceLine]]:
    """Return the boundaries that an interrupted run has after its restarts, with those of the straight run."""
    return [pair for pair in pairs(first, second) if pair[1].attempt > 1 and pair[1].event == "boundary"]


def _before(
    first: Sequence[TraceLine], second: Sequence[TraceLine], at: Difference
) -> list[tuple[TraceLine, TraceLine]]:
    """Return a rank's boundary before a difference, in the same attempt: what differs there may be its cause."""
    earlier = [line for line in second if line.attempt == at.line.attempt and _comes_before(line, at.line)]
    both = [pair for pair in pairs(first, earlier) if pair[1].seen][-1:]
    if at.kind != "end":
        return both
    # a count that the loop itself makes is not there yet
    unset = [{name: UNSET for name, seen in straight.seen.items() if seen.kind == "value"} for straight, _ in both]
    return [
        (straight, replace(interrupted, seen={**more, **interrupted.seen}))
        for (straight, interrupted), more in zip(both, unset, strict=True)
    ]


def _comes_before(line: TraceLine, other: TraceLine) -> bool:
    return line.step < other.step or (line.step == other.step and ORDER[line.event] < ORDER[other.event])


def _recovered(both: Sequence[tuple[TraceLine, TraceLine]]) -> set[str]:
    """Return the names of what differed after a restart and was then equal again: it is made anew from other things, as
    the sums of an evaluation."""
    recovered, differed = set(), set[tuple[int, str]]()
    for line, other in both:
        for name in line.seen.keys() & other.seen.keys():
            if line.seen[name].digest != other.seen[name].digest:
                differed.add((other.attempt, name))
            elif (other.attempt, name) in differed:
                recovered.add(name)
    return recovered


def _lost(lines: Sequence[TraceLine], ours: TraceLine, theirs: TraceLine) -> Iterator[str]:
    """Yield the names of what the training has changed, and what differs between two runs at a boundary."""
    for name in ours.seen:
        if (
            name in theirs.seen
            and ours.seen[name].digest != theirs.seen[name].digest
            and _has_changed(lines, ours, name)
        ):
            yield name


def _has_changed(lines: Sequence[TraceLine], until: TraceLine, name: str) -> bool:
    before = [line.seen[name] for line in lines if line.step < until.step and name in line.seen]
    return any(seen.digest != until.seen[name].digest for seen in before) or until.event == "restored"


def _is_finding(ours: Seen, theirs: Seen) -> bool:
    """Return whether it is more than a plain value, and lives from one boundary to the next."""
    if ours.kind != theirs.kind or (ours.kind == "tensor" and ours.size != theirs.size):  # a cache of what came so far
        return False
    return ours.kind != "value" and (ours.is_same or not ours.is_scalar)


def lines_of(items: Sequence[Forgotten], folder: Path) -> list[str]:
    """Return findings, or the likely names of a difference, in words, and what to type.

    All plain values share a line: ctx.values is called once.
    """
    lines = []
    for item in items:
        lines += [_what(item, _place(item, folder))]
        lines += [f"=> {typed(item)}; {PAGE}"] if item.about.way != "values" else []
    values = [item for item in items if item.about.way == "values"]
    return [*lines, f"=> {_of_values(values)}; {PAGE}"] if values else lines


def _what(item: Forgotten, place: str) -> str:
    if item.is_finding:
        steps, on = f"{item.step} step{'s' if item.step != 1 else ''}", f" on rank {item.rank}" if item.per_rank else ""
        return (
            f"forgotten: {item.expression} ({item.about.type}, {place}) changed in the training, no checkpoint holds "
            f"it, and it differs{on} after {steps}"
        )
    both = f"is {item.first} in the straight run, {item.second} in the interrupted one"
    is_shown = not any(DIGEST.fullmatch(text) for text in (item.first, item.second))
    return f"tracked nowhere: {item.expression} ({place}) {both if is_shown else 'differs between the runs'}"


def _of_values(items: Sequence[Forgotten]) -> str:
    """Return what to type for plain values, tensors and containers."""
    words = {_name(item): item.about.owner for item in items}
    arguments = ", ".join(f"{name}={owner}" for name, owner in words.items())
    # an object that a restore fills stays in the hands of the loop
    anew = [item for item in items if not (item.is_finding and (item.is_same or item.expression != item.about.owner))]
    used = ", ".join(f"state.{_name(item)} in place of {item.about.owner}" for item in anew)
    if "values" in items[0].taken:
        return f"add {arguments} to ctx.values{f', and use {used}' if used else ''}"
    return f"state = ctx.values({arguments}) before the loop, {items[0].about.place}{f'; then {used}' if used else ''}"


def hint_lines(items: Sequence[Forgotten], folder: Path) -> list[str]:
    """Return a line about plain values that differ, though nothing of what is compared depends on them."""
    if not items:
        return []
    names = [f"{item.expression} ({_place(item, folder)})" for item in items[:MOST_NAMED]]
    more = f" and {len(items) - MOST_NAMED} more" if len(items) > MOST_NAMED else ""
    return [f"a restart sets back, and nothing that is compared depends on it: {', '.join(names)}{more}; {PAGE}"]


def late_lines(items: Sequence[Forgotten], folder: Path) -> list[str]:
    """Return a line about what changed after the last interruption only."""
    names = [f"{item.expression} ({item.about.type}, {_place(item, folder)})" for item in items[:MOST_NAMED]]
    return [f"not exercised: {', '.join(names)} changed after the last interruption only"] if names else []


def as_json(item: Forgotten, folder: Path) -> dict[str, Any]:
    """Return what a program may read of it."""
    words = {"type": item.about.type, "place": _place(item, folder), "to_type": typed(item), "page": PAGE}
    names = ("expression", "is_finding", "rank", "step", "first", "second")
    return {**{name: getattr(item, name) for name in names}, **words}


def _place(item: Forgotten, folder: Path) -> str:
    return assigned(*_variable(item.about), folder)


def _decides(about: About) -> bool:
    """Return whether a condition reads it, as a best score: then what comes depends on it, and it is not made anew."""
    return "condition" in uses(*_variable(about))


def _variable(about: About) -> tuple[Path, str, str]:
    """Return a file, a name, and the function that assigns it; no function for an attribute, which any may assign."""
    return Path(about.file), about.name, "" if about.holder else about.scope


def _name(item: Forgotten) -> str:
    """Return a name under which a thing can be tracked."""
    parts = re.findall(r"[A-Za-z_]\w*", item.about.owner)
    parts = [word for word in parts if word not in NO_NAMES and not iskeyword(word)]
    name: str = (parts or [item.about.holder.lower() or "state"])[-1]
    if item.about.way == "values" or name not in {*item.taken, "model"}:  # final/ has the weights of the entry `model`
        return name
    return f"{name}_{item.about.name}" if item.about.name != name else f"{name}_state"


def typed(item: Forgotten) -> str:
    """Return what to type."""
    owner, place, name = item.about.owner, f"before the loop, {item.about.place}", _name(item)
    if item.about.keeper:
        return f"keep {', '.join(item.names)} in the state_dict of {item.about.keeper}, and take it in load_state_dict"
    if item.about.way == "values":
        return _of_values([item])
    names = ", ".join(f'"{name}"' for name in item.names)
    values: dict[str, str] = {
        "track": owner,
        "attributes": f"jobkit.attributes({owner}, {names})",
        "bit_generator": f'jobkit.attributes({owner}.bit_generator, "state")',
        "own_state": "...",
    }
    if item.about.way == "loader":
        return f"loader = ctx.loader(dataset, global_batch_size=...) in place of {owner}, and ctx.track(loader=loader)"
    value = values[item.about.way]
    if item.per_rank is None:
        value = f"{value} if ctx.rank == {item.rank} else torch.nn.Identity()"
    argument = f"{name}={value}" if item.per_rank is False else f'per_rank={{"{name}": {value}}}'
    more = f": an object whose state_dict has the state of {owner}" if item.about.way == "own_state" else ""
    return f"ctx.track({argument}) {place}{more}"
