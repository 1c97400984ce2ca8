"""What each rank writes in a save: agreed on once, and again only when a name, a shape or a place has changed."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from jobkit.checkpoint.index import INDEX, IndexOfTensors
from jobkit.checkpoint.staging import Staged
from jobkit.checkpoint.storage import Extent, Items, Places, file_of, places_of
from jobkit.checkpoint.store import FileDigest
from jobkit.errors import CheckpointError
from jobkit.group import RankError, RankGroup

Shared = dict[str, tuple[tuple[int, ...], str]]
"""Of each shared tree, the ranks that hold it and a digest of its names, shapes and dtypes."""


class SavePlans:
    """The plan of one save after the other. All methods are collective.

    DCP's plan is made by rank 0 of all ranks' items: for 76,800 of them that takes it seconds under the GIL, in which
    the training stands still. So it is kept for as long as every rank has the items that it had, and so is the part of
    the index that says where tensors lie. torch's own `enable_plan_caching` does not see that a dtype has changed,
    sends every item's place to rank 0 at each save all the same, and pickles the whole index again.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._number = 0
        """The plan that this rank has agreed to; 0 for none."""
        self._described: list[WriteItem] = []
        self._shared: Shared = {}
        self._mine: list[int] = []
        """Which of its items this rank writes: of what several have, DCP chooses one."""
        self._places: Places = []
        """Where the tensors among them lie in its file."""
        self._has_index = False
        self._plans_made = 0
        self._metadata: Metadata | None = None
        self._index: IndexOfTensors | None = None
        """On rank 0: what the index says of the tensors, once it is known where they lie."""

    def agree(self, staged: Staged) -> tuple[Items, Places]:
        """What this rank writes of its items, and where the tensors, which come first, lie in its file.

        Raises on all ranks where one could not copy its state, and CheckpointError where they differ about a shared
        tree, for then a tensor would be missing.
        """
        described = [item for item, _ in staged.items]  # those that have not changed are the same objects
        is_known = described == self._described and staged.shared == self._shared
        reports = self._ranks.gather((staged.problem, self._number if is_known else 0))
        for rank, (problem, _) in enumerate(reports):
            if problem is not None:
                raise RankError(rank, problem, None)
        numbers = {number for _, number in reports}
        if 0 in numbers or len(numbers) > 1:
            self._number, self._has_index = 0, False
            self._described, self._shared = described, staged.shared
            every = self._ranks.gather_on_main((described, staged.shared))
            self._number, chosen = self._ranks.on_main(lambda: self._make(every))
            self._mine = chosen[self._ranks.rank]
        items = [staged.items[position] for position in self._mine]
        if not self._has_index:
            self._places = places_of(self._ranks.rank, items)
        return items, self._places

    def _make(self, every: list[tuple[list[WriteItem], Shared]]) -> tuple[int, list[list[int]]]:
        """On rank 0: the number of a new plan, and which of its items each rank writes."""
        _check_shared([shared for _, shared in every])
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        plans, self._metadata = planner.create_global_plan([SavePlan(items) for items, _ in every])
        chosen = []
        for (items, _), plan in zip(every, plans, strict=True):
            kept = {item.index for item in plan.items}
            chosen.append([position for position, item in enumerate(items) if item.index in kept])
        self._plans_made += 1
        return self._plans_made, chosen

    def write_index(self, folder: Path, digest: FileDigest, pickled: Places) -> dict[str, FileDigest]:
        """Write the index of the files that all ranks have written, and return the digests of all files.

        `digest` is that of this rank's file, and `pickled` says where its other objects lie in it.
        """
        told = pickled if self._has_index else [*self._places, *pickled]
        reports = self._ranks.gather_on_main((digest, told))
        files = self._ranks.on_main(lambda: self._write_index(folder, reports))
        self._has_index = True
        return files

    def _write_index(self, folder: Path, reports: list[tuple[FileDigest, Places]]) -> dict[str, FileDigest]:
        pickled: dict[MetadataIndex, Extent] = {}
        tensors: dict[MetadataIndex, Extent] = {}
        for _, extents in reports:
            for index, extent in extents:
                (pickled if extent.shape is None else tensors)[index] = extent
        if not self._has_index:
            assert self._metadata is not None
            self._metadata.storage_data = tensors
            self._index = IndexOfTensors(self._metadata)
        assert self._index is not None
        files = {file_of(rank): digest for rank, (digest, _) in enumerate(reports)}
        return files | {INDEX: self._index.write(folder, pickled)}


def _check_shared(every: list[Shared]) -> None:
    for rank, shared in enumerate(every):
        for key, (holders, shapes) in shared.items():
            for holder in holders:
                if every[holder].get(key) != (holders, shapes):
                    raise CheckpointError(
                        f"{key!r} is not the same on rank {rank} and rank {holder}: other names, shapes or dtypes, "
                        "or not there; what differs from rank to rank belongs into the local state"
                    )
