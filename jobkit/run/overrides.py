"""`key=value` of a command line: what it says, and whether there is such a key. `+key=value` may add one to params."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.errors import InputError, InvalidValue, closest
from jobkit.run import habits, secrets
from jobkit.run.yamlfile import parse_value

_KEY = r"[A-Za-z_][\w.\-]*(\[\d+\])?"
_TYPED = re.compile(rf"\+?{_KEY}=\s*\S.*", re.DOTALL)
_NUMBERS = re.compile(r"[\d.+-][\w.+-]*(\s*,\s*[\d.+-][\w.+-]*)+,?")

COMMAND_LINE = "command line"

NAMES_SHOWN = 12
"""How many params a refusal lists."""


@dataclass(frozen=True)
class Given:
    """`key=value`, and where a person has written it."""

    text: str
    place: str = COMMAND_LINE
    """The beginning of an error message about it, as `points.csv:3: column 2`."""


@dataclass(frozen=True)
class Override:
    """One value that the command line, or a point of a sweep, sets."""

    text: str
    """As it was typed."""
    key: str
    """Dotted."""
    value: Any
    adds: bool
    """Whether the key may be a new one: it was typed with `+` before it."""


def parse(text: str, place: str = COMMAND_LINE) -> Override:
    """What a person typed, or has written at some place. Raises InputError."""
    typed, equals, value = text.partition("=")
    adds, key = typed.startswith("+"), typed.removeprefix("+")
    if not equals or not re.fullmatch(_KEY, key):
        raise InputError(f"{place}: {text!r}: expected key=value, as in params.lr=1e-3")
    if not value.strip():
        raise InputError(f"{place}: {text!r}: no value; none: {typed}=null; an empty text: {typed}='\"\"'")
    try:
        return Override(text, key, parse_value(value), adds)
    except Exception:  # a YAML error of whatever kind: the value was one person's typing
        raise InputError(f"{place}: {text!r}: the value is not valid YAML; quote it") from None


def refuse_other_forms(words: Sequence[str], values: Mapping[str, Any], sections: Mapping[str, Sequence[str]]) -> None:
    """Refuse what other programs call an override, with the form that it has here. Raises InputError.

    `values` and `sections` as `check` has them.
    """
    for index, word in enumerate(words):
        if _TYPED.fullmatch(word):
            continue
        if "/" in word and "=" not in word and Path(word).exists():
            key, _, before = words[index - 1].partition("=") if index else ("", "", "")
            one = f"; {key} takes one path, and here there are several" if "/" in before else ""
            raise InputError(f"{COMMAND_LINE}: {word!r} is a path, not key=value{one}")
        bare = re.sub(r"^[+~]*|:$", "", word)
        key, _, value = (bare if "=" in bare else bare.replace(":", "=", 1)).partition("=")
        key = re.sub(r"[:/\[]", ".", key).rstrip("]")  # params/lr=1, params[lr]=1
        rest = [one for one in (value, *words[index + 1 : index + 3]) if one not in ("", "=")]
        if not re.fullmatch(_KEY, key):
            parse(word)  # raises
        key = name_meant(key, values, sections) or key
        if word.startswith("~"):
            hint = f"nothing is taken out; for no value: {key}=null"
        elif word.startswith("++"):
            hint = f"one + sets a value, whether it is there or not: +{key}={''.join(rest[:1]) or '...'}"
        else:
            sign = "+" if word.startswith("+") else ""
            hint = f"expected key=value in one word: {sign}{key}={rest[0].lstrip('=') if rest else '...'}"
        raise InputError(f"{COMMAND_LINE}: {word!r}: {hint}")


def of_option(
    option: str,
    words: Sequence[str],
    options: Iterable[str],
    values: Mapping[str, Any],
    sections: Mapping[str, Sequence[str]],
) -> str:
    """The hint for `--lr`, `--model.lr=0.1` or `-N2`, which another program would take, as it stands in an error: what
    to type here, `params.lr=0.1`; empty for none.

    Args:
        words: those that stood alone on the command line, of which one may be its value.
        options: what there is; one that is like `option` comes before a value that is only like it.
    """
    name, _, value = option.lstrip("-").partition("=")
    if short := re.fullmatch(r"-([A-Za-z])(\d*)", option):  # -N 2 and -N2
        name, value = habits.SHORT.get(short[1], short[1]), short[2]
    name = name.replace("-", "_")
    last = name.rpartition(".")[2]
    key = name_meant(name, values, sections) or name_meant(last, values, sections)
    if key is None:
        return f"; {habits.TEXTS[last]}" if last in habits.TEXTS else ""
    is_exact = key.rpartition(".")[2] == last or habits.KEYS.get(last) == key
    if not (is_exact or closest(option, options) is None):
        return ""
    alone = [word for word in words if "=" not in word and not word.startswith("--") and word != option]
    return f"; a value is set without dashes: {key}={value or ''.join(alone[:1]) or '...'}"


def masked(text: str) -> str:
    """An override, or an axis of a sweep (`params.widths=[8],[16]`), as others may see it."""
    key, _, typed = text.partition("=")
    try:
        value = parse(text).value
    except InputError:  # an axis, whose values are YAML one by one
        value = parse(f"{key}=[{typed}]").value
    return secrets.masked_override(text, value)


def check(override: Override, values: Mapping[str, Any], sections: Mapping[str, Sequence[str]]) -> None:
    """Refuse an override of what there is not; raises InvalidValue with the nearest names.

    Args:
        values: the config so far, nothing resolved in it.
        sections: the names of all top-level keys, each with the names of the keys below it.
    """
    top, *below = override.key.partition("[")[0].split(".")
    if top not in sections:
        allowed = ", ".join(sections)
        meant = name_meant(override.key, values, sections)
        hint = (f"; did you mean {meant!r}?" if meant is not None else habits.elsewhere(override.key)) or ""
        raise InvalidValue(override.key, f"unknown key{hint} (allowed: {allowed})")
    if top == "params" and not override.adds:
        params = values.get("params")
        _refuse_another_kind(override.key, _present(values, override.key), override.value)
        for key, siblings in _new_params(params if isinstance(params, Mapping) else {}, below, override.value):
            dotted = ".".join(("params", *key))
            parent = ".".join(("params", *key[:-1]))
            shown = [str(one) for one in siblings]
            there = ", ".join(shown[:NAMES_SHOWN]) + (", ..." if len(shown) > NAMES_SHOWN else "")
            has = f"{parent} has: {there}" if shown else f"{parent} has no keys"
            found = closest(key[-1], shown)
            hint = f"; did you mean '{parent}.{found}'?" if found is not None else ""
            raise InvalidValue(dotted, f"there is no such key{hint} ({has}; to add one: +{dotted}=...)")


_MISSING = object()


def _present(values: Mapping[str, Any], key: str) -> Any:
    """What the config so far has for a dotted key, as `params.widths[0]`; _MISSING for what it has not."""
    found: Any = values
    for name in re.split(r"[.\[]", key.removesuffix("]")):
        if isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name, _MISSING) if isinstance(found, Mapping) else _MISSING
    return found


def _refuse_another_kind(key: str, present: Any, found: Any) -> None:
    """Refuse what a slip makes of a value, as a text of the number `1e-3x`: it would be trained with."""
    if isinstance(present, Mapping) and isinstance(found, Mapping):
        for name in found:
            _refuse_another_kind(f"{key}.{name}", present.get(name, _MISSING), found[name])
        return
    if isinstance(present, list) and isinstance(found, list):
        if all(isinstance(one, int | float) for one in present):
            for one in found if present else ():
                _refuse_another_kind(key, present[0], one)
        return
    if expected := _expected(present, found):
        hint = ""
        if isinstance(found, str) and _NUMBERS.fullmatch(found):
            several = f"a run for each: --sweep {key}={found}; a list: " if isinstance(present, int | float) else ""
            hint = f"; {several}{key}=[{found}]"
        if isinstance(present, list) and isinstance(found, int | float):
            hint = f"; {key}=[{found}]"
        what = f"the text {found!r}" if isinstance(found, str) else repr(found)
        raise InvalidValue(key, f"found {what}, expected {expected}{hint} (+{key} takes any value)")


def _expected(present: Any, found: Any) -> str:
    """What is allowed in the place of a value; nothing where `found` is. A number for a text, and null, always are."""
    is_text = isinstance(found, str) and "${" not in found
    if isinstance(present, bool):
        return "true or false" if is_text or isinstance(found, Mapping) else ""
    if isinstance(present, int | float):
        return f"a number, as {present!r}" if is_text or isinstance(found, bool | Mapping) else ""
    if isinstance(present, list | Mapping):
        is_other = is_text or isinstance(found, int | float)
        return f"a {'list' if isinstance(present, list) else 'mapping'}, as {present!r}" if is_other else ""
    if isinstance(present, str) and present != "???" and "${" not in present:
        return "a text; one with a colon in it: in quotes" if isinstance(found, Mapping) else ""
    return "null, or a value" if present is None and found == "None" else ""


def _new_params(values: Any, key: Sequence[str], value: Any) -> Iterator[tuple[list[str], Iterable[str]]]:
    """The keys that setting `key` below `values` would add, each with the names that there are beside it."""
    if key:
        if isinstance(values, Mapping):
            name, *rest = key
            if name not in values:
                yield list(key[:1]), values
            else:
                yield from (([name, *found], beside) for found, beside in _new_params(values[name], rest, value))
        elif not (isinstance(values, list) or (isinstance(values, str) and "${" in values)):  # of those OmegaConf knows
            yield list(key[:1]), ()
    elif isinstance(value, Mapping) and isinstance(values, Mapping):  # it is merged into what is there
        for name, one in value.items():
            yield from _new_params(values, [str(name)], one)


def name_meant(key: str, values: Mapping[str, Any], sections: Mapping[str, Sequence[str]]) -> str | None:
    """The dotted key that a name may mean: one at the top, or one of a section's or of params; None for none."""
    if key.partition(".")[0] in sections:
        return key
    params = values.get("params")
    dotted = {name: f"{section}.{name}" for section, names in sections.items() for name in names}
    dotted |= {str(name): f"params.{name}" for name in (params if isinstance(params, Mapping) else {})}
    dotted = {section: section for section in sections} | dotted
    if key not in dotted and (habit := key.replace("-", "_")) in habits.TEXTS | habits.KEYS:
        return habits.KEYS.get(habit)
    found = closest(key, dotted)
    return dotted[found] if found is not None else None


def refuse_sections_in_params(params: Mapping[str, Any], sections: Mapping[str, Sequence[str]]) -> None:
    """Refuse `resources:` and the like that were indented under `params:`: they would have no effect there."""
    for name, keys in sections.items():
        found = params.get(name)
        if keys and isinstance(found, Mapping) and any(key in keys for key in found):
            raise InvalidValue(
                f"params.{name}",
                f"{name} is a section of its own, which has no effect under params: put it at the beginning of a line "
                "(or, if it is one of your own params, give it another name)",
            )
