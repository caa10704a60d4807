"""Room for what launches alone fill and read, and what is noted of them to be made again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton import ahead


class Notes(NamedTuple):
    """Each `launch.Launch`, with where its arrays lie; the arrays that were made for them by `new`,
    and those that serve in turn, from which byte on they are free; all that they had, so that none
    of those lies where another did; and where parts of arrays begin, the array, and by how many
    bytes."""

    launches: list[tuple[Any, Sequence[int | None]]]
    rooms: list[Tensor]
    spare: dict[int, tuple[Tensor, int]]
    held: list[Tensor | None]
    cuts: set[tuple[int, int, int]]

    @property
    def used(self) -> set[int | None]:
        """Where all arrays of launches begin."""
        return {x for _, had in self.launches for x in had}


NOTES: ContextVar[Notes | None] = ContextVar("NOTES", default=None)


@contextmanager
def noted() -> Iterator[Notes]:
    """What is launched meanwhile."""
    notes = Notes([], [], {}, [], set())
    token = NOTES.set(notes)
    try:
        yield notes
    finally:
        NOTES.reset(token)


def new(like: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Room that launches alone fill and read, beside results: where they are made again, it is
    made with them."""
    notes = NOTES.get()
    if notes is None or ahead.LISTED.get() is not None:  # a dry run's is for nothing
        return like.new_empty(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    free = [at for at, (room, begin) in notes.spare.items() if room.nbytes - begin >= size > 0]
    if not free:
        notes.rooms.append(like.new_empty(shape, dtype=dtype))
        return notes.rooms[-1]
    room, begin = notes.spare[min(free, key=lambda at: notes.spare[at][0].nbytes)]
    notes.spare[room.data_ptr()] = room, begin + -(-size // 128) * 128
    return cut(room, slice(begin, begin + size)).view(dtype).view(shape)


def in_turn(jobs: Iterable[Any]) -> Iterator[Any]:
    """The jobs; what `new` makes for one is free for the next, and for what follows them."""
    notes = NOTES.get()
    first = 0 if notes is None else len(notes.rooms)
    for job in jobs:
        yield job
        if notes is not None:
            some = [x.view(-1).view(torch.int8) for x in notes.rooms[first:]]
            notes.spare.update({x.data_ptr(): (x, 0) for x in some})


def cut(x: Tensor | None, at: Any) -> Any:
    """x[at], which launches may take as they take x."""
    if x is None:
        return None
    part, notes = x[at], NOTES.get()
    if notes is not None:
        notes.cuts.add((part.data_ptr(), x.data_ptr(), part.data_ptr() - x.data_ptr()))
    return part


def even(like: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Room for numbers, each line of which begins at a multiple of 16 of them.

    So the strides are such whatever the length, and one compiled kernel reads them all.
    """
    if not shape:
        return new(like, (), dtype)
    *lead, length = shape
    return new(like, (*lead, -(-length // 16) * 16), dtype)[..., :length]


def evenly(x: Tensor) -> Tensor:
    """x (B, H, rows, 1) in such room; as it is where it lies so."""
    if not (x.stride(0) | x.stride(1)) % 16:
        return x
    short = -x.shape[2] % 16
    return torch.nn.functional.pad(x, (0, 0, 0, short))[:, :, : x.shape[2]]
