"""Room for what launches alone fill and read, and what is noted of them to be made again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton import precompile


class LaunchRecording(NamedTuple):
    """Each `launch.Launch`, with where its arrays lie; the arrays that were made for them by
    `allocate_buffer`, and those that serve in turn, from which byte on they are free; all that they
    had, so that none of those lies where another did; and where parts of arrays begin, the array,
    and by how many bytes."""

    launches: list[tuple[Any, Sequence[int | None]]]
    buffers: list[Tensor]
    reusable_buffers: dict[int, tuple[Tensor, int]]
    kept_alive: list[Tensor | None]
    slices: set[tuple[int, int, int]]

    @property
    def used_pointers(self) -> set[int | None]:
        """Where all arrays of launches begin."""
        return {x for _, had in self.launches for x in had}


CURRENT_RECORDING: ContextVar[LaunchRecording | None] = ContextVar(
    "CURRENT_RECORDING", default=None
)


@contextmanager
def record_launches() -> Iterator[LaunchRecording]:
    """What is launched meanwhile."""
    notes = LaunchRecording([], [], {}, [], set())
    token = CURRENT_RECORDING.set(notes)
    try:
        yield notes
    finally:
        CURRENT_RECORDING.reset(token)


def allocate_buffer(
    like: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Room that launches alone fill and read, beside results: where they are made again, it is
    made with them."""
    notes = CURRENT_RECORDING.get()
    if notes is None or precompile.DRY_RUN_JOBS.get() is not None:  # a dry run's is for nothing
        return like.new_empty(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    free = [
        at
        for at, (room, begin) in notes.reusable_buffers.items()
        if room.nbytes - begin >= size > 0
    ]
    if not free:
        notes.buffers.append(like.new_empty(shape, dtype=dtype))
        return notes.buffers[-1]
    room, begin = notes.reusable_buffers[
        min(free, key=lambda at: notes.reusable_buffers[at][0].nbytes)
    ]
    notes.reusable_buffers[room.data_ptr()] = room, begin + -(-size // 128) * 128
    return slice_recorded(room, slice(begin, begin + size)).view(dtype).view(shape)


def reuse_buffers(jobs: Iterable[Any]) -> Iterator[Any]:
    """The jobs; what `allocate_buffer` makes for one is free for the next, and for what follows
    them."""
    notes = CURRENT_RECORDING.get()
    first = 0 if notes is None else len(notes.buffers)
    for job in jobs:
        yield job
        if notes is not None:
            some = [x.view(-1).view(torch.int8) for x in notes.buffers[first:]]
            notes.reusable_buffers.update({x.data_ptr(): (x, 0) for x in some})


def slice_recorded(x: Tensor | None, at: Any) -> Any:
    """x[at], which launches may take as they take x."""
    if x is None:
        return None
    part, notes = x[at], CURRENT_RECORDING.get()
    if notes is not None:
        notes.slices.add((part.data_ptr(), x.data_ptr(), part.data_ptr() - x.data_ptr()))
    return part


def allocate_aligned(
    like: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Room for numbers, each line of which begins at a multiple of 16 of them.

    So the strides are such whatever the length, and one compiled kernel reads them all.
    """
    if not shape:
        return allocate_buffer(like, (), dtype)
    *lead, length = shape
    return allocate_buffer(like, (*lead, -(-length // 16) * 16), dtype)[..., :length]


def align_rows(x: Tensor) -> Tensor:
    """x (B, H, rows, 1) in such room; as it is where it lies so."""
    if not (x.stride(0) | x.stride(1)) % 16:
        return x
    short = -x.shape[2] % 16
    return torch.nn.functional.pad(x, (0, 0, 0, short))[:, :, : x.shape[2]]
