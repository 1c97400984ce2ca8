"""One choice for all ranks: the newest checkpoint that verifies, and how it is read."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.checkpoint_error import as_checkpoint_error
from jobkit.checkpoint.disks import Disks
from jobkit.checkpoint.memory import Snapshot, SnapshotMemory
from jobkit.checkpoint.memory_reader import MemoryReader
from jobkit.checkpoint.staging import SHARED, local_key, tree_key
from jobkit.checkpoint.state import named_tensors, unescape, unflatten
from jobkit.checkpoint.storage import ForeignIndex, RawReader, read_index
from jobkit.checkpoint.store import Manifest, Store
from jobkit.errors import CheckpointError
from jobkit.group import RankGroup

Contents = dict[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class RestoredCheckpoint:
    """A checkpoint read back."""

    step: int
    """Steps done."""
    path: Path
    shared: dict[str, Any]
    local: Any
    """This rank's own tree; None where the checkpoint was written by fewer ranks."""
    manifest: Manifest
    contents: dict[str, Contents]
    """What the checkpoint has, be it read yet or not: shape and dtype of each tensor by its path, by shared tree."""
    durable_step: int | None = None
    """Step of the newest checkpoint on the disk: not this one where it is a snapshot in memory."""
    snapshot: Snapshot | None = None
    """Where it is one."""

    @property
    def name(self) -> str:
        return self.path.name if self.snapshot is None else f"the snapshot of step {self.step} in memory"


class Reader:
    """Chooses and loads on all ranks together."""

    def __init__(
        self, store: Store, ranks: RankGroup, memory: SnapshotMemory | None = None, disks: Disks | None = None
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._disks = disks or Disks(ranks)
        self._memory = memory
        self.set_aside: list[tuple[int, str]] = []

    def load_newest(self, templates: Mapping[str, Any], names: Collection[str] | None) -> RestoredCheckpoint | None:
        self.set_aside = []
        bad: list[tuple[int, str]] = []
        with as_checkpoint_error("the checkpoints cannot be read"):
            # First: a crash in the middle of replacing a checkpoint has left the good one under a hidden name.
            self._disks.together(lambda: self._ranks.on_main(self._store.recover))
            own = self._disks.together(lambda: self._ranks.on_main(self._store.steps))
            for step in self._disks.common(own, self._store.root):
                if (snapshot := self._newest_in_memory(step)) is not None:
                    self._set_aside(bad)
                    return self._load_snapshot(snapshot, step, templates, names)
                manifest, problems = self._disks.together(partial(self._check, step))
                problems = self._disks.problems(manifest, problems)
                if manifest is not None and not problems:
                    newer = [one for one in own if one > step and one not in dict(bad)]
                    self._set_aside([*bad, *((one, "not on every node's disk") for one in newer)])
                    return self._load(manifest, RawReader(self._store.path(step)), templates, names)
                bad.append((step, "; ".join(problems)))
            if (snapshot := self._newest_in_memory(0)) is not None:
                self._set_aside(bad)
                return self._load_snapshot(snapshot, None, templates, names)
        if bad:  # they stay where they are: the next start must not take their absence for a new run
            found = "; ".join(f"step {step}: {reason}" for step, reason in bad)
            raise CheckpointError(
                f"none of the checkpoints in {self._store.root} can be used ({found}): bring one back, or begin again "
                "at step 0 with --fresh (a script with jobkit.init: under another name)"
            )
        return None

    def _set_aside(self, bad: Sequence[tuple[int, str]]) -> None:
        for step, reason in bad:
            self._ranks.on_main(partial(self._store.set_aside, step, reason))
        self.set_aside = list(bad)

    def _newest_in_memory(self, at_least: int) -> Snapshot | None:
        return None if self._memory is None else self._memory.newest(at_least)

    def _load_snapshot(
        self, snapshot: Snapshot, durable_step: int | None, templates: Mapping[str, Any], names: Collection[str] | None
    ) -> RestoredCheckpoint:
        contents = snapshot.contents
        manifest = Manifest(contents.id.step, contents.world_size, {}, contents.extra)
        loaded = self._load(manifest, MemoryReader(snapshot, self._ranks), templates, names)
        return replace(loaded, durable_step=durable_step, snapshot=snapshot)

    def read(
        self, loaded: RestoredCheckpoint, templates: Mapping[str, Any], wants: Callable[[str, str], bool]
    ) -> dict[str, Any]:
        snapshot = loaded.snapshot
        storage = RawReader(loaded.path) if snapshot is None else MemoryReader(snapshot, self._ranks)
        return self._load(loaded.manifest, storage, templates, set(templates), wants).shared

    def _check(self, step: int) -> tuple[Manifest | None, list[str]]:
        """The manifest as rank 0 reads it, and what rank 0 too finds wrong with the files."""
        manifest, problem = self._ranks.on_main(lambda: self._manifest(step))
        if manifest is None:
            return None, [problem]
        problems = self._ranks.all_or_none(lambda: self._verify_share(step, manifest))
        reports = self._ranks.gather((socket.gethostname(), problems))
        suspects = [name for _, found in reports for name in found]
        if not suspects:
            return manifest, self._ranks.on_main(lambda: self._index_problems(step))
        # Set aside only what rank 0 finds damaged too: one node may have a bad mount, disk cache or memory.
        confirmed = self._ranks.on_main(lambda: self._store.verify(step, suspects, manifest))
        if not confirmed:
            seen = "; ".join(
                f"rank {rank} on {host}: {problem}"
                for rank, (host, found) in enumerate(reports)
                for problem in found.values()
            )
            raise CheckpointError(f"the checkpoint of step {step} is good on rank 0, but not everywhere: {seen}")
        return manifest, confirmed

    def _manifest(self, step: int) -> tuple[Manifest | None, str]:
        try:
            return self._store.manifest(step), ""
        except CheckpointError as error:
            return None, str(error)

    def _index_problems(self, step: int) -> list[str]:
        try:
            read_index(self._store.path(step))
        except ForeignIndex as error:
            return [str(error)]
        return []

    def _verify_share(self, step: int, manifest: Manifest) -> dict[str, str]:
        """What is wrong with this rank's share of the files, by name: together the ranks read each byte once."""
        mine = sorted(manifest.files)[self._ranks.rank :: self._ranks.world_size]
        return {name: found[0] for name in mine if (found := self._store.verify(step, [name], manifest))}

    def _load(
        self,
        manifest: Manifest,
        reader: StorageReader,
        templates: Mapping[str, Any],
        names: Collection[str] | None,
        wants: Callable[[str, str], bool] = lambda name, path: True,
    ) -> RestoredCheckpoint:
        step = manifest.step

        def read() -> tuple[dict[str, Any], dict[str, Any]]:
            wanted, left_out = self._ranks.all_or_none(lambda: self._targets(reader, templates, names, wants))
            group = self._ranks.group
            load(wanted, storage_reader=reader, planner=_LoadPlanner(), process_group=group, no_dist=group is None)
            return wanted, left_out

        with as_checkpoint_error(f"the checkpoint of step {step} is whole but cannot be loaded"):
            wanted, left_out = self._disks.together(read)
        trees = _trees(wanted | left_out)
        mine = local_key(self._ranks.number)
        self._disks.check_place(manifest, mine in trees)
        shared = {_name(key): tree for key, tree in trees.items() if key != mine}
        return RestoredCheckpoint(
            step, self._store.path(step), shared, trees.get(mine), manifest, _contents(reader.read_metadata()), step
        )

    def _targets(
        self,
        reader: StorageReader,
        templates: Mapping[str, Any],
        names: Collection[str] | None,
        wants: Callable[[str, str], bool],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where every tensor and object that this rank wants goes, by DCP's key; and the others, on the meta device."""
        live = {
            f"{tree_key(SHARED, name)}/{path}": tensor
            for name, tree in templates.items()
            for path, tensor in named_tensors(tree).items()
            if isinstance(tensor, DTensor)
        }
        chosen = None if names is None else {tree_key(SHARED, name) for name in names}
        targets: dict[str, Any] = {}
        left_out: dict[str, Any] = {}
        for key, saved in reader.read_metadata().state_dict_metadata.items():
            tree, _, path = key.partition("/")
            is_shared = tree.startswith(f"{SHARED}.") and (chosen is None or tree in chosen)
            if not is_shared and tree != local_key(self._ranks.number):
                continue
            if not isinstance(saved, TensorStorageMetadata):
                targets[key] = b""
            elif is_shared and not wants(_name(tree), path):
                left_out[key] = torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
            else:
                targets[key] = live[key] if key in live else torch.empty(saved.size, dtype=saved.properties.dtype)
        return targets, left_out


class _LoadPlanner(DefaultLoadPlanner):
    """Loads tensors in place and leaves pickled objects as the bytes they are."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        state: dict[str, Any] = self.state_dict
        state[read_item.dest_index.fqn] = value.getvalue()


def _name(tree: str) -> str:
    return unescape(tree.removeprefix(f"{SHARED}."))


def _contents(metadata: Metadata) -> dict[str, Contents]:
    contents: dict[str, Contents] = {}
    for key, saved in metadata.state_dict_metadata.items():
        tree, slash, path = key.partition("/")
        if tree.startswith(f"{SHARED}."):
            tensors = contents.setdefault(_name(tree), {})
            if slash and isinstance(saved, TensorStorageMetadata):
                tensors[path] = saved.size, saved.properties.dtype
    return contents


def _trees(state: dict[str, Any]) -> dict[str, Any]:
    """Put the trees together: a key without a slash is a skeleton, the others are its tensors."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state.items():
        tree, slash, path = key.partition("/")
        if slash:
            tensors.setdefault(tree, {})[path] = value
    return {key: unflatten(value, tensors.get(key, {})) for key, value in state.items() if "/" not in key}
