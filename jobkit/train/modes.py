"""What of a module decides how it trains and is in no state_dict: who requires a gradient, who is in training mode, and
attributes, as the `p` of dropout, a temperature, or a count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from jobkit.train.kept_attributes import KeptAttributes, Saved
from jobkit.train.names import plain_name

Now = tuple[list[bool], list[bool]]
"""Of each parameter and each module at one moment: whether it requires a gradient, whether it is in training mode."""


class Modes:
    """The modes of a module, beside those that the training function has made it with.

    Only differences are state: a run that unfreezes its backbone at step 1,000 goes on with it unfrozen, and what the
    training function does in each attempt stays its own. `wrapper` is what a user calls, as DDP: it has a mode too.
    `saved` are objects that a checkpoint has by themselves, if the module should hold them.
    """

    def __init__(self, module: nn.Module, wrapper: nn.Module, saved: Iterable[Any] = ()) -> None:
        self._parameters = [(plain_name(name), parameter) for name, parameter in module.named_parameters()]
        self._modules = [(plain_name(name), part) for name, part in module.named_modules()]
        self._modules += [] if wrapper is module else [("", wrapper)]
        self._made = self.now()
        owners = {f"module {plain_name(path)}": part for path, part in module.named_modules()}
        self._kept = KeptAttributes(owners, [module, wrapper, *saved], one_disk=False)
        self._restored: set[tuple[str, str]] = set()
        """Those that the checkpoint had, whatever the training function does before the loop."""

    def now(self) -> Now:
        """Those of this moment."""
        return [one.requires_grad for _, one in self._parameters], [part.training for _, part in self._modules]

    def changes(self, now: Now | None = None) -> dict[str, dict[str, bool]]:
        """{"requires_grad": {parameter: bool}, "training": {module: bool}} as they were at a moment, where changed."""
        found: dict[str, dict[str, bool]] = {}
        kinds = zip(
            ("requires_grad", "training"), (self._parameters, self._modules), self._made, now or self.now(), strict=True
        )
        for kind, named, made, then in kinds:
            for (name, _), was, is_now in zip(named, made, then, strict=True):
                if was is not is_now or (kind, name) in self._restored:
                    found.setdefault(kind, {})[name] = is_now
        return found

    def attributes(self) -> Saved:
        """Those that have changed, by part."""
        return self._kept.changed()

    def set_attributes(self, saved: Saved) -> None:
        """Set those of a checkpoint."""
        self._kept.restore(saved)

    def set(self, changes: Mapping[str, Mapping[str, bool]]) -> None:
        """Make them as `changes` of a checkpoint has them, by the names that are here."""
        for kind, named in (("requires_grad", self._parameters), ("training", self._modules)):
            for name, one in named:
                if (wanted := changes.get(kind, {}).get(name)) is not None:
                    setattr(one, kind, wanted)
                    self._restored.add((kind, name))
