"""What a script's own samplers, generators and workers have come to at the end of a pass, for another attempt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jobkit.checkpoint.summary import digest, summarise
from jobkit.train.loader_pass import data_loader
from jobkit.train.own_state import generator_state, is_plain, own_state, set_own_state
from jobkit.train.tap import Draws, kept_draws


class KnownLoaders:
    """The loaders of one ctx.batches in the epoch's body: another pass begins where the one before has ended.

    A generator or sampler of the script's own is in no checkpoint but here. One that was made before the epochs goes on
    as it was; one that is made anew in each epoch is what the script makes it.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._saved = saved
        self._loaders: tuple[Any, ...] = ()
        self._first: list[Any] = list(saved["first"]) if saved else []
        self._are_new = bool(saved and saved["are_new"])

    def begin(
        self, loaders: tuple[Any, ...], *, is_continued: bool, tracked: Collection[Any] = ()
    ) -> list[Draws | None]:
        """Before a pass over loaders: of each what workers that outlived a pass would draw next, in an attempt before.

        None of one whose workers did not. `tracked` are generators that are restored by themselves.
        """
        saved, self._saved = self._saved, None
        same = bool(self._loaders) and all(a is b for a, b in zip(self._loaders, loaders, strict=False))
        self._are_new = self._are_new or (bool(self._loaders) and not same)
        known, self._loaders = self._loaders, loaders
        if not self._first:
            self._first = [own_state(loader) for loader in loaders]
        if saved is None or known or is_continued or self._are_new or len(saved["draws"]) != len(loaders):
            return [None] * len(loaders)
        for loader, first, now in zip(loaders, saved["first"], saved["now"], strict=False):
            # A count may be set for this epoch by now, as by set_epoch; another generator is another loader.
            kept = {_digest(generator_state(one)) for one in tracked}
            found = {path: one for path, one in own_state(loader).items() if _digest(one[1]) not in kept}
            equal = {path for path in found if _digest(found[path]) == _digest(first.get(path))}
            if all(path in equal or is_plain(one) for path, one in found.items()):
                late = now.keys() - found.keys() - first.keys()  # made as they were used
                set_own_state(loader, {path: one for path, one in now.items() if path in equal or path in late})
        return list(saved["draws"])

    def state(self, *, is_between: bool) -> dict[str, Any]:
        """What another attempt is made with; `is_between`: whether no pass over them is under way."""
        if self._saved is not None:  # no pass over them has begun in this attempt
            return dict(self._saved)
        now = [own_state(loader) for loader in self._loaders]
        draws = [kept_draws(data_loader(one)) if is_between else None for one in self._loaders]
        return {"first": self._first, "now": now, "are_new": self._are_new, "draws": draws}


def _digest(state: Any) -> Any:
    return digest(summarise(state))
