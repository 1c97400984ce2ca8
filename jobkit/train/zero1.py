"""An optimizer whose state is shared out over the ranks (ZeRO stage 1, arXiv:1910.02054), by torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from jobkit.train.optimizer_state import Sharded


class Zero1(ZeroRedundancyOptimizer, Sharded):
    """torch's ZeroRedundancyOptimizer, with moving averages that are looked at on all ranks.

    `make(part, **options)` is the local optimizer, of this rank's part of the parameter groups; `group` are the ranks
    to share among, None for all.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        make: Callable[..., torch.optim.Optimizer],
        group: dist.ProcessGroup | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(groups, optimizer_class=make, process_group=group, **options)  # type: ignore[arg-type]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While inside, every parameter is its moving average, which one rank keeps and the others are sent."""
        averaged = getattr(self.optim, "averaged", None)
        if averaged is None:
            yield
            return
        mine = {id(parameter) for group in self.optim.param_groups for parameter in group["params"]}
        others = [p for group in self.param_groups for p in group["params"] if id(p) not in mine]
        kept = [parameter.detach().clone() for parameter in others]
        with averaged():
            self._sync_params()  # type: ignore[attr-defined]
            try:
                yield
            finally:
                with torch.no_grad():
                    for parameter, value in zip(others, kept, strict=True):
                        parameter.copy_(value)
