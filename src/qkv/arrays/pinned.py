"""Host arrays on their way to a CUDA device, narrow as they are kept, through memory that it reads
by itself."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

LEAST = 2**20
"""Bytes from which on an array goes through a buffer: the wait for fewer is not worth one."""

ROOMS = 4
"""Buffers of each thread and device: the keys and the values of one block are on their way while
those of the next are read."""


class Pinned:
    """Buffers in turn, each filled anew when the device has read it. So reading a file, sending
    what was read and the arithmetic on what was sent go on side by side, and the host is never more
    than ROOMS arrays ahead."""

    def __init__(self, device: torch.device):
        self.device, self._turn = device, 0
        self._rooms: list[Any] = [None] * ROOMS
        self._done: list[Any] = [None] * ROOMS

    def sent(self, data: np.ndarray) -> torch.Tensor:
        """The same numbers on the device, as soon as its queue comes to them."""
        i, size = self._turn, data.nbytes
        self._turn = (i + 1) % ROOMS
        if self._done[i] is not None:
            self._done[i].synchronize()
        if self._rooms[i] is None or len(self._rooms[i]) < size:
            self._rooms[i] = self._room(size)
        host = self._rooms[i][:size].view(torch.from_numpy(data[:0]).dtype).view(data.shape)
        host.copy_(torch.from_numpy(data))
        out = torch.empty(data.shape, dtype=host.dtype, device=self.device)
        out.copy_(host, non_blocking=True)
        self._done[i] = self._mark()
        return out

    def _room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")

    def _mark(self) -> Any:
        """What is reached when the device has done all that it was told so far."""
        return torch.cuda.current_stream(self.device).record_event()


_THREAD = threading.local()


def sent(data: np.ndarray, device: torch.device) -> torch.Tensor:
    """Through the buffers of this thread."""
    held: dict[torch.device, Pinned] = vars(_THREAD).setdefault("held", {})
    if device not in held:
        held[device] = Pinned(device)
    return held[device].sent(data)
