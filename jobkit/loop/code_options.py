"""The options that a training function gives its optimizers and schedules. In a run with --from, an option that differs
from the other run's wins over the checkpoint.

    before a restore: options, `now` --state_dict--> each checkpoint
    --from: checkpoint --> `then`;  then != now?  the restored value gives way (`merged`)

A learning rate that a schedule has changed since is kept in proportion. The schedule itself goes on with what it is
given now, from the same step. Tracked (loop/tracked.py) owns the one object.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

from jobkit.checkpoint.leaves import KERNELS
from jobkit.log import log

_PLAIN = (bool, int, float, str, type(None))
_NONE = object()


class CodeOptions:
    """The options of all tracked optimizers and schedules, as the function gave them.

    given.note("optimizer", optimizer)      # before it is restored
    given.apply({"optimizer": optimizer})   # after it was restored from another run's checkpoint
    """

    def __init__(self) -> None:
        self._now: dict[str, Any] = {}
        self._then: Mapping[str, Any] = {}
        self.is_start = False
        """True if this attempt begins with another run's checkpoint: then the code's options win."""
        self.changes: dict[str, str] = {}
        """`optimizer.lr` -> `0.3 -> 0.01`, as far as the restored values gave way."""

    @staticmethod
    def is_about(value: Any) -> bool:
        return isinstance(value, (Optimizer, LRScheduler))

    def note(self, name: str, value: Any) -> None:
        """Note the options of an object, before it is restored."""
        if isinstance(value, Optimizer):
            self._now[name] = [_plain(_options(group)) for group in value.param_groups]
        elif isinstance(value, LRScheduler):
            self._now[name] = _plain(value.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return dict(self._now)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.is_start:
            self._then = state
        else:  # the restored values come of what the run's first attempt gave
            for name, groups in state.items():
                self._say_ignored(name, groups, self._now.get(name, ()))
            self._now |= state

    def _say_ignored(self, name: str, then: Any, now: Any) -> None:
        """Warn of options in the code of an optimizer that the checkpoint's values replace."""
        if not isinstance(then, list):
            return
        for before, after in zip(then, now, strict=False):
            for key in sorted(set(before) & set(after) - set(KERNELS)):
                if before[key] != after[key]:
                    words = "%s.%s: the code gave %s and gives %s now; the checkpoint's value goes on"
                    log.warning(words, name, key, before[key], after[key])

    def apply(self, objects: Mapping[str, Any]) -> None:
        """Set the options that differ now in objects that were restored."""
        compared = {name: value for name, value in objects.items() if name in self._then and name in self._now}
        schedules = {name: value for name, value in compared.items() if isinstance(value, LRScheduler)}
        in_charge = {name for name, schedule in schedules.items() if schedule.get_last_lr() == _rates(schedule)}
        for name, value in compared.items():
            if isinstance(value, Optimizer):
                for group, then, now in zip(value.param_groups, self._then[name], self._now[name], strict=False):
                    self._apply_to_group(name, group, then, now)
        for name, schedule in schedules.items():
            before = schedule.state_dict()
            after = merged(before, self._then[name], self._now[name])
            if after != before:
                schedule.load_state_dict(after)
                self._note_changes(name, before, after)
            rates = _rates_at_its_step(schedule, is_changed=after != before)
            if rates is not None and name in in_charge:
                for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
                schedule._last_lr = rates

    def _apply_to_group(self, name: str, group: dict[str, Any], then: dict[str, Any], now: dict[str, Any]) -> None:
        before = _options(group)
        for options in (then, now):  # a schedule keeps the rate as it was given as `initial_lr`
            options["lr"] = options["initial_lr"] = options.get("initial_lr", options.get("lr"))
        group.update(merged(before, then, now))
        self._note_changes(name, before, _options(group))

    def _note_changes(self, name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for key, value in after.items():
            if not key.startswith("_") and value != before[key] and f"{name}.{key}" not in self.changes:
                self.changes[f"{name}.{key}"] = f"{before[key]} -> {value}"
                log.info("%s.%s %s -> %s, as the code gives it now", name, key, before[key], value)


def merged(saved: Any, then: Any, now: Any) -> Any:
    """Return the value that goes on: of what was given `then` and is given `now`, and `saved` in between.

    merged(0.15, 0.3, 0.3)      # 0.15: nothing else is given
    merged(0.3, 0.3, 0.01)      # 0.01
    merged(0.15, 0.3, 0.01)     # 0.005: a schedule has halved it
    """
    if then == now:
        return saved
    if isinstance(saved, Mapping) and isinstance(then, Mapping) and isinstance(now, Mapping) and saved != then:
        items = {key: merged(value, then.get(key, _NONE), now.get(key, _NONE)) for key, value in saved.items()}
        return {key: saved[key] if value is _NONE else value for key, value in items.items()}
    if isinstance(saved, (list, tuple)) and isinstance(then, (list, tuple)) and isinstance(now, (list, tuple)):
        if len(saved) == len(then) == len(now):
            return type(saved)(merged(*values) for values in zip(saved, then, now, strict=True))
        return type(saved)(now)
    if saved == then:
        return Counter(now) if isinstance(saved, Counter) else now  # the milestones of torch's MultiStepLR
    if _is_number(saved) and _is_number(then) and _is_number(now) and then:
        return saved * now / then
    return now


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _plain(value: Any) -> Any:
    """Return the plain part of a value; of a mapping its plain items."""
    if isinstance(value, Mapping):
        return dict(_plain_items(value))
    if isinstance(value, (list, tuple)):
        return [None if (item := _plain(part)) is _NONE else item for part in value]
    return value if isinstance(value, _PLAIN) else _NONE


def _plain_items(value: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    return ((key, plain) for key, item in value.items() if (plain := _plain(item)) is not _NONE)


def _rates(schedule: LRScheduler) -> list[Any]:
    return [group["lr"] for group in schedule.optimizer.param_groups]


def _rates_at_its_step(schedule: LRScheduler, *, is_changed: bool) -> list[Any] | None:
    """Return the rates of the step where a schedule stands; None where they follow from those of the steps before.

    The function of a LambdaLR may be another one now, which its state does not show.
    """
    if isinstance(schedule, SequentialLR):  # the part in charge may be another one, where milestones have changed
        number = bisect_right(schedule._milestones, schedule.last_epoch)
        part = schedule._schedulers[number]
        part.last_epoch = schedule.last_epoch - [0, *schedule._milestones][number]
        return _rates_at_its_step(part, is_changed=is_changed)
    if type(schedule).get_lr is LambdaLR.get_lr:
        pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)  # type: ignore[attr-defined]
        return [base * function(schedule.last_epoch) for base, function in pairs]
    if is_changed and hasattr(schedule, "_get_closed_form_lr"):
        return list(schedule._get_closed_form_lr())
    return None
