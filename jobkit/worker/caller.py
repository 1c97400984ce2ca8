"""The `for` statement of a script that goes over ctx.epochs or ctx.batches, as its source has it."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from jobkit.run.installed import is_installed

_COUNTING = {
    "enumerate": "write enumerate(ctx.batches(loader), ctx.batch)",
    "islice": "leave the loop by `if ctx.batch + 1 == n: break`",
    "zip": "give all loaders to ctx.batches(one, other), and leave the loop by `if ctx.batch + 1 == n: break`",
}
"""What counts from 0 again in the middle of an epoch, and what to write instead."""


def frame_of_script(frame: FrameType | None = None) -> FrameType:
    """The innermost frame that is a script's own: not jobkit's, nor that of a library around it, as a progress bar."""
    found = start = frame or sys._getframe(1)
    while is_of_library(found.f_globals.get("__name__"), found.f_code.co_filename):
        if found.f_back is None:
            return start
        found = found.f_back
    return found


def is_of_library(module: str | None, file: str) -> bool:
    """Whether code is jobkit's, or installed."""
    if module == "__main__":
        return False
    return (module or "").partition(".")[0] == "jobkit" or is_installed(file) or file.startswith("<frozen")


def local_variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame as they are now.

    Before Python 3.13 a function's frame goes on holding what `f_locals` has read, as the outputs of this batch on a
    GPU, unless that is cleared; not where the function has it too, by `locals()`.
    """
    read = frame.f_locals
    found = dict(read)
    if (
        sys.version_info < (3, 13)
        and frame.f_code.co_flags & inspect.CO_OPTIMIZED
        and sys.getrefcount(read) <= _HOLDERS
    ):
        read.clear()
    return found


_HOLDERS = 3
"""Of what `f_locals` has read: the frame, `local_variables` and the argument of getrefcount."""


class CallerLoop:
    """The loop in whose head a frame stands now. Where there is no source, as in an interpreter, nothing is known."""

    def __init__(self, frame: FrameType) -> None:
        self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        """File and line."""
        self._around, self._line = _source(frame)
        self._head = _loop_at(self._around, self._line)
        self._loop = self._head or _loop_around(self._around, self._line)

    @property
    def counting(self) -> str | None:
        """What to write where the head counts batches by itself, which begins at 0 in each attempt."""
        if self._head is not None:
            return _counting(self._head.iter)
        head = ast.unparse(self._loop.iter) if isinstance(self._loop, ast.For) else ""
        if head.startswith("range(") and "batch" not in head:
            return f"{head} counts from 0 again when an epoch is continued in its middle: write range(ctx.batch, n)"
        return None

    @property
    def gathers(self) -> bool:
        """Whether a comprehension goes over ctx.batches here: what it has gathered, no other attempt has."""
        heads = [node.iter for node in _nodes(self._around) if isinstance(node, ast.For)]
        streams = {id(node) for head in heads for node in ast.walk(head) if isinstance(node, ast.GeneratorExp)}
        return any(
            _is_over(node, self._line) and "batches(" in ast.unparse(node.generators[0].iter)
            for node in _nodes(self._around)
            if isinstance(node, _COMPREHENSIONS) and id(node) not in streams
        )

    @property
    def counting_around(self) -> str | None:
        """The same of a call around the one that is under way, as in `bar = tqdm(enumerate(ctx.batches(loader)))`."""
        for node in _nodes(self._around):
            is_here = isinstance(node, ast.Call) and _is_over(node, self._line)
            if is_here and "batches(" in ast.unparse(node) and (found := _counting(node)):
                return found
        return None

    def carries(self, name: str) -> bool:
        """Whether a round, or what follows the loop, reads the value that an earlier round has given a variable.

        The body reads it before it sets it, or sets it in some rounds only and it is read after the loop; or something
        that the body calls sets it.
        """
        if self._loop is None:
            return False
        names = [node for node in (*_targets(self._loop), *_names_in(self._loop.body)) if node.id == name]
        stores = [isinstance(node.ctx, ast.Store) for node in names]
        if not any(stores) or not stores[0]:
            return True
        return name in self.used_after()[0] and name not in _always_set(self._loop.body) | _ids(_targets(self._loop))

    def set_in_some_rounds(self) -> set[str]:
        """Variables that the body sets within an `if` alone, and reads outside of it."""
        if self._loop is None:
            return set()
        conditional: dict[str, set[int]] = {}
        always = _ids(_targets(self._loop)) | _always_set(self._loop.body)
        read: dict[str, set[int]] = {}
        tests = {number: ast.dump(part.test) for number, part in enumerate(self._loop.body) if isinstance(part, ast.If)}
        for number, part in enumerate(self._loop.body):
            for node in _names(part):
                if isinstance(node.ctx, ast.Load):
                    read.setdefault(node.id, set()).add(number)
                elif isinstance(part, ast.If):
                    conditional.setdefault(node.id, set()).add(number)
                else:
                    always.add(node.id)
        found = set()
        for name, ifs in conditional.items():
            same_rounds = {number for number, test in tests.items() if test in {tests[one] for one in ifs}}
            if name not in always and read.get(name, set()) - ifs - same_rounds:
                found.add(name)
        return found

    def read_by_next(self) -> set[str]:
        """Variables that the body gives to `next`."""
        calls = [node for part in ([] if self._loop is None else self._loop.body) for node in ast.walk(part)]
        names = [
            node.args[0]
            for node in calls
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next" and node.args
        ]
        return {name.id for name in names if isinstance(name, ast.Name)}

    def used_after(self) -> tuple[set[str], set[str]]:
        """Variables that the loop sets, and others that it uses, which the lines after it read before they set them."""
        if self._loop is None or self._around is None:
            return set(), set()
        end = self._loop.end_lineno or self._loop.lineno
        first: dict[str, ast.expr_context] = {}
        for node in _names(self._around):
            if getattr(node, "lineno", 0) > end:
                first.setdefault(node.id, node.ctx)
        read = {name for name, context in first.items() if isinstance(context, ast.Load)}
        inside = [*_targets(self._loop), *_names_in(self._loop.body)]
        stored = {node.id for node in inside if isinstance(node.ctx, ast.Store)}
        return stored & read, ({node.id for node in inside} - stored) & read


def _counting(expression: ast.AST) -> str | None:
    for call in _calls_around_batches(expression):
        name = _called(call)
        has_start = name == "enumerate" and (len(call.args) > 1 or call.keywords)
        if name in _COUNTING and not has_start:
            return f"{name}() counts from 0 again when an epoch is continued in its middle: {_COUNTING[name]}"
    return None


def _calls_around_batches(node: ast.AST) -> Iterator[ast.Call]:
    """The calls in an expression but for those in ctx.batches(...): what a loader is made of may be counted."""
    if isinstance(node, ast.Call):
        if _called(node) == "batches":
            return
        yield node
    for part in ast.iter_child_nodes(node):
        yield from _calls_around_batches(part)


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _source(frame: FrameType) -> tuple[ast.AST | None, int]:
    """The function that a frame runs, or the module, and the line in it at which the frame stands."""
    tree, first = _parsed(frame.f_code)
    return tree, frame.f_lineno - max(0, first - 1)


def _loop_at(tree: ast.AST | None, line: int) -> ast.For | None:
    """The `for` statement with a line in its head."""
    loops = [node for node in _nodes(tree) if isinstance(node, ast.For)]
    return next((one for one in loops if one.lineno <= line <= (one.iter.end_lineno or one.lineno)), None)


def _loop_around(tree: ast.AST | None, line: int) -> ast.For | ast.While | None:
    """The innermost loop with a line in its body, as of `batch = next(batches)`."""
    loops = [node for node in _nodes(tree) if isinstance(node, (ast.For, ast.While)) and _is_over(node, line)]
    return max(loops, key=lambda node: node.lineno, default=None)


def _nodes(tree: ast.AST | None) -> Iterator[ast.AST]:
    return iter(()) if tree is None else ast.walk(tree)


def _is_over(node: ast.expr | ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _targets(loop: ast.For | ast.While) -> list[ast.Name]:
    return list(_names(loop.target)) if isinstance(loop, ast.For) else []


def _ids(names: list[ast.Name]) -> set[str]:
    return {node.id for node in names}


def _always_set(body: list[ast.stmt]) -> set[str]:
    """Variables that the statements set whichever way an `if` goes; loops in them count as run."""
    found: set[str] = set()
    for part in body:
        if isinstance(part, ast.If):
            found |= _always_set(part.body) & _always_set(part.orelse)
        elif isinstance(part, (ast.For, ast.While, ast.With)):
            found |= _always_set(part.body) | (_ids(_targets(part)) if isinstance(part, ast.For) else set())
        elif isinstance(part, ast.Try):
            found |= _always_set(part.body) | _always_set(part.finalbody)
        elif not isinstance(part, ast.Match):
            found |= {node.id for node in _names(part) if isinstance(node.ctx, ast.Store)}
    return found


@lru_cache(maxsize=16)
def _parsed(code: CodeType) -> tuple[ast.AST | None, int]:
    """(the function's source, or the module's, and its first line). Once: there is a loop in it for each pass."""
    try:
        is_module = code.co_name == "<module>"
        lines, first = (inspect.findsource(code)[0], 0) if is_module else inspect.getsourcelines(code)
        return ast.parse(textwrap.dedent("".join(lines))), first
    except (OSError, SyntaxError, TypeError):
        return None, 0


def _names_in(body: list[ast.stmt]) -> Iterator[ast.Name]:
    for part in body:
        yield from _names(part)


def _names(node: ast.AST) -> Iterator[ast.Name]:
    """The names in a statement in the order in which they are used: a value before what it is assigned to."""
    if isinstance(node, ast.Name):
        yield node
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
        parts = [node.value, *(part for part in parts if part is not node.value)]
    elif isinstance(node, (ast.For, ast.comprehension)):
        parts = [node.iter, *(part for part in parts if part is not node.iter)]
    for part in parts:
        yield from _names(part)
