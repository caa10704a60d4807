"""Buffers that only launches fill and read, and the recording of launches for a later replay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.engines.triton.launching import precompile


class LaunchRecording(NamedTuple):
    """What `record_launches` recorded.

    - launches: each `launch.Launch` with the pointers of its arrays.
    - buffers: the arrays that `allocate_buffer` made.
    - reusable_buffers: buffers that may be used again, by pointer, with their first free byte.
    - kept_alive: all arrays of launches, so that no two of them share an address.
    - slices: pointers of slices, with the pointer of the whole array and the offset in bytes.
    """

    launches: list[tuple[Any, Sequence[int | None]]]
    buffers: list[Tensor]
    reusable_buffers: dict[int, tuple[Tensor, int]]
    kept_alive: list[Tensor | None]
    slices: set[tuple[int, int, int]]

    @property
    def used_pointers(self) -> set[int | None]:
        """The pointers of all arrays of launches."""
        return {x for _, had in self.launches for x in had}


CURRENT_RECORDING: ContextVar[LaunchRecording | None] = ContextVar(
    "CURRENT_RECORDING", default=None
)


@contextmanager
def record_launches() -> Iterator[LaunchRecording]:
    """Record the launches made inside this context."""
    recording = LaunchRecording([], [], {}, [], set())
    token = CURRENT_RECORDING.set(recording)
    try:
        yield recording
    finally:
        CURRENT_RECORDING.reset(token)


def allocate_buffer(
    like: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a new buffer, or a part of one that is free; a replay allocates it again.

    Only launches may fill and read it. Results of a replayed function are buffers too.
    """
    recording = CURRENT_RECORDING.get()
    if recording is None or precompile.DRY_RUN_JOBS.get() is not None:  # a dry run is not replayed
        return like.new_empty(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    free = [
        at
        for at, (buffer, begin) in recording.reusable_buffers.items()
        if buffer.nbytes - begin >= size > 0
    ]
    if not free:
        recording.buffers.append(like.new_empty(shape, dtype=dtype))
        return recording.buffers[-1]
    buffer, begin = recording.reusable_buffers[
        min(free, key=lambda at: recording.reusable_buffers[at][0].nbytes)
    ]
    recording.reusable_buffers[buffer.data_ptr()] = buffer, begin + -(-size // 128) * 128
    return slice_recorded(buffer, slice(begin, begin + size)).view(dtype).view(shape)


def reuse_buffers(jobs: Iterable[Any]) -> Iterator[Any]:
    """Yield the jobs; the buffers of one job are free for the next job and for later code."""
    recording = CURRENT_RECORDING.get()
    first = 0 if recording is None else len(recording.buffers)
    for job in jobs:
        yield job
        if recording is not None:
            freed = [x.view(-1).view(torch.int8) for x in recording.buffers[first:]]
            recording.reusable_buffers.update({x.data_ptr(): (x, 0) for x in freed})


def slice_recorded(x: Tensor | None, at: Any) -> Any:
    """Return x[at], recorded so that a replay finds the slice in the new x."""
    if x is None:
        return None
    part, recording = x[at], CURRENT_RECORDING.get()
    if recording is not None:
        recording.slices.add((part.data_ptr(), x.data_ptr(), part.data_ptr() - x.data_ptr()))
    return part


def allocate_aligned(
    like: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a buffer whose rows start at multiples of 16 elements.

    Strides are then multiples of 16 for every length, so one compiled kernel serves all lengths.
    """
    if not shape:
        return allocate_buffer(like, (), dtype)
    *lead, length = shape
    return allocate_buffer(like, (*lead, -(-length // 16) * 16), dtype)[..., :length]


def align_rows(x: Tensor) -> Tensor:
    """Return x (B, H, rows, 1) with heads that start at multiples of 16 elements."""
    if not (x.stride(0) | x.stride(1)) % 16:
        return x
    short = -x.shape[2] % 16
    return torch.nn.functional.pad(x, (0, 0, 0, short))[:, :, : x.shape[2]]
