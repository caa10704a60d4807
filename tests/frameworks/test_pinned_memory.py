"""Buffers on the way to a device, with a device that is late."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from qkv import attention  # noqa: E402
from qkv.frameworks import get_framework, pinned_memory  # noqa: E402
from qkv.frameworks import torch as adapter  # noqa: E402
from qkv.frameworks.stored_rows import RowChunk, StoredRows  # noqa: E402


class Late(pinned_memory.PinnedBuffers):
    """A device that reads no buffer before it is waited for."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.waiting, self.most = {}, 0

    def _allocate_buffer(self, size):
        return torch.empty(size, dtype=torch.uint8)

    def copy_to_device(self, data):
        self.now = (self._next_buffer, data.shape)
        self.out = super().copy_to_device(data)
        self.out.fill_(-1)
        self.waiting[self.now[0]] = (self.out, self._buffers[self.now[0]], data.nbytes)
        self.most = max(self.most, len(self.waiting))
        return self.out

    def _record_event(self):
        return Event(self, self.now[0])

    def arrive(self, turn):
        if turn in self.waiting:
            out, room, size = self.waiting.pop(turn)
            out.copy_(room[:size].view(out.dtype).view(out.shape))


class Event:
    def __init__(self, device, turn):
        self.device, self.turn = device, turn

    def synchronize(self):
        self.device.arrive(self.turn)


def test_no_buffer_is_filled_before_the_device_has_read_it():
    device, sent = Late(), []
    for i in range(11):
        data = np.full((5 + i % 3, 4), i, np.float32 if i % 2 else np.float16)
        sent.append(device.copy_to_device(data))
        data[:] = -2
    for turn in range(pinned_memory.BUFFERS_PER_DEVICE):
        device.arrive(turn)
    assert device.most == pinned_memory.BUFFERS_PER_DEVICE
    for i, out in enumerate(sent):
        assert out.shape == (5 + i % 3, 4) and (out == i).all()


def test_rows_that_are_sent_are_those_that_are_read(monkeypatch):
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 1500, 8)).astype(np.float16)
    rows = StoredRows(lambda: [RowChunk(keys, values)], keys.shape, 8)
    query = torch.from_numpy(rng.normal(size=(3, 8)).astype(np.float32))
    options, count = {"score": "dot", "weighting": "softmax"}, []
    want = attention.attend_rows(rows, query, **options)

    def read(self, data, like, dtype):
        device = Late()
        out = device.copy_to_device(np.ascontiguousarray(data))
        device.arrive(0)
        count.append(data.nbytes)
        return out.to(getattr(torch, dtype))

    monkeypatch.setattr(adapter.Torch, "block_from_host", read)
    assert torch.equal(attention.attend_rows(rows, query, **options), want)
    assert sum(count) == keys.nbytes + values.nbytes


def test_what_stays_on_the_host_is_not_copied():
    data, like = np.ones((pinned_memory.MIN_PINNED_BYTES // 4, 2), np.float32), torch.ones(1)
    assert get_framework(like).block_from_host(data, like, "float32").data_ptr() == data.ctypes.data
