"""One choice for all ranks: the newest checkpoint that verifies, and how it is read."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.checkpoint_error import as_checkpoint_error
from jobkit.checkpoint.disks import Disks
from jobkit.checkpoint.index import INDEX, ForeignIndex, Index, Kind, parse_index
from jobkit.checkpoint.memory import Snapshot, SnapshotMemory
from jobkit.checkpoint.sources import DiskSource, MemorySource, Source
from jobkit.checkpoint.staging import SHARED, local_key, tree_key
from jobkit.checkpoint.state import named_tensors, unescape, unflatten
from jobkit.checkpoint.store import Manifest, Store
from jobkit.checkpoint.targets import Targets
from jobkit.errors import CheckpointError
from jobkit.group import RankGroup
from jobkit.run.garbage import uncollected

Contents = dict[str, Kind]


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
    source: Source
    """Where the rest of it is read from."""
    durable_step: int | None = None
    """Step of the newest checkpoint on the disk: not this one where it is a snapshot in memory."""
    snapshot: Snapshot | None = None
    """Where it is one."""

    of_other_run: bool = False
    """Whether another run wrote it, which this one starts from."""
    weights_only: bool = False
    """Whether nothing but the weights of it are taken."""

    @property
    def way_out(self) -> str:
        """What to do where code cannot take it as it is."""
        if self.weights_only:
            return "begin without them: leave --from out"
        return "take its weights alone, with --weights-only" if self.of_other_run else "submit with --fresh"

    @property
    def name(self) -> str:
        if self.of_other_run:
            return f"step {self.step} of {self.manifest.owner.run or 'the run started from'}"
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

    @uncollected()
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
                manifest, problems, source = self._disks.together(partial(self._examine, step))
                problems = self._disks.problems(manifest, problems)
                if manifest is not None and source is not None and not problems:
                    newer = [one for one in own if one > step and one not in dict(bad)]
                    self._set_aside([*bad, *((one, "not on every node's disk") for one in newer)])
                    return self._load(manifest, source, templates, names)
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

    def _examine(self, step: int) -> tuple[Manifest | None, list[str], Source | None]:
        """What rank 0 reads of a checkpoint and finds wrong with it, and what reads it where it is good."""
        manifest, problems = self._check(step)
        if manifest is None or problems:
            return manifest, problems, None
        source, problems = self._source(step)
        return manifest, problems, source

    def _newest_in_memory(self, at_least: int) -> Snapshot | None:
        return None if self._memory is None else self._memory.newest(at_least)

    def _load_snapshot(
        self, snapshot: Snapshot, durable_step: int | None, templates: Mapping[str, Any], names: Collection[str] | None
    ) -> RestoredCheckpoint:
        contents = snapshot.contents
        manifest = Manifest(contents.id.step, contents.world_size, {}, contents.extra)
        loaded = self._load(manifest, MemorySource(snapshot, self._ranks), templates, names)
        return replace(loaded, durable_step=durable_step, snapshot=snapshot)

    @uncollected()
    def read(
        self, loaded: RestoredCheckpoint, templates: Mapping[str, Any], wants: Callable[[str, str], bool]
    ) -> dict[str, Any]:
        trees = self._read_trees(loaded.manifest.step, loaded.source, templates, set(templates), wants)
        return self._shared(trees)

    def _check(self, step: int) -> tuple[Manifest | None, list[str]]:
        """The manifest as rank 0 reads it, and what rank 0 too finds wrong with the files."""
        manifest, problem = self._ranks.on_main(lambda: self._manifest(step))
        if manifest is None:
            return None, [problem]
        problems = self._ranks.all_or_none(lambda: self._verify_share(step, manifest))
        reports = self._ranks.gather((socket.gethostname(), problems))
        suspects = [name for _, found in reports for name in found]
        if not suspects:
            return manifest, []
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

    def _source(self, step: int) -> tuple[Source | None, list[str]]:
        """What reads a verified checkpoint, and what is wrong with its index, which rank 0 reads for all."""
        data = self._ranks.on_main(lambda: (self._store.path(step) / INDEX).read_bytes())
        try:
            index = parse_index(data)
            if index.divided:  # DCP is going to plan these: what is wrong with its records must be known by now
                _ = index.metadata
            return DiskSource(self._store.path(step), index, self._ranks), []
        except ForeignIndex as error:  # on all ranks: they have the same bytes
            return None, [str(error)]

    def _verify_share(self, step: int, manifest: Manifest) -> dict[str, str]:
        """What is wrong with this rank's share of the files, by name: together the ranks read each byte once."""
        mine = sorted(manifest.files)[self._ranks.rank :: self._ranks.world_size]
        return {name: found[0] for name in mine if (found := self._store.verify(step, [name], manifest))}

    def _load(
        self, manifest: Manifest, source: Source, templates: Mapping[str, Any], names: Collection[str] | None
    ) -> RestoredCheckpoint:
        trees = self._read_trees(manifest.step, source, templates, names)
        mine = trees.get(local_key(self._ranks.number))
        self._disks.check_place(manifest, local_key(self._ranks.number) in trees)
        contents, path = _contents(source.index), self._store.path(manifest.step)
        return RestoredCheckpoint(
            manifest.step, path, self._shared(trees), mine, manifest, contents, source, manifest.step
        )

    def _shared(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        return {_name(key): tree for key, tree in trees.items() if key != local_key(self._ranks.number)}

    def _read_trees(
        self,
        step: int,
        source: Source,
        templates: Mapping[str, Any],
        names: Collection[str] | None,
        wants: Callable[[str, str], bool] = lambda name, path: True,
    ) -> dict[str, Any]:
        """The trees that this rank wants, by DCP's key, and its own."""

        def plan() -> tuple[Targets, dict[str, torch.Tensor]]:
            live, new, left_out = self._wanted(source.index, templates, names, wants)
            return Targets(live, new, source.index), left_out

        def read() -> dict[str, Any]:
            targets, left_out = self._ranks.all_or_none(plan)
            source.read(targets)
            return targets.found | left_out

        with as_checkpoint_error(f"the checkpoint of step {step} is whole but cannot be loaded", self._disks.everyone):
            return _trees(self._disks.together(read), source.index.objects)

    def _wanted(
        self,
        index: Index,
        templates: Mapping[str, Any],
        names: Collection[str] | None,
        wants: Callable[[str, str], bool],
    ) -> tuple[dict[str, torch.Tensor], list[str], dict[str, torch.Tensor]]:
        """By DCP's key the tensors to be filled in place, what comes new, and what does not: on the meta device."""
        there = {
            f"{tree_key(SHARED, name)}/{path}": tensor
            for name, tree in templates.items()
            for path, tensor in named_tensors(tree).items()
            if isinstance(tensor, DTensor)
        }
        chosen = None if names is None else {tree_key(SHARED, name) for name in names}
        live: dict[str, torch.Tensor] = {}
        new: list[str] = []
        left_out: dict[str, torch.Tensor] = {}
        for tree, tensors in index.trees.items():
            is_shared = tree.startswith(f"{SHARED}.") and (chosen is None or tree in chosen)
            if not is_shared and tree != local_key(self._ranks.number):
                continue
            name = _name(tree)
            for path, (shape, dtype) in tensors.items():
                key = f"{tree}/{path}"
                if is_shared and not wants(name, path):
                    left_out[key] = torch.empty(shape, dtype=dtype, device="meta")
                elif key in there:
                    live[key] = there[key]
                else:
                    new.append(key)
            new.append(tree)
        return live, new, left_out


def _name(tree: str) -> str:
    return unescape(tree.removeprefix(f"{SHARED}."))


def _contents(index: Index) -> dict[str, Contents]:
    return {_name(tree): tensors for tree, tensors in index.trees.items() if tree.startswith(f"{SHARED}.")}


def _trees(found: dict[str, Any], skeletons: Iterable[str]) -> dict[str, Any]:
    """Put the trees together, of their skeletons and tensors, by DCP's key."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in found.items():
        tree, slash, path = key.partition("/")
        if slash:
            tensors.setdefault(tree, {})[path] = value
    return {key: unflatten(found[key], tensors.get(key, {})) for key in skeletons if key in found}
