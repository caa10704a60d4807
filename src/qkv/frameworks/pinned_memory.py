"""Copy host arrays to a CUDA device through pinned memory, in their stored data type."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

MIN_PINNED_BYTES = 2**20
"""The smallest array that is copied through a pinned buffer. For smaller ones this takes longer."""

BUFFERS_PER_DEVICE = 4
"""Buffers per thread and device: keys and values of one block are copied while those of the next
are read."""


class PinnedBuffers:
    """A ring of pinned buffers. The host fills a buffer again after the device has read it.

    Reading a file, copying and computing overlap. The host is at most BUFFERS_PER_DEVICE arrays
    ahead of the device.
    """

    def __init__(self, device: torch.device):
        self.device, self._next_buffer = device, 0
        self._buffers: list[Any] = [None] * BUFFERS_PER_DEVICE
        self._copy_events: list[Any] = [None] * BUFFERS_PER_DEVICE

    def copy_to_device(self, data: np.ndarray) -> torch.Tensor:
        """Return the array on the device; the copy is queued on the current stream."""
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
        """Return an event that completes when the device has done all work queued so far."""
        return torch.cuda.current_stream(self.device).record_event()


_THREAD_BUFFERS = threading.local()


def copy_to_device(data: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array on the device, copied through the buffers of this thread."""
    held: dict[torch.device, PinnedBuffers] = vars(_THREAD_BUFFERS).setdefault("held", {})
    if device not in held:
        held[device] = PinnedBuffers(device)
    return held[device].copy_to_device(data)
