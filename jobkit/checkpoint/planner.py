"""How torch.distributed.checkpoint plans jobkit's checkpoints: staged items in, pickled skeletons left as bytes."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem

from jobkit.checkpoint.staging import Staged
from jobkit.errors import CheckpointError


class StagedSavePlanner(DefaultSavePlanner):
    """Saves what was staged; DCP removes the shards that several ranks hold and makes the index."""

    def __init__(self, staged: Staged) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged = staged
        self._values: dict[MetadataIndex, torch.Tensor | bytes] = {}

    def create_local_plan(self) -> SavePlan:
        """This rank's items; CheckpointError where they could not be staged."""
        if self._staged.problem:
            raise CheckpointError(self._staged.problem)
        self._values = {item.index: value for item, value in self._staged.items}
        return SavePlan([item for item, _ in self._staged.items], planner_data=self._staged.shared)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP's plan; CheckpointError where ranks differ about a shared tree, for then a tensor would be missing."""
        for rank, plan in enumerate(all_plans):
            for key, (holders, shapes) in plan.planner_data.items():
                for holder in holders:
                    if all_plans[holder].planner_data.get(key) != (holders, shapes):
                        raise CheckpointError(
                            f"{key!r} is not the same on rank {rank} and rank {holder}: other names, shapes or dtypes, "
                            "or not there; what differs from rank to rank belongs into the local state"
                        )
        return super().create_global_plan([SavePlan(plan.items) for plan in all_plans])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._values[write_item.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value


class BytesLoadPlanner(DefaultLoadPlanner):
    """Loads tensors in place and leaves pickled objects as the bytes they are."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        state: dict[str, Any] = self.state_dict
        state[read_item.dest_index.fqn] = value.getvalue()
