"""An optimizer whose state is divided over the ranks (ZeRO stage 1, arXiv:1910.02054), by torch's own.

A file of its own: the import of torch's takes 0.15 s. parallelizer.py makes one where the YAML says `parallel: zero1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer


class Zero1(ZeroRedundancyOptimizer):
    """torch's ZeroRedundancyOptimizer, with moving averages that are seen on all ranks.

    `make(part, **options)` makes the local optimizer, of this rank's part of the groups; `group` are the ranks.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        make: Callable[..., torch.optim.Optimizer],
        group: dist.ProcessGroup | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(groups, optimizer_class=make, process_group=group, **options)  # type: ignore[arg-type]

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that has this rank's part of the state."""
        return self.optim  # type: ignore[no-any-return]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, every parameter is its moving average, which the rank that has it sends to the others."""
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
