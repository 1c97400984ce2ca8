"""A snapshot in memory, for torch.distributed.checkpoint to load: what another rank has comes over the network."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from jobkit.checkpoint.memory import Snapshot
from jobkit.checkpoint.storage import Extent, raw, read_exactly, read_item
from jobkit.group import RankGroup


class MemoryReader(StorageReader):
    """Reads a verified snapshot, on all ranks together: what a rank needs and has not is sent, tensor by tensor."""

    def __init__(self, snapshot: Snapshot, ranks: RankGroup) -> None:
        self._slot, self._ranks = snapshot.slot, ranks
        items = {item.index: item for _, part in snapshot.found for item, _ in [*part.tensors, *part.pickled]}
        self._metadata: Metadata = create_default_global_save_plan([SavePlan(list(items.values()))])[1]
        # Of what several nodes have, that of the first rank, as in a checkpoint.
        self._pickled = {item.index: data for _, part in reversed(snapshot.found) for item, data in part.pickled}
        self._places: dict[MetadataIndex, dict[int, Extent]] = {}
        """Where each tensor, or chunk of one, lies: the place in the slot of every rank that has it."""
        for rank, part in snapshot.found:
            for item, extent in part.tensors:
                self._places.setdefault(item.index, {})[rank] = extent

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        missing: dict[MetadataIndex, list[ReadItem]] = {}
        with self._open() as file:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(self._pickled[item.storage_index]))
                elif (extent := self._places[item.storage_index].get(self._ranks.rank)) is not None:
                    read_item(file, extent, item, planner)
                else:
                    missing.setdefault(item.storage_index, []).append(item)
            for index, extent, data in self._received(file, list(missing)):
                for item in missing[index]:
                    read_item(data, extent, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open(self) -> io.RawIOBase | io.BytesIO:
        """This rank's slot; opened again, for the position in an inherited file is the parent's too."""
        return io.BytesIO() if self._slot is None else Path(f"/proc/self/fd/{self._slot.file}").open("rb", buffering=0)

    def _received(
        self, file: io.RawIOBase | io.BytesIO, missing: list[MetadataIndex]
    ) -> Iterator[tuple[MetadataIndex, Extent, io.BytesIO]]:
        """What this rank lacks, while it sends what others lack: one at a time, in the same order on all ranks."""
        wanted: dict[MetadataIndex, list[int]] = {}
        for rank, indices in enumerate(self._ranks.gather(missing)):
            for index in indices:
                wanted.setdefault(index, []).append(rank)
        for number, (index, to) in enumerate(wanted.items()):
            places = self._places[index]
            source = list(places)[number % len(places)]  # each of those that have it sends some
            here = self._ranks.rank
            if here not in (source, *to) and len(to) == 1:
                continue
            data = torch.empty(places[source].length, dtype=torch.uint8)
            if here == source:
                read_exactly(file, places[source].offset, raw(data))
            if data.numel():
                self._ranks.give(data, source, to)
            if here in to:
                extent = places[source]
                yield index, Extent("", 0, extent.length, extent.shape, extent.dtype), io.BytesIO(raw(data))
