"""The trace of a run of `jobkit verify`: each rank's values, samples and state, boundary by boundary.

loop --(boundary, values, samples)--> Trace --leaf digests, what lives--> trace/<attempt>/<rank>.jsonl --> verify/
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import xxhash
from torch.nn.parallel import DistributedDataParallel

from jobkit.checkpoint.digests import leaf_digests, plain_leaves, storage_of, tensor_digests
from jobkit.checkpoint.leaves import Leaves, plain_module
from jobkit.checkpoint.tree import flatten
from jobkit.data.loader import Loader
from jobkit.errors import CheckpointError
from jobkit.loop.rank import Rank
from jobkit.loop.saving import Boundary
from jobkit.loop.tracked import OWN, Tracked
from jobkit.loop.untracked import Looker
from jobkit.run.records import About

NOT_NAMED = ("/dev/", "/proc/", "/sys/", f"{tempfile.gettempdir()}/")
"""Folders whose files nobody expects to be restored; those in hidden folders are caches."""

MAX_FILES = 10
"""Names of files in a report."""

OF_STREAMS = re.compile(r"(^|\.)(stream|following|back)(\.|$)")
"""Leaves of a loader with the state of a foreign stream: it may be written in another form after a restart. Its samples
are compared."""


class Trace:
    """Writes one rank's trace. Each line is on its way to the disk before the rank goes on."""

    def __init__(self, rank: Rank, tracked: Tracked) -> None:
        folder = rank.run.trace_folder / str(rank.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{rank.rank}.jsonl").open("w", encoding="utf-8")
        self._tracked, self._looker = tracked, Looker()
        self._values: dict[str, str] = {}
        self._batches: list[str] = []
        self._about: dict[str, About] = {}
        """What the file has."""
        self.samples: Callable[[], list[int]] = list
        """Gives the ids of the samples of the step that ends."""
        self._runs_dir = f"{rank.run.path.parent.absolute()}/"
        self._written: set[str] = set()
        sys.addaudithook(self._note_open)

    def _note_open(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's audit hook: note a file that is opened for writing."""
        if event != "open" or not isinstance(arguments[0], str):
            return
        if arguments[2] & (os.O_WRONLY | os.O_RDWR):
            path = os.path.abspath(arguments[0])  # noqa: PTH100 - a Path would open files of its own
            if not path.startswith((self._runs_dir, *NOT_NAMED)) and "/." not in path and "/__pycache__/" not in path:
                if os.path.isdir(path):  # noqa: PTH112 - O_TMPFILE: a file in it that never has a name
                    return
                self._written.add(path)

    @property
    def written(self) -> list[str]:
        """The first files outside the runs directory that this rank has opened for writing."""
        return sorted(self._written)[:MAX_FILES]

    def take(self, values: Mapping[str, float]) -> None:
        """Note values that were logged, by their raw bits."""
        self._values |= {name: struct.pack("<d", float(value)).hex() for name, value in values.items()}

    def see(self, batch: Any) -> None:
        """Note a batch by its bits: it stands for samples that have no ids, as those of a stream."""
        try:
            tree = flatten(batch)
        except CheckpointError:  # an object of a library, as a batch of graphs
            return
        digests = tensor_digests(tree.leaves) | dict(plain_leaves(tree.skeleton))
        self._batches.append(xxhash.xxh3_64_hexdigest(json.dumps(digests, sort_keys=True).encode()))

    def write(self, boundary: Boundary, event: str, **more: Any) -> None:
        """Write a line: the place, values and samples since the line before, digests of the state, and of what lives
        untracked."""
        self._tracked.reshard()
        lives = self._tracked.checkpointer.stager.lives(self._tracked.entries)
        line = {
            **asdict(boundary),
            "event": event,
            "values": self._values,
            "samples": (self.samples() or self._batches) if event == "boundary" else [],
            "state": self._state(lives),
            **more,
        }
        if event in ("restored", "boundary"):
            line |= self._untracked(lives)
        if event == "restored":
            line |= {"trained": self._trained(lives), "divides_by_three": self._divides_by_three()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._values, self._batches = {}, []

    def _trained(self, lives: Mapping[str, Leaves]) -> list[str]:
        return [
            f"{name}.{path.replace('/', '.')}"
            for name, live in lives.items()
            for path, leaf in live.tensors.items()
            if leaf.requires_grad
        ]

    def _divides_by_three(self) -> bool | None:
        """Return whether the global batches do, of a program with DDP on the CPU; None where nothing says it."""
        objects = self._tracked.objects.values()
        models = [item for item in objects if isinstance(item, DistributedDataParallel)]
        sizes = [item.global_batch_size for item in objects if isinstance(item, Loader)]
        if not models or any(parameter.device.type != "cpu" for model in models for parameter in model.parameters()):
            return None
        return all(size % 3 == 0 for size in sizes) if sizes else None

    def _state(self, lives: Mapping[str, Leaves]) -> dict[str, str]:
        loaders = {entry.name for entry in self._tracked.entries if isinstance(entry.live, Loader)} | {f"{OWN}epochs"}
        return {
            f"{name}.{path}".rstrip("."): digest
            for name, live in lives.items()
            for path, digest in leaf_digests(live).items()
            if not (name in loaders and OF_STREAMS.search(path))
        }

    def _untracked(self, lives: Mapping[str, Leaves]) -> dict[str, Any]:
        tensors = [leaf for live in lives.values() for leaf in (*live.tensors.values(), *live.left_out.values())]
        objects = list(self._tracked.objects.values())
        seen = self._looker.look({storage_of(leaf) for leaf in tensors}, {id(plain_module(item)) for item in objects})
        new = {name: about for name, about in self._looker.about.items() if self._about.get(name) != about}
        self._about |= new
        return {
            "seen": {name: asdict(item) for name, item in seen.items()},
            "about": {name: asdict(about) for name, about in new.items()},
            "left_out": self._looker.left_out,
        }
