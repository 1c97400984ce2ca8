"""What a function returns for a dataset's samples: batch by batch where it was computed, and brought together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_unflatten

from jobkit.group import RankGroup
from jobkit.train.nested import map_tensors
from jobkit.train.pieces import Batch, Leaf, Packed, pack, unpacked

PIECE_BYTES = 32 << 20
"""Outputs are sent in pieces of about so many bytes, or of one batch where that has more."""

INLINE_BYTES = 64 << 10
"""What a rank has in all to send together with its announcement."""


@dataclass(frozen=True)
class Form:
    """What the outputs of all batches have in common: where the leaves are, and the type of each."""

    skeleton: Any
    """An output with the number of a leaf in the place of each."""
    leaves: tuple[tuple[str, torch.dtype | None, tuple[int, ...]], ...]
    """(its place, None for a list or the type, the shape of one sample's output)."""

    def different(self, other: Form) -> tuple[str, str] | None:
        """What the two are where they differ first, for an error."""
        if self.skeleton != other.skeleton:
            return self._outline(), other._outline()
        pairs = zip(self.leaves, other.leaves, strict=True)
        return next(((_described(one), _described(two)) for one, two in pairs if one != two), None)

    def _outline(self) -> str:
        if self.skeleton == 0:
            return "a list" if self.leaves[0][1] is None else "a tensor"
        names = f" of {', '.join(map(str, self.skeleton))}" if isinstance(self.skeleton, dict) else ""
        return f"a {type(self.skeleton).__name__}{names}"


class Outputs:
    """The outputs of a dataset's samples as far as this rank has them, and which batches are known on any rank.

    A dataset is cut into batches the same way always. What a function returns for n samples is a tensor [n, ...], a
    list of n objects that pickle takes, or a dict or tuple of such, of any depth; None stands for n times None.
    """

    def __init__(self, length: int, batch_size: int) -> None:
        if length < 1:
            raise ValueError("the dataset is empty: there is nothing to evaluate or to map")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, and must be at least 1")
        self.length = length
        self.batch_size = batch_size
        self.of = ""
        """What was called on what, for another attempt to know it by."""
        self.known = torch.zeros(math.ceil(length / batch_size), dtype=torch.bool)
        """Whether any rank has the outputs of batch number `i`."""
        self.form: Form | None = None
        """None as long as this rank knows of no batch."""
        self.pieces: list[Tensor] = []
        """Whole batches as `pack` has them: on rank 0, what an earlier attempt has left or what was gathered."""
        self._own: dict[int, list[Leaf]] = {}

    def header(self) -> tuple[Any, ...]:
        """All but the outputs, for `of_header`."""
        return self.length, self.batch_size, self.of, self.known, self.form

    @classmethod
    def of_header(cls, header: tuple[Any, ...]) -> Outputs:
        """Outputs without pieces, as of another rank, or of one whose pieces are read elsewhere."""
        outputs = cls(*header[:2])
        outputs.of, outputs.known, outputs.form = header[2:]
        return outputs

    @property
    def done(self) -> int:
        """How many samples have their outputs."""
        return int(self.known.repeat_interleave(self.batch_size)[: self.length].sum())

    def missing(self) -> list[int]:
        """Numbers of the batches whose outputs are not known."""
        return torch.nonzero(~self.known).flatten().tolist()

    def ids(self, number: int) -> Tensor:
        """The samples of a batch, int64 [n]."""
        return torch.arange(number * self.batch_size, min(self.length, (number + 1) * self.batch_size))

    def add(self, number: int, output: Any) -> None:
        """Take down what the function returned for a batch; ValueError where that is not one output a sample."""
        count = len(self.ids(number))
        given = [None] * count if output is None else _in_order(output)
        found, spec = tree_flatten_with_path(given, is_leaf=_is_list)
        found = [(path, [None] * count if leaf is None else leaf) for path, leaf in found]
        if not found:
            raise ValueError(f"function returned an empty {type(output).__name__}, expected outputs of {count} samples")
        for path, leaf in found:
            if not (isinstance(leaf, (Tensor, list)) and _length(leaf) == count):
                where = f" as {keystr(path)}" if path else ""
                raise ValueError(
                    f"function returned {_name(leaf)}{where}, expected a tensor [{count}, ...] or a list of {count}: "
                    f"an output for each of {count} samples"
                )
        leaves = [_kept(leaf) for _, leaf in found]
        kinds = [
            (keystr(path), leaf.dtype, tuple(leaf.shape[1:])) if isinstance(leaf, Tensor) else (keystr(path), None, ())
            for (path, _), leaf in zip(found, leaves, strict=True)
        ]
        form = Form(tree_unflatten(range(len(kinds)), spec), tuple(kinds))
        if self.form is not None and (names := form.different(self.form)) is not None:
            raise ValueError(f"function returned {names[0]}, and {names[1]} for another batch")
        self.form = form
        self._own[number] = leaves
        self.known[number] = True

    # All ranks together

    def agree(self, group: RankGroup) -> None:
        """Let every rank know which batches are known; where several have computed one, only the last one's counts."""
        if group.world_size == 1:
            return
        owner = torch.full((len(self.known),), -1)
        owner[list(self._own)] = group.rank
        dist.all_reduce(owner, dist.ReduceOp.MAX, group=group.group)
        self._own = {number: leaves for number, leaves in self._own.items() if owner[number] == group.rank}
        self.known |= owner >= 0

    def gathered(
        self, group: RankGroup, *, to_all: bool = True, keep: bool = False, on_piece: Callable[[], None] = lambda: None
    ) -> Any:
        """The outputs of all samples, in their order: on all ranks, or on rank 0 and None on the others.

        Tensors are [length, ...] on the CPU, lists have `length` objects. With `keep` rank 0 has them as pieces too;
        without it nothing is known here any more.
        Raises ValueError, on all ranks, where functions returned on two ranks what does not fit together.
        """
        whole: list[Leaf] = []
        kept = []
        for piece in self._exchanged(group, to_all, on_piece):
            assert self.form is not None
            whole = whole or [self._room(dtype, shape) for _, dtype, shape in self.form.leaves]
            for number, leaves in unpacked(piece):
                ids = slice(number * self.batch_size, (number + 1) * self.batch_size)
                for all_of_it, part in zip(whole, leaves, strict=True):
                    all_of_it[ids] = part  # type: ignore[assignment]
            if keep and group.is_main:
                kept.append(piece)
        self.pieces = kept
        if not keep:
            self.known.fill_(False)
        return tree_map(whole.__getitem__, self.form.skeleton) if whole and self.form is not None else None

    def collect(self, group: RankGroup, on_piece: Callable[[], None] = lambda: None) -> None:
        """Bring what is known to rank 0, as pieces."""
        self.pieces = list(self._exchanged(group, False, on_piece))

    def _room(self, dtype: torch.dtype | None, shape: tuple[int, ...]) -> Leaf:
        return [None] * self.length if dtype is None else torch.empty(self.length, *shape, dtype=dtype)

    def _exchanged(self, group: RankGroup, to_all: bool, on_piece: Callable[[], None]) -> Iterator[Tensor]:
        """Every piece of every rank, on rank 0 or on all; nobody has them any more when all were taken."""
        mine = group.all_or_none(self._packed)
        sizes = [piece.size for piece in mine]
        inline = [piece.written() for piece in mine] if sum(sizes) <= INLINE_BYTES else None
        everyones = group.gather((self.form, sizes, inline))
        self.form = _common([form for form, *_ in everyones if form is not None])
        for source, (_, sizes, inline) in enumerate(everyones):
            to = set(range(group.world_size)) if to_all else {0}
            for number, size in enumerate(sizes):
                if inline is not None:
                    piece = inline[number]
                elif group.rank == source:
                    piece, mine[number] = mine[number].written(), Packed(b"", [])
                else:
                    piece = torch.empty(size if group.rank in to else 0, dtype=torch.uint8)
                if inline is None and to - {source}:
                    group.give(piece, source, to - {source})
                if group.rank in to:
                    yield piece
                on_piece()

    def _packed(self) -> list[Packed]:
        """What this rank has, which then is nowhere else."""
        pieces = [Packed(b"", [], piece) for piece in self.pieces]
        self.pieces = []
        batches: list[Batch] = []
        size = 0
        while self._own:
            number = next(iter(self._own))
            batches.append((number, self._own.pop(number)))
            size += sum(_bytes(leaf) for leaf in batches[-1][1])
            if size >= PIECE_BYTES or not self._own:
                pieces.append(pack(batches))
                batches, size = [], 0
        return pieces


# What an output is


def _common(forms: list[Form]) -> Form | None:
    """The form of all ranks; one without a batch has none."""
    for other in forms[1:]:
        if (names := forms[0].different(other)) is not None:
            raise ValueError(f"function returned {names[0]} on one rank, and {names[1]} on another")
    return forms[0] if forms else None


def _in_order(output: Any) -> Any:
    """An output with the keys of its dicts sorted, which may come in another order for another batch."""
    if type(output) is dict:
        return {key: _in_order(output[key]) for key in sorted(output, key=str)}
    return output


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _length(leaf: Leaf) -> int | None:
    return None if isinstance(leaf, Tensor) and not leaf.dim() else len(leaf)


def _bytes(leaf: Leaf) -> int:
    """About what a leaf takes; of objects other than tensors that is not known."""
    sizes = [0]

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(note, leaf)
    return sum(sizes)


def _kept(leaf: Leaf) -> Leaf:
    """Copies of the tensors and arrays of an output, of which a function may use the memory again."""
    copied: Leaf = map_tensors(_copied, leaf)
    if isinstance(copied, list):
        return [one.copy() if isinstance(one, np.ndarray) else one for one in copied]
    return copied


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which nobody else writes to."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _name(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"shape {tuple(leaf.shape)}"
    return f"a list of {len(leaf)}" if isinstance(leaf, list) else type(leaf).__name__


def _described(leaf: tuple[str, torch.dtype | None, tuple[int, ...]]) -> str:
    where, dtype, shape = leaf
    what = "a list" if dtype is None else f"a tensor {str(['n', *shape]).replace(chr(39), '')} of {dtype}"
    return f"{what} as {where}" if where else what
