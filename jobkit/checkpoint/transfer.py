"""Bytes that some ranks have and others need: sent in blocks, from one rank to the next, through host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from jobkit.checkpoint.storage import raw
from jobkit.group import RankGroup

_BLOCK = 8 << 20


@dataclass(frozen=True)
class Transfer:
    """Some bytes, the ranks that can read them, and those that need them."""

    nbytes: int
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


Action = Callable[[int, int, memoryview], None]
"""Reads, or takes, the bytes of a transfer by its number, from the given byte on."""


@dataclass
class _Block:
    """What is sent at once: parts of transfers between the same ranks, as (number, first byte, length)."""

    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    nbytes: int = 0

    def chain(self, turn: int) -> list[int]:
        """The ranks it goes through: one of those that have it, in turns, and from it on those that need it."""
        source = self.holders[turn % len(self.holders)]
        return [source, *sorted(set(self.receivers) - {source}, key=lambda rank: (rank < source, rank))]


def send_all(ranks: RankGroup, transfers: Sequence[Transfer], read: Action, write: Action) -> None:
    """Have every receiver `write` what one of the holders `read`s. Collective; transfers are the same on all ranks.

    Each byte is read once, in turns by those that can, and no rank has more than one block of it in its memory. What
    goes wrong on any rank is raised on all, once all have come to the end: none waits for one that has given up.
    """
    problem: Exception | None = None
    blocks = _blocks(transfers)
    # Of each block the first byte says whether the others could be read.
    memory = torch.empty(1 + max((block.nbytes for block in blocks), default=0), dtype=torch.uint8)
    for turn, block in enumerate(blocks):
        chain = block.chain(turn)
        if ranks.rank not in chain:
            continue
        place, buffer = chain.index(ranks.rank), memory[: 1 + block.nbytes]
        if place:
            ranks.receive(buffer, chain[place - 1])
        else:
            buffer[0] = (failed := _each_part(block, buffer, read)) is not None
            problem = problem or failed
        sent = ranks.start_sending(buffer, chain[place + 1]) if place + 1 < len(chain) else None
        if ranks.rank in block.receivers and not buffer[0]:
            problem = _each_part(block, buffer, write) or problem
        if sent is not None:
            sent.wait()
    ranks.all_or_none(lambda: _raise(problem))


def _each_part(block: _Block, buffer: torch.Tensor, action: Action) -> Exception | None:
    data, position = raw(buffer), 1
    try:
        for number, start, length in block.parts:
            action(number, start, data[position : position + length])
            position += length
    except Exception as error:
        return error
    return None


def _blocks(transfers: Sequence[Transfer]) -> list[_Block]:
    blocks: list[_Block] = []
    for number, transfer in enumerate(transfers):
        start = 0
        while start < transfer.nbytes:
            last = blocks[-1] if blocks else None
            if last is None or last.nbytes == _BLOCK or (last.holders, last.receivers) != _between(transfer):
                last = _Block(*_between(transfer))
                blocks.append(last)
            length = min(transfer.nbytes - start, _BLOCK - last.nbytes)
            last.parts.append((number, start, length))
            last.nbytes += length
            start += length
    return blocks


def _between(transfer: Transfer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return transfer.holders, transfer.receivers


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem
