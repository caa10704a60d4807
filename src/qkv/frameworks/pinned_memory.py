"""Host arrays on their way to a CUDA device, narrow as they are kept, through memory that it reads
by itself."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

MIN_PINNED_BYTES = 2**20
"""Bytes from which on an array goes through a buffer: the wait for fewer is not worth one."""

BUFFERS_PER_DEVICE = 4
"""Buffers of each thread and device: the keys and the values of one block are on their way while
those of the next are read."""


class PinnedBuffers:
    """Buffers in turn, each filled anew when the device has read it. So reading a file, sending
    what was read and the arithmetic on what was sent go on side by side, and the host is never more
    than ROOMS arrays ahead."""

    def __init__(self, device: torch.device):
        self.device, self._next_buffer = device, 0
        self._buffers: list[Any] = [None] * BUFFERS_PER_DEVICE
        self._copy_events: list[Any] = [None] * BUFFERS_PER_DEVICE

    def copy_to_device(self, data: np.ndarray) -> torch.Tensor:
        """The same numbers on the device, as soon as its queue comes to them."""
        i, size = self._next_buffer, data.nbytes
        self._next_buffer = (i + 1) % BUFFERS_PER_DEVICE
        if self._copy_events[i] is not None:
            self._copy_events[i].synchronize()
        if self._buffers[i] is None or len(self._buffers[i]) < size:
            self._buffers[i] = self._allocate_buffer(size)
        host = self._buffers[i][:size].view(torch.from_numpy(data[:0]).dtype).view(data.shape)
        host.copy_(torch.from_numpy(data))
        out = torch.empty(data.shape, dtype=host.dtype, device=self.device)
        out.copy_(host, non_blocking=True)
        self._copy_events[i] = self._record_event()
        return out

    def _allocate_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")

    def _record_event(self) -> Any:
        """What is reached when the device has done all that it was told so far."""
        return torch.cuda.current_stream(self.device).record_event()


_THREAD = threading.local()


def copy_to_device(data: np.ndarray, device: torch.device) -> torch.Tensor:
    """Through the buffers of this thread."""
    held: dict[torch.device, PinnedBuffers] = vars(_THREAD).setdefault("held", {})
    if device not in held:
        held[device] = PinnedBuffers(device)
    return held[device].copy_to_device(data)
